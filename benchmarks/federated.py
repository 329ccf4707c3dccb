"""Measure federated training: what updates give away, the guard, accuracy, and seconds a round.

    python benchmarks/federated.py record --out DIR [--data cifar100 ...] [--data-root DIR]
    python benchmarks/federated.py leakage --runs DIR --minutes 25 --device cuda --json FILE
        [--settings fedavg-1-epoch ...] [--attacks dense-matching ...] [--steps 1000]
    python benchmarks/federated.py guard --json FILE
    python benchmarks/federated.py speed --json FILE
    python benchmarks/federated.py accuracy --json FILE [--data-root DIR]

`record` trains with Flower's apps and keeps what a spy got of two rounds, beside the few images
that an audit of them needs. `leakage` attacks that with all that `auto` has, or with what is named;
it needs neither Flower nor the data sets, skips what FILE holds already, and goes on where it was
stopped. `guard` lets clients check updates that an attack identifies, and others that it does not;
it goes on too. `speed` times rounds of 10 and 100 clients on Ray, and in one process, with and
without a defense and a spy in turns, by the clock and by the processor; it goes on too. `accuracy`
trains on real images with ten clients, and at one site by as many steps; it goes on where it was
stopped.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gradveil.attacks.presets import adam_cosine, find, likelihood
from gradveil.audits import run_audit
from gradveil.audits.results import AUDIT
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.files import write_bytes
from gradveil.core.seeds import forked, generator
from gradveil.core.tensor_files import read_safetensors
from gradveil.core.types import Batch
from gradveil.data import Images, load
from gradveil.defenses import as_defense, parse
from gradveil.engine.gradients import cross_entropy
from gradveil.federated.job import SPY, FederationJob
from gradveil.federated.recorded import choose_victims, make_audit
from gradveil.federated.spied import kept_rounds, round_folder
from gradveil.models import build
from gradveil.scores.identification import rank_among, signatures

DATA = ("fashion-mnist", "cifar100")
CLIENTS, EACH = 50, 64  # clients, and images of each
PUBLIC = 1_000
SPLITS = ("train", "test")
IMAGES = "images.safetensors"
GRADIENT = {"lr": 0.1, "fraction": 0.64, "rounds": 24, "spy_rounds": (1, 24)}  # 32 clients a round
# Ten clients a round, eight of them attacked. Round 12 is the last at the full rate.
EPOCHS = {"fraction": 0.2, "rounds": 32, "spy_rounds": (1, 12), "batch_size": 32}
EPOCHS |= {"audited": 8 * EACH}
SETTINGS: dict[str, dict[str, Any]] = {
    "fedsgd-1": GRADIENT | {"batch_size": 1},
    "fedsgd-8": GRADIENT | {"batch_size": 8, "audited": 8 * 8},
    "fedavg-1-epoch": EPOCHS | {"local_epochs": 1},
    "fedavg-3-epochs": EPOCHS | {"local_epochs": 3},
}
WEIGHTS = {"fedsgd-1": 1.0, "fedsgd-8": 1.0, "fedavg-1-epoch": 2.0, "fedavg-3-epochs": 3.0}
"""Shares of the time: more local steps make an iteration dearer."""


class Net(nn.Module):
    """The CNN of Flower's quickstart, for images in [0, 1] of any size and number of channels."""

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        side = ((size - 4) // 2 - 4) // 2
        self.features = nn.Sequential(
            *(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.head = nn.Sequential(
            *(nn.Flatten(), nn.Linear(16 * side**2, 120), nn.ReLU()),
            *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)),
        )

    def forward(self, images: Tensor) -> Tensor:
        answers: Tensor = self.head(self.features(2 * images - 1))
        return answers


def make_net(images: Images) -> Net:
    """Return the untrained CNN for such images, from a fixed seed."""
    with forked():
        torch.manual_seed(0)
        return Net(images.channels, images.size, len(images.classes))


def federation(train: Images, test: Images, setting: str) -> FederationJob:
    """Return the training of a setting, without its attacks."""
    given = {"clients": CLIENTS, "lr": 0.05, "audited": 32, "seed": 0}
    return FederationJob(train, make_net(train), test=test, **(given | SETTINGS[setting]))


def save_images(path: Path, train: Images, test: Images) -> None:
    """Write the images of both splits, with what `Images` has beside them."""
    facts = {"name": train.name, "classes": train.classes, "mean": train.mean, "std": train.std}
    tensors = {
        f"{split}.{part}": getattr(some, part).contiguous()
        for split, some in (("train", train), ("test", test))
        for part in ("images", "labels")
    }
    save_file(tensors, path, metadata={"gradveil": json.dumps(facts)})


def load_images(path: Path) -> tuple[Images, Images]:
    """Read what `save_images` wrote."""
    tensors, facts = load_file(path), json.loads(read_safetensors(path)[1]["gradveil"])
    train, test = (
        Images(
            facts["name"],
            split,
            tensors[f"{split}.images"],
            tensors[f"{split}.labels"],
            tuple(facts["classes"]),
            tuple(facts["mean"]),
            tuple(facts["std"]),
        )
        for split in ("train", "test")
    )
    return train, test


def some_of(images: Images, count: int) -> Images:
    """Draw so many images, as many of each class as of any other."""
    order = torch.randperm(len(images), generator=generator(0, "benchmark", images.name))
    by_class = [order[images.labels[order] == label] for label in range(len(images.classes))]
    chosen = torch.cat([some[: count // len(by_class)] for some in by_class])
    return images.select(chosen.sort().values)


def in_this_process(plan: Any, serve: Callable[..., None]) -> None:
    """Let Flower's apps exchange their messages in this process, without Ray's."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from flower import HereGrid
    from gradveil.federated.client_app import Workshop, make_client_app

    workshop = Workshop.of(plan.job, plan.root)
    app = make_client_app(plan, lambda: workshop)
    serve(HereGrid(app, plan.job.clients), lambda: False)


def record(asked: argparse.Namespace) -> None:
    """Train every setting on Flower, and keep what is attacked of what was spied."""
    from gradveil.federated.run import federate

    for name in asked.data:
        folder = asked.out / name
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / IMAGES).is_file():
            train, test = (load(name, split, root=asked.data_root) for split in ("train", "test"))
            save_images(folder / IMAGES, some_of(train, CLIENTS * EACH), some_of(test, PUBLIC))
        train, test = load_images(folder / IMAGES)
        for setting in SETTINGS:
            job = federation(train, test, setting)
            began = time.perf_counter()
            found = federate(job, folder / setting, progress=False, engine=in_this_process)
            for number in job.spy_rounds:
                chosen = choose_victims(job, number, folder / setting, train).updates
                kept = {f"client-{update.client}.safetensors" for update in chosen}
                for path in round_folder(folder / setting / SPY, number).glob("client-*"):
                    if path.name not in kept:
                        path.unlink()
            print(
                f"{name} {setting}: {job.rounds} rounds in {time.perf_counter() - began:.0f} s, "
                f"test accuracy {found.accuracy:.1%}",
                flush=True,
            )


def cells(runs: Path, settings: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """Give data set, setting and round of all that was recorded there, early rounds first."""
    there = [(d, s) for d in DATA for s in settings if (runs / d / s / SPY).is_dir()]
    for place in (0, 1):
        for data, setting in there:
            yield data, setting, kept_rounds(runs / data / setting / SPY)[place]


def attack(runs: Path, cell: tuple[str, str, int], minutes: float, asked: Any) -> dict[str, Any]:
    """Audit a round, and return its table with all controls."""
    data, setting, number = cell
    splits = load_images(runs / data / IMAGES)
    job = replace(federation(*splits, setting), auto=True, seed=asked.seed)
    audit = make_audit(job, number, runs / data / setting, splits)
    if asked.attacks:
        audit = replace(audit, auto=False, attacks={name: find(name) for name in asked.attacks})
    work = asked.work / f"{data}-{setting}-round-{number}"
    if (work / "settings.json").is_file() and not asked.steps:
        minutes = float(AUDIT.read(work)["budget"])
    began = time.perf_counter()
    audit = replace(audit, budget=None if asked.steps else minutes, steps=asked.steps)
    result = run_audit(audit, work, device=asked.device, progress=False)
    (case,) = result.cases
    return {
        "data": data,
        "setting": setting,
        "round": number,
        "note": audit.note,
        "minutes": minutes,
        "seconds": time.perf_counter() - began,
        "updates": audit.images // audit.batch_size,
        "images_of_an_update": audit.batch_size,
        "protocol": audit.protocol.settings(),
        **{
            name: case.settings[name]
            for name in ("attacks", "left_out", "knows", "share", "candidates", "device")
        },
        "rows": [*result.flat()],
        "identified_of_updates": identified_of_updates(case),
    }


def identified_of_updates(case: Any) -> dict[str, list[int]]:
    """Return how many images of each update have rank 1, by attack: p-values can be made again."""
    found: dict[str, dict[int, int]] = {}
    for each in case.records:
        if each.kind in ("attack", "sham", "blind") and "used" in each.scores:
            first = each.scores["used"].get("rank") == 1
            of = found.setdefault(f"{each.kind} {each.attack}", {})
            of[each.update] = of.get(each.update, 0) + first
    return {name: [*of.values()] for name, of in found.items()}


def leakage(asked: argparse.Namespace) -> None:
    """Attack what is left, in as many minutes as there are, and write each table as it comes."""
    done = json.loads(asked.json.read_text()) if asked.json.is_file() else {}
    found = cells(asked.runs, asked.settings)
    left = [cell for cell in found if " ".join(map(str, cell)) not in done]
    end = time.monotonic() + 60 * asked.minutes
    while left and (minutes := (end - time.monotonic()) / 60) > 0.1:
        shares = [WEIGHTS[setting] for _, setting, _ in left]
        cell = left.pop(0)
        key = " ".join(map(str, cell))
        try:
            done[key] = attack(asked.runs, cell, 0.8 * minutes * shares[0] / sum(shares), asked)
        except GradveilError as error:
            print(f"{key}: {error}", flush=True)
            continue
        write_bytes(asked.json, (json.dumps(done, indent=1) + "\n").encode())
        for row in done[key]["rows"]:
            print(
                f"{key:<36} {row['kind']:<9}{row['attack']:<24} n={row['n']:<4} "
                f"identified {row['identified']} of {row['n']}, 1 in {row['candidates']}; "
                f"PSNR {row['psnr'] or float('nan'):.2f} SSIM {row['ssim'] or float('nan'):.3f}",
                flush=True,
            )
    print(f"{len(done)} done; what is left is attacked when this is run again", flush=True)


UPDATES, STAGES = 48, (0, 10, 50, 200)  # updates of a kind; training steps before them
SIDE = 16  # pixels: smaller images make the attacks cheaper
SECONDS = 8.0  # of the processor, that the guard's search has
KINDS = {"none": "identified", "gaussian:1": "hidden"}
AUDITS = {"none": replace(adam_cosine, steps=150), "gaussian:1": replace(likelihood, steps=150)}


def trained_models(name: str, images: Images, stages: Sequence[int], seed: int) -> Iterator[Any]:
    """Give the weights of an honest training after each of these steps, as state dicts."""
    model = build(name, channels=1, size=SIDE, classes=10, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    for step in range(max(stages) + 1):
        if step in stages:
            yield {key: value.clone() for key, value in model.state_dict().items()}
        some = torch.randint(len(images), (8,), generator=generator(seed, "batch", step))
        answers = model.train()(images.images[some].float() / 255)
        optimizer.zero_grad()
        cross_entropy(answers, images.labels[some]).mean().backward()
        optimizer.step()


def spent(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Return what a function gives, and its seconds by the clock and of the processor."""
    began, used = time.perf_counter(), time.process_time()
    found = work()
    return found, {
        "wall": time.perf_counter() - began,
        "processor": time.process_time() - used,
    }


def guard_updates(asked: argparse.Namespace, found: dict[str, Any]) -> None:
    """Let the guard decide on updates of single images, and attack the same updates."""
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    from gradveil.federated.guards import guard
    from gradveil.federated.messages import LOG, as_record

    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # as in a run
    train, test = (load("fashion-mnist-mini", split, image_size=SIDE) for split in SPLITS)
    canaries = train.images.float() / 255, train.labels
    known = signatures(torch.cat([test.images, train.images]).double() / 255)
    model = build("lenet", channels=1, size=SIDE, classes=10, seed=0)
    models = [
        weights
        for seed in range(UPDATES // len(STAGES))
        for weights in trained_models("lenet", train, STAGES, seed)
    ]
    said: list[str] = []  # what the guard says of updates that it sends
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    LOG.addHandler(handler)

    def send(question: Message, _: Context) -> Message:
        return Message(RecordDict(), reply_to=question)

    rows: list[dict[str, Any]] = found.setdefault("updates", [])
    for number, weights in enumerate(models[: asked.updates]):
        for defense, kind in KINDS.items():
            if any((row["number"], row["defense"]) == (number, defense) for row in rows):
                continue
            mine = Batch(test.images[[number]].float() / 255, test.labels[[number]])
            mod = guard(
                model,
                canaries,
                lambda _, mine=mine: (mine.images, mine.labels),  # type: ignore[misc]
                defense=defense,
                seconds=SECONDS,
                seed=number,
            )
            content = RecordDict({"arrays": as_record(weights), "config": ConfigRecord()})
            message = Message(content, dst_node_id=1, message_type="train")
            context = Context(1, 1, {"partition-id": number}, RecordDict(), {})
            said.clear()
            reply, check = spent(partial(mod, message, context, send))
            reason = str(reply.error.reason) if reply.has_error() else None
            model.load_state_dict(weights)
            client = Client(model, 10, defense=as_defense(defense))
            (shared,), training = spent(
                partial(client.share_batches, [mine], generator(number), tell_defense=True)
            )
            (made,) = AUDITS[defense]([shared.seen], generator(number, "audit"))
            images = made.images.detach().double().clamp(0, 1)
            rank = int(rank_among(images, known, torch.tensor([number])))
            rows.append(
                {
                    "number": number,
                    "defense": defense,
                    "kind": kind,
                    "steps": STAGES[number % len(STAGES)],
                    "withheld": reason,
                    "said": said[-1],
                    "rank": rank,
                    "candidates": len(known),
                    "guard_seconds": check,
                    "training_seconds": training,
                }
            )
            print(defense, number, f"rank {rank} of {len(known)}:", reason or "sent", flush=True)
            write_bytes(asked.json, (json.dumps(found, indent=1) + "\n").encode())


def guards(asked: argparse.Namespace) -> None:
    """Measure the guard, and write what it decided."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"attack": "auto", "seconds": SECONDS, "canaries": 59, "threads": 1}
    if asked.json.is_file():
        found = json.loads(asked.json.read_text())
    guard_updates(asked, found)
    for kind in KINDS.values():
        rows = [row for row in found["updates"] if row["kind"] == kind]
        withheld = sum(row["withheld"] is not None for row in rows)
        audited = sum(row["rank"] == 1 for row in rows)
        check, training = (
            sum(row[part]["processor"] for row in rows) / len(rows)
            for part in ("guard_seconds", "training_seconds")
        )
        print(
            f"{kind}: an attack identifies {audited} of {len(rows)}, the guard withholds "
            f"{withheld}; {check:.2f} s of the processor a check, {training:.3f} s a gradient"
        )


PARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "defense": {"defense": parse("prune:0.95")},
    "defense and spy": {"defense": parse("prune:0.95"), "spy_rounds": (1, 2, 3, 4)},
}
ENGINES = ("one-process", "simulation")
TIMED = 4  # rounds; the first loads what each process needs


def processor_seconds() -> float:
    """Return the seconds of the processor that this process and its descendants have used."""
    parents, used = dict[int, int](), dict[int, float]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended since
            continue
        parents[int(path.parent.name)] = int(fields[1])
        used[int(path.parent.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(used[pid] for pid in family)


def timed_rounds(engine: Callable[..., None], rounds: list[dict[str, float]]) -> Any:
    """Return an engine that adds the seconds of each round, which ends as the next one asks."""

    def run(plan: Any, serve: Callable[..., None]) -> None:
        marks: list[tuple[float, float]] = []

        def mark() -> None:
            marks.append((time.perf_counter(), processor_seconds()))

        def served(grid: Any, stopped: Callable[[], bool]) -> None:
            push = grid.push_messages

            def marked(messages: Any) -> Any:
                mark()
                return push(messages)

            grid.push_messages = marked
            serve(grid, stopped)
            mark()

        engine(plan, served)
        _, *ends = marks  # the first question is who is which client
        for (began, used), (ended, later) in pairwise(ends):
            rounds.append({"wall": ended - began, "processor": later - used})

    return run


def speed(asked: argparse.Namespace) -> None:
    """Time rounds of many clients in turns with and without a defense and a spy."""
    from gradveil.federated.run import federate, simulate

    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    if asked.json.is_file():
        found = json.loads(asked.json.read_text())
    for repeat, clients, name, part in product(
        range(asked.repeats), asked.clients, asked.engines, PARTS
    ):
        about = {"repeat": repeat, "clients": clients, "engine": name, "part": part}
        if any(about.items() <= row.items() for row in found):
            continue
        job = FederationJob("fashion-mnist-mini", "lenet", clients, TIMED, lr=0.05, **PARTS[part])
        rounds: list[dict[str, float]] = []
        engine = timed_rounds(simulate if name == "simulation" else in_this_process, rounds)
        load, began = os.getloadavg()[0], time.perf_counter()
        with tempfile.TemporaryDirectory() as out:
            federate(job, out, progress=False, engine=engine)
        whole = time.perf_counter() - began
        found.append(about | {"rounds": rounds, "whole": whole, "load_before": load})
        print(found[-1], flush=True)
        write_bytes(asked.json, (json.dumps(found, indent=1) + "\n").encode())


def accuracy(asked: argparse.Namespace) -> None:
    """Train with ten clients and at one site by as many steps, and compare the test accuracy."""
    from gradveil.federated.run import federate
    from gradveil.training.run import train

    torch.set_num_threads(1)
    splits = [load("fashion-mnist", split, root=asked.data_root) for split in SPLITS]
    images, test = some_of(splits[0], asked.images), splits[1]
    epochs, size, clients = asked.epochs, 80, 10
    rounds = epochs * len(images) // size
    rows = json.loads(asked.json.read_text()) if asked.json.is_file() else []
    for seed in range(len(rows), asked.seeds):
        job = FederationJob(
            images,
            make_net(images),
            clients,
            rounds,
            batch_size=size // clients,
            lr=0.1,
            test=test,
            seed=seed,
        )
        recipe = replace(job.recipe, epochs=epochs, batch_size=size)
        here = replace(job.training, recipe=recipe, augment=False)
        one = train(here, asked.work / f"one-site-{seed}", device="cpu")
        many = federate(job, asked.work / f"ten-{seed}", progress=False, engine=in_this_process)
        rows.append(
            {
                "seed": seed,
                "images": len(images),
                "test_images": len(test),
                "clients": clients,
                "steps": rounds,
                "federated": many.accuracy,
                "one_site": one.accuracy,
                "seconds_a_round": sum(row["seconds"] for row in many.history) / rounds,
            }
        )
        print(rows[-1], flush=True)
        write_bytes(asked.json, (json.dumps(rows, indent=1) + "\n").encode())


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("record")
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--data", nargs="+", default=DATA, choices=DATA)
    command.add_argument("--data-root", type=Path)
    command.set_defaults(run=record)
    command = commands.add_parser("leakage")
    command.add_argument("--runs", type=Path, required=True)
    command.add_argument("--json", type=Path, required=True)
    command.add_argument("--work", type=Path, default=Path("runs/leakage"))
    command.add_argument("--minutes", type=float, default=25.0)
    command.add_argument("--steps", type=int, help="in place of minutes")
    command.add_argument("--settings", nargs="+", default=tuple(SETTINGS), choices=SETTINGS)
    command.add_argument("--attacks", nargs="+", default=(), help="in place of auto")
    command.add_argument("--device", default="auto")
    command.add_argument("--seed", type=int, default=0)
    command.set_defaults(run=leakage)
    command = commands.add_parser("guard")
    command.add_argument("--json", type=Path, required=True)
    command.add_argument("--updates", type=int, default=UPDATES)
    command.set_defaults(run=guards)
    command = commands.add_parser("speed")
    command.add_argument("--json", type=Path, required=True)
    command.add_argument("--clients", type=int, nargs="+", default=(10, 100))
    command.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES)
    command.add_argument("--repeats", type=int, default=3)
    command.set_defaults(run=speed)
    command = commands.add_parser("accuracy")
    command.add_argument("--json", type=Path, required=True)
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--images", type=int, default=2_000)
    command.add_argument("--work", type=Path, default=Path("runs/federated-accuracy"))
    command.add_argument("--epochs", type=int, default=8)  # decays fall between epochs
    command.add_argument("--data-root", type=Path)
    command.set_defaults(run=accuracy)
    asked = parser.parse_args()
    asked.run(asked)


if __name__ == "__main__":
    main()
