"""Show models to a client's look at what it received: honest ones, and ones made to leak.

    python benchmarks/received.py --json FILE [--data-root DIR] [--part chosen judged]

The thresholds of `gradveil.federated.received` were chosen on models like those of part `chosen`;
those of part `judged` were looked at once, afterwards. A row says whether a model is refused, and
how many images of a batch of 20 reach a unit of its first linear layer that no other image of the
batch reaches: these can be read from the gradient. What FILE holds already is skipped.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from federated import Net, some_of
from gradveil.core.files import write_bytes
from gradveil.core.seeds import forked, generator
from gradveil.data import Images, load
from gradveil.engine.gradients import cross_entropy
from gradveil.federated.received import suspicion
from gradveil.models import build

BATCH, BATCHES = 20, 10  # images of a batch, and batches, that exposure is measured on
IMAGES = 4_000  # of a training
PARTS = ("chosen", "judged")

# Part: data set, pixels, model, training, its stages in steps, seed.
HONEST: dict[str, tuple[tuple[str, int, str, str, tuple[int, ...], int], ...]] = {
    "chosen": tuple(
        (data, size, model, training, stages, 0)
        for data in ("fashion-mnist", "cifar100")
        for size, model, training, stages in (
            (16, "mlp-256-128", "sgd", (0, 30, 1_000)),
            (16, "mlp-256-128", "adam", (30, 1_000)),
            (16, "mlp-256-128", "weight decay", (1_000,)),
            (16, "mlp-256-128", "noise", (1_000,)),
            (28, "quickstart", "sgd", (0, 30, 300)),
            (16, "lenet", "sgd", (0, 300)),
        )
    ),
    "judged": tuple(
        (data, size, model, training, stages, 7)
        for data in ("fashion-mnist", "cifar100")
        for size, model, training, stages in (
            (28, "mlp-300-100", "sgd", (0, 20, 200, 2_000)),
            (28, "mlp-300-100", "adam", (100, 1_000)),
            (28, "mlp-300-100", "weight decay", (100, 1_000)),
            (28, "mlp-300-100", "pruned gradients", (100, 1_000)),
            (28, "mlp-300-100", "pruned weights", (100, 1_000)),
            (28, "mlp-300-100", "noise", (100, 1_000)),
            (32, "mlp-1024-64", "sgd", (0, 500)),
            (16, "mlp", "sgd", (0, 5, 100)),
            (28, "lenet", "sgd", (0, 20, 500)),
            (28, "quickstart", "adam", (0, 20, 500)),
            (28, "quickstart", "pruned weights", (300,)),
            (28, "quickstart", "noise", (300,)),
            (16, "convnet", "sgd", (0, 5, 20)),
            (16, "resnet20-4", "sgd", (0, 5, 15)),
            (16, "vit", "adam", (0, 5, 40)),
        )
    ),
}


def make_model(name: str, images: Images, seed: int) -> nn.Module:
    """Return an untrained model: quickstart, mlp-WIDTH-WIDTH, or one of gradveil's."""
    if name != "quickstart" and not name.startswith("mlp-"):
        return build(
            name,
            channels=images.channels,
            size=images.size,
            classes=len(images.classes),
            seed=seed,
        )
    with forked():
        torch.manual_seed(seed)
        if name == "quickstart":
            return Net(images.channels, images.size, len(images.classes))
        layers: list[nn.Module] = [nn.Flatten()]
        width = images.channels * images.size**2
        for wider in map(int, name.split("-")[1:]):
            layers += [nn.Linear(width, wider), nn.ReLU()]
            width = wider
        return nn.Sequential(*layers, nn.Linear(width, len(images.classes)))


