"""What a server keeps of its clients, as files that can be inverted; Flower is not needed here."""

import fnmatch
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from msgspec import Struct
from safetensors.torch import save
from torch import Tensor

from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.files import replacing, shown
from gradveil.core.formats import Count
from gradveil.core.reading import parse_json
from gradveil.core.tensor_files import read_safetensors
from gradveil.core.types import Gradients, Statistics

CLIENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]{0,200}")  # a name that is part of paths
SENT = "global.safetensors"
PRIVATE = 0o600  # a mode: nobody but the owner reads them
FORMAT = "gradveil spy 1"
STATISTICS = "*running_mean", "*running_var", "*num_batches_tracked"
"""Names of batch-norm statistics, which are no parameters and have no gradient."""


T = TypeVar("T")


def warn_of_files(out: Path) -> None:
    """Warn that what a spy keeps in this folder can be inverted."""
    warnings.warn(
        f"the spy's files in {shown(out)} can be inverted into the clients' images: guard and "
        "delete them as you would the images",
        GradveilWarning,
        stacklevel=3,
    )


class UpdateFacts(Struct, frozen=True):
    """What the file of an update says of it."""

    client: str
    round: Count
    gradients: bool
    examples: float
    members: list[str] = []


@dataclass(frozen=True, eq=False)
class Update:
    """What the server has of one client, or of the average of several.

    `before` are the weights that were sent out; `shared` what came back, weights or, where
    `gradients`, gradients; both with batch-norm statistics. `examples` is the number of images
    that the client says it trained on, or the average number of several clients, whose names are
    the `members`.
    """

    client: str
    round: int
    before: Mapping[str, Tensor]
    shared: Mapping[str, Tensor]
    gradients: bool
    examples: float
    members: tuple[str, ...] = ()

    def statistics(self) -> Statistics:
        """Return the running means and variances of batch norm that were sent along."""
        return {
            name: value
            for name, value in self.shared.items()
            if value.is_floating_point() and matches(name, STATISTICS)
        }

    def as_gradients(self, lr: float) -> Gradients:
        """Return what was shared as gradients: those sent, or (before - after) / `lr`."""
        names = [
            name
            for name, value in self.shared.items()
            if value.is_floating_point() and not matches(name, STATISTICS)
        ]
        if self.gradients:
            return {name: self.shared[name] for name in names}
        return {  # in float64, so that nothing is lost of a small step
            name: ((self.before[name].double() - self.shared[name].double()) / lr).to(
                self.shared[name].dtype
            )
            for name in names
        }


def average(updates: list[Update], least: int) -> list[Update]:
    """Return the averages of groups of `least` updates or a few more, weighted by examples.

    Fewer updates than that give none.
    """
    return [
        _averaged(group, number)
        for number, group in enumerate(grouped(updates, least))
        if len(group) >= least and sum(update.examples for update in group) > 0
    ]


def grouped(values: Sequence[T], least: int) -> list[list[T]]:
    """Divide values, in order, into groups of `least` or a few more; of fewer values one group."""
    groups = [[*values[first : first + least]] for first in range(0, len(values), least)]
    if len(groups) > 1 and len(groups[-1]) < least:
        groups[-2:] = [groups[-2] + groups[-1]]
    return groups


def _averaged(group: list[Update], number: int) -> Update:
    first, total = group[0], sum(update.examples for update in group)
    for update in group:
        if {name: value.shape for name, value in update.shared.items()} != {
            name: value.shape for name, value in first.shared.items()
        }:
            raise GradveilError(
                f"clients {first.client} and {update.client} sent arrays of other names or shapes"
            )
    shared = {}
    for name, value in first.shared.items():
        parts = [update.shared[name].double() * (update.examples / total) for update in group]
        mean = torch.stack(parts).sum(0)
        shared[name] = mean.to(value.dtype) if value.is_floating_point() else value
    return Update(
        f"average-{number}",
        first.round,
        first.before,
        shared,
        first.gradients,
        total / len(group),
        tuple(update.client for update in group),
    )


def round_folder(out: Path, number: int) -> Path:
    """Return the folder of a round's files."""
    return out / f"round-{number:04d}"


def client_path(out: Path, update: Update) -> Path:
    """Return the file of an update."""
    return round_folder(out, update.round) / f"client-{update.client}.safetensors"


def save_update(out: Path, update: Update) -> None:
    """Write an update, and once for a round the weights that were sent out, for the owner alone."""
    folder = round_folder(out, update.round)
    for made in (out, folder):
        with suppress(OSError):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = {
        "format": FORMAT,
        "client": update.client,
        "round": update.round,
        "gradients": update.gradients,
        "examples": update.examples,
        "members": update.members,
    }
    if not (folder / SENT).exists():
        _write(folder / SENT, update.before, {"format": FORMAT, "round": update.round})
    _write(client_path(out, update), update.shared, facts)


def _write(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, object]) -> None:
    plain = {name: value.contiguous() for name, value in tensors.items()}
    with replacing(path, PRIVATE) as temporary:
        temporary.write_bytes(save(plain, metadata={"gradveil": json.dumps(facts)}))


def kept_rounds(out: Path) -> list[int]:
    """Return the rounds that a spy's folder holds, in order."""
    found = [entry.name.removeprefix("round-") for entry in out.glob("round-*") if entry.is_dir()]
    return sorted(int(number) for number in found if number.isdecimal())


def read_round(out: Path, number: int) -> list[Update]:
    """Read the updates of a round, by the names of their clients."""
    folder = round_folder(out, number)
    if not (folder / SENT).is_file():
        there = ", ".join(map(str, kept_rounds(out))) or "none"
        raise GradveilError(f"{shown(out)} holds no round {number}: it has {there}")
    before, _ = read_safetensors(folder / SENT)
    updates: list[Update] = []
    for path in sorted(
        folder.glob("client-*.safetensors"), key=lambda path: (len(path.name), path)
    ):
        shared, metadata = read_safetensors(path)
        for name, value in shared.items():
            if name not in before or value.shape != before[name].shape:
                raise GradveilError(
                    f"{shown(path)} does not fit {SENT}: {shown(repr(name))} of shape "
                    f"{tuple(value.shape)}"
                )
        facts = parse_json(metadata.get("gradveil", "{}").encode(), UpdateFacts, path)
        _check_facts(facts, number, [update.client for update in updates], path)
        updates.append(
            Update(
                facts.client,
                facts.round,
                before,
                shared,
                facts.gradients,
                facts.examples,
                tuple(facts.members),
            )
        )
    return updates


def _check_facts(facts: UpdateFacts, number: int, clients: Sequence[str], path: Path) -> None:
    """Refuse an update of another round, of a client that has one already, or of an odd name."""
    names = [facts.client, *facts.members]
    odd = [name for name in names if not CLIENT.fullmatch(name)]
    if odd:
        raise GradveilError(f"{shown(path)} names the client {shown(repr(odd[0]))}")
    if facts.round != number:
        raise GradveilError(f"{shown(path)} is of round {facts.round}, in the folder of {number}")
    if facts.client in clients:
        raise GradveilError(f"{shown(path)} is a second update of client {facts.client}")
    if len(set(facts.members)) < len(facts.members):
        raise GradveilError(f"{shown(path)} names a client twice among those of its average")


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether an array's name matches one of these patterns, in which * stands for any."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
