"""The audit of what a spy kept: in a run of `gradveil federate`, or of a user's own Flower app."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradveil.attacks import Attack
from gradveil.audits import AuditJob, Case
from gradveil.audits.stage import CLIENTS
from gradveil.core.errors import GradveilError
from gradveil.core.files import shown
from gradveil.core.job_folder import SETTINGS, differences
from gradveil.core.seeds import generator
from gradveil.core.types import Loss, Protocol
from gradveil.data import Images
from gradveil.data.client_files import find_client, read_client
from gradveil.defenses import Defense
from gradveil.federated.job import FEDERATION, PLAIN, FederationJob
from gradveil.federated.partition import parse_graph, parse_partition
from gradveil.federated.recorded import (
    Victims,
    alike,
    as_mean,
    as_recorded,
    left_out_words,
    lined_up,
    make_record,
    members_of,
    sham_words,
)
from gradveil.federated.spied import SENT, Update, kept_rounds, read_round, round_folder
from gradveil.models import NormalizedName, build_for

FREE = ("attackers", "steps", "audited", "start")
"""Settings of a run that an audit of its rounds does not depend on, or has of its own."""


def is_run(folder: Path) -> bool:
    """Tell whether a folder is that of `gradveil federate`, whose settings say all of its clients.

    An error where it is neither that nor a spy's.
    """
    if (folder / SETTINGS).is_file():
        return True
    if not kept_rounds(folder):
        raise GradveilError(
            f"--flower {shown(folder)}: expected the folder of `gradveil federate`, or one that "
            "gradveil.federated.Spy wrote, with round-0001 and so on in it"
        )
    return False


def find_round(folder: Path, number: int | None) -> int:
    """Return the round that is asked for, or the only one that a spy kept in this folder."""
    kept = kept_rounds(folder)
    if number in kept:
        assert number is not None
        return number
    if number is None and len(kept) == 1:
        return kept[0]
    there = ", ".join(map(str, kept)) or "none: it ran without --spy-rounds"
    asked = "no --round was given" if number is None else f"--round {number}"
    raise GradveilError(f"{asked}: {shown(folder)} holds {there}")


def read_run(
    out: Path,
    data: str,
    model: str | NormalizedName,
    defense: Defense,
    *,
    attacks: Mapping[str, Attack],
    auto: bool,
    steps: int | None,
    audited: int,
) -> FederationJob:
    """Return the job of a run's folder, with other attacks.

    Its data set, model and defense are given again, since names in a file are never imported;
    others than the run's are refused.
    """
    settings = FEDERATION.read(out)
    graph = settings.get("graph")
    given: dict[str, Any] = {name: settings.get(name) for name in PLAIN}
    given |= {"steps": steps, "audited": audited}
    job = FederationJob(
        data,
        model,
        defense=defense,
        split=parse_partition(settings["partition"]),
        graph=None if graph is None else parse_graph(graph, settings["clients"]),
        spy_rounds=tuple(settings["spy_rounds"]),
        channels=settings.get("channels"),
        attacks=attacks,
        auto=auto,
        **given,
    )
    there, here = (
        {name: value for name, value in some.items() if name not in FREE}
        for some in (settings, job.settings())
    )
    if changes := differences(there, here):
        raise GradveilError(
            f"--flower {shown(out)}: the run has other settings ({changes}): give --data, --model, "
            "--normalize and --defense as it had them"
        )
    return job


def make_app_audit(
    spied: Path,
    number: int,
    truth: Path,
    splits: tuple[Images, Images],
    model: nn.Module | str | NormalizedName,
    defense: Defense,
    *,
    protocol: Protocol,
    attacks: Mapping[str, Attack],
    auto: bool,
    steps: int | None,
    audited: int,
    loss: Loss | None = None,
    resized: bool = False,
    seed: int = 0,
) -> AuditJob:
    """Return the audit of a round of a user's own app.

    `truth` has the images of each client, by the name of its file. Others of the first of `splits`
    stand in line-ups beside them; public images are those of the second.
    """
    if defense.changes("batch"):
        raise GradveilError(
            f"defense {defense}: what it drew for each image is known to your app alone, so there "
            "is no line-up; use `gradveil reconstruct --spy`"
        )
    pool, public = splits
    updates = read_round(spied, number)
    known = _read_all(updates, number, truth, pool, resized)
    everyone, numbers = _together(known, pool)
    chosen = alike([each for each in updates if each.client in known], numbers, audited)
    network = build_for(model, pool, check=False)
    victims = _victims(chosen, known, numbers, protocol, network)
    images, count = lined_up(victims, everyone)
    record = make_record(victims, everyone, lambda name: generator(seed, "client", name), True)
    absent = [update.client for update in updates if update.client not in known]
    notes = [
        victims.note,
        sham_words(victims, defense),
        left_out_words(numbers.values(), len(victims.numbers[0])),
    ]
    notes += [f"no images were given of {', '.join(absent)}"] if absent else []
    called = getattr(loss, "__name__", type(loss).__name__)
    label = "" if loss is None else f"{defense}, loss {called}"  # so that a folder is of one loss
    return AuditJob(
        model,
        images,
        attacks,
        auto,
        (Case(defense, round_folder(spied, number) / SENT, label=label),),
        count,
        public,
        batch_size=len(victims.numbers[0]),
        steps=steps,
        protocol=victims.protocol,
        first=0,
        seed=seed,
        recorded=partial(as_recorded, record, loss=loss),
        note="; ".join(filter(None, notes)),
    )


class Known(NamedTuple):
    """The images and labels behind an update, and how many each of its clients has."""

    images: Tensor
    labels: Tensor
    sizes: list[int]


def _read_all(
    updates: Sequence[Update], number: int, truth: Path, pool: Images, resized: bool
) -> dict[str, Known]:
    """Return what is behind the updates of a round, by client; an error where it is nothing."""
    found = {update.client: _read(update, truth, pool, resized) for update in updates}
    known = {name: batch for name, batch in found.items() if batch is not None}
    if not known:
        there = ", ".join(name for update in updates for name in members_of(update))
        raise GradveilError(
            f"--client-images {shown(truth)} has no images of round {number}, which is of "
            f"{there or 'no client'}: a folder with a folder for each class, or a .npz with images "
            "and labels, for each"
        )
    return known


def _read(update: Update, truth: Path, pool: Images, resized: bool) -> Known | None:
    """Return the images and labels behind an update; None where those of a client are not given."""
    images, labels = [], []
    for name in members_of(update):
        path = find_client(truth, name)
        if path is None:
            return None
        some, classes = read_client(path, pool, resized=resized)
        if classes is None:
            raise GradveilError(
                f"{shown(path)}: the classes of its images are not known, and a line-up is of one "
                "class; give a folder for each class, or labels in a .npz"
            )
        images.append(some)
        labels.append(classes)
    count, said = sum(map(len, images)), update.examples * len(members_of(update))
    if said and count != round(said):
        raise GradveilError(
            f"client {update.client} said that it trained on {said:g} image(s), and "
            f"{shown(truth)} has {count} of it"
        )
    return Known(torch.cat(images), torch.cat(labels), [*map(len, images)])


def _together(known: Mapping[str, Known], pool: Images) -> tuple[Images, dict[str, Tensor]]:
    """Return the clients' images with the pool after them, and the numbers of each client's."""
    numbers, first = {}, 0
    for name, (images, *_) in known.items():
        numbers[name] = torch.arange(first, first + len(images))
        first += len(images)
    images = torch.cat([*(each.images for each in known.values()), pool.images])
    labels = torch.cat([*(each.labels for each in known.values()), pool.labels])
    return replace(pool, name=CLIENTS, images=images, labels=labels), numbers


def _victims(
    chosen: Sequence[Update],
    known: Mapping[str, Known],
    numbers: Mapping[str, Tensor],
    protocol: Protocol,
    model: nn.Module,
) -> Victims:
    sizes = [known[update.client].sizes for update in chosen]
    rate, note, first = protocol.local_lr, "", sizes[0][0]
    if any(update.members for update in chosen):
        channels, height, width = known[chosen[0].client].images.shape[1:]
        protocol, taken = as_mean(protocol, model, sizes, (channels, height, width))
        if taken is not None:
            rate *= protocol.summed(first)
            protocol = Protocol(local_lr=protocol.local_lr, train_mode=protocol.train_mode)
            note = taken
    if protocol.local_batch_size is not None and protocol.local_batch_size < first:
        note = "mini-batches are taken in the order of the images given, the same in every epoch"
    images = tuple(numbers[update.client] for update in chosen)
    return Victims(tuple(chosen), images, protocol, rate, note)
