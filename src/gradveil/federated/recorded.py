"""The updates that a spy kept, attacked by the ordinary audit."""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import Generator, Tensor, nn

from gradveil.audits import AuditJob, AuditResult, Case, run_audit
from gradveil.audits.prepare import foreseen_seconds
from gradveil.clients import Client, Shared
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.files import digest
from gradveil.core.seeds import derived
from gradveil.core.types import Batch, Gradients, ImageShape, Loss, Protocol, Statistics
from gradveil.data import Images
from gradveil.defenses import Defense
from gradveil.engine.device import find_device
from gradveil.engine.shares import as_one_client
from gradveil.federated.job import AUDITS, SPY, FederationJob, make_model, make_shares
from gradveil.federated.spied import SENT, Update, grouped, read_round, round_folder

CANDIDATES = 150  # images of each class, beside those of the victims, that line-ups are made of
LEAST_ALIKE = 0.5  # cosine of a recorded update with that of its images, below which they are not
MOST = 256  # images of one update: attacks on more find nothing, and would take days


@dataclass(frozen=True, eq=False)
class Recorded:
    """What a client sent, and the generator that its defense drew from.

    `statistics` are those of its batch norm, where an attacker can take them for the batch's.
    """

    gradients: Gradients
    statistics: Statistics
    rng: Generator


@dataclass(frozen=True, eq=False)
class RecordedClient(Client):
    """A client whose updates of some batches, by their digests, are those that a server recorded.

    The images used and what is known of the defense follow from the client's own draws. A batch
    that is not in the record is shared as ever. Updates are `doubted` where they hardly resemble
    what these weights share of the images, unless they were made with other weights.
    """

    record: Mapping[str, Recorded] = field(default_factory=dict)
    doubted: bool = True

    def share_batches(
        self,
        batches: Sequence[Batch],
        rng: Generator | Sequence[Generator],
        *,
        tell_labels: bool = True,
        tell_defense: bool = False,
        tell_draws: bool = False,
        rounds: int = 1,
    ) -> list[Shared]:
        """Share as a client does, with what was recorded in place of what would be shared."""
        found = [self.record.get(batch_digest(batch)) for batch in batches]
        rngs = [rng] * len(batches) if isinstance(rng, Generator) else list(rng)
        rngs = [
            other if kept is None else kept.rng.clone_state()
            for kept, other in zip(found, rngs, strict=True)
        ]
        known = {"tell_labels": tell_labels, "tell_defense": tell_defense, "tell_draws": tell_draws}
        shared = super().share_batches(batches, rngs, **known)  # a record has one round
        sent = [
            update if kept is None else _with(update, kept)
            for update, kept in zip(shared, found, strict=True)
        ]
        if self.doubted and not self.acting.changes("gradients"):
            _doubt(
                [_likeness(*pair) for *pair, kept in zip(shared, sent, found, strict=True) if kept]
            )
        return sent


def _with(update: Shared, kept: Recorded) -> Shared:
    """Return the update with the record's gradients and statistics, in the model's order."""
    seen = update.seen
    given = _taken(seen.gradients, kept.gradients)
    known = seen.knowledge
    if known.statistics is not None:
        sent = _taken(known.statistics, kept.statistics) if kept.statistics else None
        known = replace(known, statistics=sent)
    return update._replace(seen=replace(seen, gradients=given, knowledge=known))


def _likeness(made: Shared, sent: Shared) -> float:
    """Return the cosine of two updates; their gradients have the same order."""
    ours, theirs = (
        torch.cat([part.double().flatten() for part in each.seen.gradients.values()])
        for each in (made, sent)
    )
    return float(torch.cosine_similarity(ours, theirs, dim=0))


def _doubt(alike: Sequence[float]) -> None:
    """Warn where updates are not those of the images, by the settings that were told."""
    far = [each for each in alike if not each >= LEAST_ALIKE]
    if far:
        warnings.warn(
            f"{len(far)} of {len(alike)} recorded updates hardly resemble those of the images given"
            f" (a cosine of {min(far):.2f} at the least): the images, their order or the client's "
            "settings are not theirs, or a defense is not told; what is found here says nothing of "
            "those updates",
            GradveilWarning,
            stacklevel=4,
        )