def train(
    model: nn.Module, images: Images, training: str, stages: tuple[int, ...], seed: int
) -> Iterator[int]:
    """Train honestly, and stop at each of these steps; batches of 32."""
    decay = 1e-2 if training == "weight decay" else 0.0
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), 0.05, 0.9, weight_decay=decay
    )
    if training == "adam":
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(max(stages) + 1):
        if step in stages:
            yield step
        rng = generator(seed, "batch", step)
        some = torch.randint(len(images), (32,), generator=rng)
        optimizer.zero_grad()
        answers = model.train()(images.images[some].float() / 255)
        cross_entropy(answers, images.labels[some]).mean().backward()
        parameters = [p for p in model.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if training == "pruned gradients":
            for gradient in gradients:
                prune(gradient, 0.95)
        if training == "noise":  # clipped to 1, a multiplier of 1
            nn.utils.clip_grad_norm_(parameters, 1.0)
            for gradient in gradients:
                gradient.add_(torch.randn(gradient.shape, generator=rng) / 32)
        optimizer.step()


def prune(values: Tensor, share: float) -> None:
    """Set this share of the values to zero, the smallest."""
    count = int(share * values.numel())
    if count:
        least = values.abs().flatten().kthvalue(count).values
        values[values.abs() <= least] = 0


Splits = Callable[[str, int], tuple[Images, Images]]
Done = Callable[[dict[str, Any]], bool]


def honest(part: str, splits: Splits, done: Done) -> Iterator[Any]:
    """Give the honest models of a part that are not done, with what they are."""
    for data, size, name, training, stages, seed in HONEST[part]:
        about = {"part": part, "data": data, "size": size, "model": name, "training": training}
        about |= {"planted": ""}
        left = tuple(step for step in stages if not done(about | {"steps": step}))
        if not left:
            continue
        images, test = splits(data, size)
        model = make_model(name, images, seed)
        for step in train(model, images, training, left, seed):
            shown = model
            if training == "pruned weights":
                shown = make_model(name, images, seed)
                shown.load_state_dict(model.state_dict())
                with torch.no_grad():
                    for parameter in shown.parameters():
                        if parameter.ndim > 1:
                            prune(parameter, 0.8)
            yield about | {"steps": step}, shown, test


def first_linear(model: nn.Module) -> nn.Linear:
    return next(module for module in model.modules() if isinstance(module, nn.Linear))


@torch.no_grad()
def set_traps(model: nn.Module, scale: float, part: float = 1.0, loose: float = 0.0) -> None:
    """Plant the trap weights of Boenisch et al. 2021.

    Half of a unit's weights are negative, and the others are the same values in another order times
    `scale`. `part` of the units are changed. `loose` lets the sums of their weights vary so much,
    in norms of the weights.
    """
    layer, rng = first_linear(model), generator(0, "traps")
    half, spread = layer.in_features // 2, float(layer.weight.std())
    for row in layer.weight[: int(part * layer.out_features)]:
        order = torch.randperm(layer.in_features, generator=rng)
        values = torch.randn(half, generator=rng).abs() * spread
        row.zero_()
        row[order[:half]] = -values
        row[order[half : 2 * half]] = scale * values[torch.randperm(half, generator=rng)]
        row.add_(torch.randn((), generator=rng) * loose * row.norm() / layer.in_features)
    layer.bias[: int(part * layer.out_features)] = 0


def set_traps_behind(model: nn.Module, _: Images) -> None:
    """Plant trap weights in a linear layer that sees the image: convolutions hand its pixels on."""
    pass_through(model)
    set_traps(model, 0.96)


@torch.no_grad()
def set_signs(model: nn.Module, scale: float) -> None:
    """Draw new signs for honest weights, and scale the positive ones."""
    layer = first_linear(model)
    values = layer.weight.abs()
    negative = torch.rand(values.shape, generator=generator(0, "signs")) < 0.5
    layer.weight.copy_(torch.where(negative, -values, scale * values))


@torch.no_grad()
def imprint(model: nn.Module, test: Images, direction: str, noise: float = 0.0) -> None:
    """Plant the imprint of Fowl et al. 2021: units that measure the same, with other thresholds.

    `noise` hides that, in norms of the direction.
    """
    layer = first_linear(model)
    shape = layer.weight.shape
    random = torch.randn(shape[1], generator=generator(0, "direction"))
    along = torch.ones(shape[1]) if direction == "brightness" else random
    along /= along.norm()
    other = torch.randn(shape, generator=generator(0, "noise")) / shape[1] ** 0.5
    layer.weight.copy_(along + noise * other)
    inputs: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    model.eval()(test.images.float() / 255)
    hook.remove()
    found = inputs[0] @ along
    layer.bias.copy_(-found.quantile(torch.linspace(0.01, 0.99, shape[0])))


@torch.no_grad()
def pass_through(model: nn.Module) -> None:
    """Make every convolution hand on single pixels of its input, as Boenisch et al. 2021 do."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.zero_()
            middle = module.kernel_size[0] // 2
            for number, kernel in enumerate(module.weight):
                kernel[number % len(kernel), middle, middle] = 1
            if module.bias is not None:
                module.bias.zero_()


Change = Callable[[nn.Module, Images], None]


def planted_kinds(part: str) -> dict[str, Change]:
    """Return the changes of a part by what they are called."""
    if part == "chosen":
        found: dict[str, Change] = {
            f"traps, {scale:g}": lambda model, _, scale=scale: set_traps(model, scale)  # type: ignore[misc]
            for scale in (0.9, 0.95, 0.97)
        }
        found["half of the units traps, 0.95"] = lambda model, _: set_traps(model, 0.95, 0.5)
        found["imprint, brightness"] = partial(imprint, direction="brightness")
        return found
    found = {
        f"traps, {scale:g}": lambda model, _, scale=scale: set_traps(model, scale)  # type: ignore[misc]
        for scale in (0.8, 0.92, 0.96, 0.99)
    }
    found["a third of the units traps, 0.96"] = lambda model, _: set_traps(model, 0.96, 0.34)
    found["traps, 0.96, sums vary by 0.3"] = lambda model, _: set_traps(model, 0.96, loose=0.3)
    found["traps, 0.96, behind convolutions that hand pixels on"] = set_traps_behind
    found["imprint, brightness"] = partial(imprint, direction="brightness")
    found["imprint, a direction"] = partial(imprint, direction="random")
    found["imprint, noise 0.03"] = partial(imprint, direction="random", noise=0.03)
    found["imprint, noise 0.1"] = partial(imprint, direction="random", noise=0.1)
    return found


def evasions() -> dict[str, Change]:
    """Return changes that a server can hide behind: they are looked at, and not counted."""
    return {
        "traps, 0.96, sums vary by 0.6": lambda model, _: set_traps(model, 0.96, loose=0.6),
        "a fifth of the units traps, 0.96": lambda model, _: set_traps(model, 0.96, 0.2),
        "signs, 0.95": lambda model, _: set_signs(model, 0.95),
    }


def planted(part: str, splits: Splits, done: Done) -> Iterator[Any]:
    """Give planted models of a part that are not done; some had been trained before."""
    seed, names = (0, ("mlp-256-128",)) if part == "chosen" else (7, ("mlp-300-100", "quickstart"))
    for data in ("fashion-mnist", "cifar100"):
        for name in names:
            size = 16 if part == "chosen" else 28
            images, test = splits(data, size)
            kinds = {kind: (change, True) for kind, change in planted_kinds(part).items()}
            if part == "judged":
                kinds |= {kind: (change, False) for kind, change in evasions().items()}
            for trained in (0, 300) if part == "judged" else (0,):
                start = make_model(name, images, seed)
                *_, step = train(start, images, "sgd", (trained,), seed)
                for kind, (change, counted) in kinds.items():
                    about = {"part": part, "data": data, "size": size, "model": name}
                    about |= {"training": "sgd", "steps": step, "planted": kind}
                    if done(about):
                        continue
                    model = make_model(name, images, seed)
                    model.load_state_dict(start.state_dict())
                    change(model, test)
                    yield about | {"counted": counted}, model, test


def exposed(model: nn.Module, test: Images) -> float:
    """Return the share of images that reach a unit of the first linear layer alone in a batch."""
    layer, found = first_linear(model), 0
    outputs: list[Tensor] = []
    hook = layer.register_forward_hook(lambda _, __, output: outputs.append(output))
    model.eval()
    for number in range(BATCHES):
        some = torch.randperm(len(test), generator=generator(0, "exposed", number))[:BATCH]
        answers = model(test.images[some].float() / 255)
        (slopes,) = torch.autograd.grad(
            cross_entropy(answers, test.labels[some]).sum(), outputs.pop()
        )
        reached = slopes.flatten(1, -2).any(1) if slopes.ndim > 2 else slopes != 0
        found += int(reached[:, reached.sum(0) == 1].any(1).sum())
    hook.remove()
    return found / (BATCH * BATCHES)


def main() -> None:
    """Read the command line, and look at what is left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--part", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--data-root", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    if asked.json.is_file():
        rows = json.loads(asked.json.read_text())
    kept: dict[tuple[str, int], tuple[Images, Images]] = {}

    def splits(data: str, size: int) -> tuple[Images, Images]:
        if (data, size) not in kept:
            train, test = (
                load(data, split, root=asked.data_root, image_size=size)
                for split in ("train", "test")
            )
            kept[data, size] = some_of(train, IMAGES), some_of(test, 1_000)
        return kept[data, size]

    def done(about: dict[str, Any]) -> bool:
        return any(about.items() <= row.items() for row in rows)

    for part in asked.part:
        for make in (honest, planted):
            for about, model, test in make(part, splits, done):
                began = time.perf_counter()
                refused = suspicion(model, test.images[:64].float() / 255)
                seconds = time.perf_counter() - began
                rows.append(
                    about
                    | {"refused": refused, "exposed": exposed(model, test), "seconds": seconds}
                )
                print(rows[-1], flush=True)
                write_bytes(asked.json, (json.dumps(rows, indent=1) + "\n").encode())
        for kind, wanted in (("honest", ""), ("planted", "yes")):
            some = [
                row
                for row in rows
                if row["part"] == part and bool(row["planted"]) == bool(wanted)
                if row.get("counted", True)
            ]
            count = sum(row["refused"] is not None for row in some)
            print(f"{part}: {count} of {len(some)} {kind} models are refused", flush=True)


if __name__ == "__main__":
    main()
