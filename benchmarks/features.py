"""Of how many images of a batch do gradients of dense layers tell the features exactly?

    python benchmarks/features.py --data cifar100 --model mlp --sizes 8 16 32 --json FILE.json
        [--train-steps 2000] [--batches 10] [--defense none prune:0.7] [--data-root DIR] [--seed 0]

Batches are drawn from the test split; labels are told. `--train-steps` trains the model first, by
SGD on the training split. An image counts as exact where what the attack found at the first dense
layer differs by less than a thousandth from what the layer gets of the image. `flower` is the CNN
of Flower's quickstart; of `mlp` the first dense layer gets the image itself.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from peeling import drawn
from torch import Tensor, nn

from federated import make_net
from gradveil import __version__
from gradveil.attacks.dense_layers import Found, trailing
from gradveil.attacks.features import find_features
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch
from gradveil.data import Images, load
from gradveil.defenses import parse
from gradveil.engine.gradients import cross_entropy
from gradveil.models import build
from gradveil.models.accuracy import measure_accuracy

EXACT = 1e-3  # relative error
RATE, MOMENTUM, TRAINED_ON = 0.02, 0.9, 64  # of the training, and images a step
FLOWER = "flower"


def make_model(name: str, train: Images, steps: int, seed: int) -> nn.Module:
    """Return the model after so many steps of SGD."""
    if name == FLOWER:
        model: nn.Module = make_net(train)
    else:
        facts = {"channels": train.channels, "size": train.size, "classes": len(train.classes)}
        model = build(name, **facts, mean=train.mean, std=train.std, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    rng = generator(seed, "training")
    for _ in range(steps):
        some = torch.randint(len(train), (TRAINED_ON,), generator=rng)
        optimizer.zero_grad()
        answers = model.train()(train.images[some].float() / 255)
        cross_entropy(answers, train.labels[some]).mean().backward()
        optimizer.step()
    return model.eval()


def inputs_of(model: nn.Module, layer: nn.Module, images: Tensor) -> Tensor:
    """Return what the layer gets of each image."""
    made: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: made.append(inputs[0]))
    with torch.no_grad():
        model(images)
    handle.remove()
    return made[0].double()


def count_exact(model: nn.Module, found: Found, batch: Batch) -> int:
    """Count the images of which the features found are exact."""
    true = inputs_of(model, found.layer, batch.images)
    apart = torch.cdist(true, found.features) / true.norm(dim=1, keepdim=True)
    return int((apart.min(1).values < EXACT).sum())


def measure(
    model: nn.Module, test: Images, defense: str, size: int, options: argparse.Namespace
) -> dict[str, Any]:
    client = Client(model, classes=len(test.classes), defense=parse(defense))
    exact, first, seconds, said = [], 0, 0.0, ""
    for seed, batch in drawn(test, size, options.batches, options.seed):
        seen = client.share_batches([batch], generator(seed, "share"))[0].seen
        began = time.perf_counter()
        try:
            found = find_features(seen, generator(seed, "attack"))[0]
        except GradveilError as error:
            exact.append(0)
            said = str(error)
        else:
            reached = found.layer is trailing(seen)[0].layer
            exact.append(count_exact(model, found, batch) if reached else 0)
            first += reached
        seconds += time.perf_counter() - began
    return {
        "defense": defense,
        "batch": size,
        "batches": options.batches,
        "exact": exact,
        "reached_first_layer": first,
        "last_error": said,
        "seconds_a_batch": seconds / options.batches,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--model", default=FLOWER)
    parser.add_argument("--train-steps", type=int, default=0)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--defense", nargs="+", default=["none"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        train, test = (
            load(options.data, kind, root=options.data_root) for kind in ("train", "test")
        )
        model = make_model(options.model, train, options.train_steps, options.seed)
        right, _ = measure_accuracy(model, test)
        rows = []
        for defense in options.defense:
            for size in options.sizes:
                row = measure(model, test, defense, size, options)
                print(
                    f"{defense}, batch {size}: {sum(row['exact'])} of {size * options.batches} "
                    f"exact, {row['seconds_a_batch']:.1f} s a batch {row['last_error']}",
                    flush=True,
                )
                rows.append(row)
    except GradveilError as error:
        raise SystemExit(f"error: {error}") from None
    if options.json:
        made = {
            "data": options.data,
            "model": options.model,
            "train_steps": options.train_steps,
            "accuracy": right,
            "seed": options.seed,
            "machine": f"{platform.machine()}, {options.threads} thread(s)",
            "gradveil": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "rows": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