def _taken(computed: dict[str, Tensor], recorded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what was recorded in the order, type and device of what would be computed."""
    if absent := computed.keys() - recorded.keys():
        raise GradveilError(f"the record does not fit the model: it has no {min(absent)!r}")
    return {name: recorded[name].to(value) for name, value in computed.items()}


def as_recorded(
    record: Mapping[str, Recorded],
    client: Client,
    loss: Loss | None = None,
    doubted: bool = True,
) -> RecordedClient:
    """Return the client with a record, and perhaps another loss."""
    given = {each.name: getattr(client, each.name) for each in fields(Client) if each.init}
    given |= {} if loss is None else {"loss": loss}
    return RecordedClient(**given, record=record, doubted=doubted)


def batch_digest(batch: Batch) -> str:
    """Return what tells a batch from others: a digest of its bytes."""
    images = (batch.images.detach().cpu() * 255).round().to(torch.uint8)
    return digest({"images": images, "labels": batch.labels.cpu()})


@dataclass(frozen=True, eq=False)
class Victims:
    """The updates of a round that are attacked together, with the images behind each."""

    updates: tuple[Update, ...]
    numbers: tuple[Tensor, ...]
    protocol: Protocol
    divided_by: float  # what weights' differences are divided by to stand for a gradient
    note: str  # how the attacker takes the update, where that is not exactly what it is
    left_out: str = ""  # what of the round is not attacked, and why


def audit_round(
    job: FederationJob,
    number: int,
    out: Path,
    *,
    splits: tuple[Images, Images],
    device: str = "auto",
    progress: bool = True,
) -> AuditResult:
    """Attack what the spy kept of a round, into a folder of `out`.

    An error says why a round cannot be attacked, which does not mean that it is safe.
    """
    audit = make_audit(job, number, out, splits)
    return run_audit(audit, audit_folder(out, number), device=device, progress=progress)


def foreseen_audits(
    job: FederationJob,
    numbers: Sequence[int],
    out: Path,
    splits: tuple[Images, Images],
    device: str,
) -> float:
    """Return about how many seconds the audits of these rounds take, from the first's attacks.

    0 where that cannot be attacked.
    """
    try:
        audit = make_audit(job, numbers[0], out, splits)
        folder = audit_folder(out, numbers[0])
        return len(numbers) * foreseen_seconds(audit, folder, None, find_device(device))
    except GradveilError:  # said when its turn comes
        return 0.0


def audit_folder(out: Path, number: int) -> Path:
    """Return the folder of a round's audit, in that of the training."""
    return out / AUDITS / f"round-{number:04d}"


def make_audit(
    job: FederationJob, number: int, out: Path, splits: tuple[Images, Images]
) -> AuditJob:
    """Return the audit of a round: its victims are the first images, others stand in line-ups.

    Public images are those of the test split.
    """
    train, _ = splits
    victims = choose_victims(job, number, out, train)
    # What a neighbor sent comes from its own weights: those of the spy tell of no batch.
    same = job.graph is None
    record = make_record(victims, train, lambda client: job.draws(int(client), number), same)
    recorded = partial(as_recorded, record, doubted=same)
    return _audit_of(job, number, out, victims, splits, recorded)


def foresee_audit(
    job: FederationJob,
    number: int,
    out: Path,
    shares: Sequence[Tensor],
    splits: tuple[Images, Images],
) -> Victims:
    """Return the victims of a round where every client answers, before the training.

    An error says why they cannot be attacked, or what is wrong with the settings of the attacks.
    """
    victims = foresee_victims(job, number, shares, splits[0])
    _audit_of(job, number, out, victims, splits, None)
    return victims


def _audit_of(
    job: FederationJob,
    number: int,
    out: Path,
    victims: Victims,
    splits: tuple[Images, Images],
    recorded: Callable[[Client], Client] | None,
) -> AuditJob:
    train, test = splits
    images, count = lined_up(victims, train)
    return AuditJob(
        job.model,
        images,
        job.attacks,
        job.auto,
        (Case(job.defense, round_folder(out / SPY, number) / SENT, step=str(number - 1)),),
        count,
        test,
        batch_size=len(victims.numbers[0]),
        steps=job.steps,
        protocol=victims.protocol,
        first=0,
        seed=derived(job.seed, "audit", number) >> 1,
        recorded=recorded,
        note="; ".join(
            filter(None, (victims.note, sham_words(victims, job.defense), victims.left_out))
        ),
    )


def make_record(
    victims: Victims, train: Images, draws: Callable[[str], Generator], statistics: bool
) -> dict[str, Recorded]:
    """Return what each victim sent, by the digest of its batch.

    `draws` gives the generator of a client; `statistics` tells whether those of batch norm that a
    single client sent are of its batch.
    """
    record = {}
    for update, numbers in zip(victims.updates, victims.numbers, strict=True):
        batch = Batch(train.images[numbers].float() / 255, train.labels[numbers])
        record[batch_digest(batch)] = Recorded(
            update.as_gradients(victims.divided_by),
            update.statistics() if statistics and not update.members else {},
            draws(members_of(update)[0]),
        )
    return record


def lined_up(victims: Victims, train: Images) -> tuple[Images, int]:
    """Return the victims' images with others of their classes after them, and count the first."""
    order = torch.cat(victims.numbers)
    most = CANDIDATES + len(victims.numbers[0])
    return train.select(torch.cat([order, *_others(train, order, most)])), len(order)


def _others(train: Images, victims: Tensor, most: int) -> Iterator[Tensor]:
    """Give other images of the victims' classes by their numbers, some from all over the split."""
    free = torch.ones(len(train), dtype=torch.bool)
    free[victims] = False
    for label in train.labels[victims].unique():
        there = (free & (train.labels == label)).nonzero().flatten()
        if len(there):
            yield there[torch.linspace(0, len(there) - 1, min(most, len(there))).long().unique()]


def choose_victims(job: FederationJob, number: int, out: Path, train: Images) -> Victims:
    """Choose updates of a round by as many images each, as many as the job has audited."""
    updates = read_round(out / SPY, number)
    return _choose(job, number, updates, make_shares(job, train), train)


def foresee_victims(
    job: FederationJob, number: int, shares: Sequence[Tensor], train: Images
) -> Victims:
    """Choose before the training, as if every client answers: of updates that hold nothing yet."""
    if job.graph is not None:
        clients = sorted(job.graph.neighbors(job.spy))
    else:
        clients = job.participants(number)
    groups = [tuple(map(str, group)) for group in grouped(clients, job.average_of or 1)]
    updates = [
        Update(group[0], number, {}, {}, job.one_gradient, 0.0)
        if job.average_of is None
        else Update(f"average-{index}", number, {}, {}, job.one_gradient, 0.0, group)
        for index, group in enumerate(groups)
    ]
    return _choose(job, number, updates, shares, train)


def _choose(
    job: FederationJob,
    number: int,
    updates: Sequence[Update],
    shares: Sequence[Tensor],
    train: Images,
) -> Victims:
    if not updates:
        raise GradveilError(f"round {number}: the spy has no update")
    if any(update.members for update in updates) and job.inside.parts():
        raise GradveilError(
            f"round {number}: averages of clients under {job.inside} are not attacked: each client "
            "drew by itself; that does not make them safe"
        )
    images = {
        update.client: torch.cat(
            [_images_of(job, member, number, shares) for member in members_of(update)]
        )
        for update in updates
    }
    chosen = alike(updates, images, job.audited)
    client = int(members_of(chosen[0])[0])
    protocol, taken = _protocol(job, number, client, shares)
    if taken is None and any(update.members for update in chosen):
        sizes = [
            [len(_images_of(job, member, number, shares)) for member in members_of(update)]
            for update in chosen
        ]
        shape = train.channels, train.size, train.size
        protocol, taken = as_mean(protocol, make_model(job, train), sizes, shape)
    divided_by, note = protocol.local_lr, taken or ""
    if taken is not None:
        divided_by *= protocol.summed(len(_images_of(job, str(client), number, shares)))
        protocol = Protocol(local_lr=protocol.local_lr, train_mode=job.train_mode)
    elif job.graph is not None:
        note = f"participant {job.spy} attacks with its own weights, whatever its neighbors' are"
    elif protocol.local_epochs > 1:
        note = "the order of the first epoch is taken for all; each had its own"
    return Victims(
        tuple(chosen),
        tuple(images[update.client] for update in chosen),
        protocol,
        divided_by,
        note,
        left_out_words(images.values(), len(images[chosen[0].client])),
    )


def members_of(update: Update) -> tuple[str, ...]:
    """Return the clients behind an update."""
    return update.members or (update.client,)


def alike(updates: Sequence[Update], images: Mapping[str, Tensor], most: int) -> list[Update]:
    """Choose updates by as many images each, of `most` images in all; of the size most have.

    Those of too many images to be attacked are left out.
    """
    every = [len(images[update.client]) for update in updates]
    sizes = [size for size in every if size <= MOST]
    if not sizes:
        least, largest = min(every), max(every)
        said = f"an update of {least} images is not attacked, at most {MOST} are; that does not "
        said += "make it safe"
        if least < largest:
            said = f"updates of {least} to {largest} images are not attacked, at most {MOST} are; "
            said += "that does not make them safe"
        raise GradveilError(f"round {updates[0].round}: {said}")
    size = max(set(sizes), key=lambda each: (sizes.count(each), -each))
    chosen = [update for update in updates if len(images[update.client]) == size]
    return chosen[: max(1, most // size)]


def left_out_words(images: Collection[Tensor], size: int) -> str:
    """Say how many of a round's updates are not attacked beside those of `size` images, and why."""
    every = [len(each) for each in images]
    larger = sum(count > MOST for count in every)
    other = sum(count != size and count <= MOST for count in every)
    said = [f"{larger} of more than {MOST} images"] if larger else []
    said += [f"{other} of other numbers of images than {size}"] if other else []
    if not said:
        return ""
    more = "that does not make them safe"
    return f"not attacked, of {len(every)} updates: {', '.join(said)}; {more}"


def sham_words(victims: Victims, defense: Defense) -> str:
    """Say how the sham of averages differs from them, where a defense acts on each update."""
    if not defense.changes("gradients") or not any(each.members for each in victims.updates):
        return ""
    return f"{defense} acts on the update of each client, and in the sham once on their average"


APPROXIMATED = (
    "are taken as one gradient of all images, which is an approximation: what it does not"
)
APPROXIMATED += " find is not shown to be safe"


def as_mean(
    protocol: Protocol,
    model: nn.Module,
    sizes: Sequence[Sequence[int]],
    image_shape: ImageShape,
) -> tuple[Protocol, str | None]:
    """Return the protocol of averages of clients who each follow this one, and None.

    `sizes` are the numbers of images of each average's clients. Where these differ, and the mean
    of their updates is more than one gradient of all images, the second says that they are taken
    as that.
    """
    clients = len(sizes[0])
    averaged, most = replace(protocol, averaged_clients=clients), max(map(sum, sizes))
    found = as_one_client(averaged, model, most, image_shape)
    even = len({size for each in sizes for size in each}) == len({*map(len, sizes)}) == 1
    if found.averaged_clients == 1 or even:
        return found, None
    return protocol, f"the updates of clients with different numbers of images {APPROXIMATED}"


def _protocol(
    job: FederationJob, number: int, client: int, shares: Sequence[Tensor]
) -> tuple[Protocol, str | None]:
    """Return what a client did, and None; or how its steps are taken that no protocol tells."""
    rate = job.recipe.rate(number - 1)
    gradient = Protocol(local_lr=rate, train_mode=job.train_mode)
    if job.one_gradient:
        return gradient, None
    steps = len(job.local_batches(shares[client], client, number))
    if steps > 1 and job.inside.changes("batch"):
        raise GradveilError(
            f"round {number}: {steps} local steps under {job.inside} are not attacked: each step "
            "changed its images anew; that does not make them safe"
        )
    each = -(-len(shares[client]) // job.batch_size)  # batches of an epoch
    local = replace(gradient, client_momentum=job.momentum, client_weight_decay=job.weight_decay)
    if steps > each > 1 and steps % each:
        return replace(local, local_steps=steps), f"{steps} local steps {APPROXIMATED}"
    if each == 1 or steps == 1:
        return replace(local, local_steps=steps), None
    return replace(local, local_epochs=-(-steps // each), local_batch_size=job.batch_size), None


def _images_of(job: FederationJob, client: str, number: int, shares: Sequence[Tensor]) -> Tensor:
    """Return the images behind a client's update, by their numbers."""
    return job.images_of(shares[int(client)], int(client), number)
