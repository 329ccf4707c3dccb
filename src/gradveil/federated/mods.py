"""Defenses in a Flower client: a mod for the update that leaves it, a function for its images."""

import io
import secrets
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable
from torch import Generator, Tensor, nn

from gradveil.core.boundary import public
from gradveil.core.errors import GradveilError
from gradveil.core.importing import contained
from gradveil.core.seeds import generator
from gradveil.core.tensor_files import unpickle
from gradveil.core.types import Batch, Gradients
from gradveil.defenses import Defense, as_defense, chain
from gradveil.defenses.applied import check_defense, protected_batch, protected_gradients
from gradveil.defenses.base import Moment, State
from gradveil.engine.gradients import cross_entropy
from gradveil.federated.messages import (
    GRADIENTS,
    LOG,
    as_record,
    as_tensors,
    client_of,
    is_training,
    refusal,
    round_of,
)
from gradveil.federated.spied import STATISTICS, matches
from gradveil.transforms import Policy

KEPT = "gradveil.defend"  # in the client's state, what its defense keeps between rounds
HIDDEN = Moment(
    nn.Module(), Batch(torch.zeros(0, 1, 1, 1), torch.zeros(0).long()), cross_entropy
)  # a mod sees neither the model nor the batch
_waiting: ContextVar[list["Defend"] | None] = ContextVar("waiting", default=None)


@public
def defend(
    defense: Defense | Policy | str,
    *,
    seed: int | None = None,
    lr: float = 1.0,
    untouched: Sequence[str] = STATISTICS,
) -> "Defend":
    """Return a Flower mod that protects the update which leaves a client's training.

    The update is the difference of the weights before and after training, divided by `lr`, so that
    with the client's learning rate clipping and noise are measured as for a gradient. Whole numbers
    and arrays whose names match `untouched`, by default the statistics of batch norm, leave as they
    are: add the names of other buffers that your model has. Evaluations and queries pass through.

    Several of these mods act together whatever their order in the list: clipping first, noise
    last. One mod with a chain, such as `prune:0.9,then,clip:1`, keeps the order that it names.

    With a `seed` every draw can be repeated, also by a server that knows it; by default draws come
    from the operating system, and nobody can take the noise off again.
    """
    made = Defend(as_defense(defense), seed, lr, tuple(untouched))
    check_defense(made.defense)
    if not 0 < lr < float("inf"):
        raise GradveilError(f"lr {lr:g}: it must be above 0 and finite")
    for part in made.defense.parts():
        if part.acts_on in ("batch", "model"):
            inside = (
                "call gradveil.federated.policy on the images in the training function"
                if part.acts_on == "batch"
                else "train the model that its protect_model gives"
            )
            raise GradveilError(
                f"defense {part} changes the {'images' if part.acts_on == 'batch' else 'model'}, "
                f"and a mod sees the update alone: {inside}"
            )
        if part.repasses:
            raise GradveilError(
                f"defense {part} passes the batch through the model again, and a mod sees the "
                "update alone: take it in the training function, or with gradveil federate"
            )
    return made


@dataclass(frozen=True)
class Defend:
    """A mod made by `defend`."""

    defense: Defense
    seed: int | None
    lr: float
    untouched: tuple[str, ...]

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Train, then protect the update; the outermost of several such mods does it for all."""
        if not is_training(message):
            return call_next(message, context)
        if (outer := _waiting.get()) is not None:
            outer.append(self)
            return call_next(message, context)
        mods = [self]
        received = dict(message.content.array_records)
        number = round_of(message)
        token = _waiting.set(mods)
        try:
            reply = call_next(message, context)
        finally:
            _waiting.reset(token)
        if reply.has_error():
            return reply
        try:
            with contained():
                _protect(mods, received, reply, number, context)
        except GradveilError as error:  # nothing leaves that is not protected
            LOG.warning("gradveil: client %s sends nothing: %s", client_of(context), error)
            return refusal(str(error), message)
        return reply


def _protect(
    mods: Sequence[Defend],
    received: dict[str, ArrayRecord],
    reply: Message,
    number: int | None,
    context: Context,
) -> None:
    """Replace the arrays of the reply by what the defenses of all mods make of them."""
    defense = _joined(mods)
    lr = {mod.lr for mod in mods}
    if len(lr) > 1:
        raise GradveilError(
            f"defend mods with different lr, {', '.join(f'{value:g}' for value in sorted(lr))}: "
            "give all of them the same"
        )
    records = reply.content.array_records
    if len(records) != 1:
        raise GradveilError(
            f"the training function replied with {len(records)} array records; a defense expects 1"
        )
    (key, record), (rate,) = next(iter(records.items())), lr
    sent = as_tensors(record)
    names = [
        name
        for name, value in sent.items()
        if value.is_floating_point() and not any(matches(name, mod.untouched) for mod in mods)
    ]
    if not names:
        raise GradveilError("the training function replied with no floating-point arrays")
    state, count = _recall(defense, context)
    rng = _draws(mods, context, number or count + 1)
    if key == GRADIENTS:
        shared, state = _apply(defense, {name: sent[name] for name in names}, state, rng)
        protected = sent | shared
    else:
        before = _received_weights(received, sent)
        # In float64, so that what the defense leaves alone comes out as it went in.
        update = {name: (before[name].double() - sent[name].double()) / rate for name in names}
        shared, state = _apply(defense, update, state, rng)
        protected = sent | {
            name: (before[name].double() - rate * shared[name]).to(sent[name].dtype)
            for name in names
        }
    reply.content[key] = as_record(protected)
    _keep(defense, state, count + 1, context)


def _joined(mods: Sequence[Defend]) -> Defense:
    """Return one defense: what clips comes first, what adds noise last, the rest by name."""
    if len(mods) == 1:
        return mods[0].defense

    def order(defense: Defense) -> tuple[int, str]:
        parts = defense.parts()
        if any(part.noisy for part in parts):
            return 2, str(defense)
        return (0 if any(part.clips for part in parts) else 1), str(defense)

    return chain(sorted((mod.defense for mod in mods), key=order))


def _received_weights(
    received: dict[str, ArrayRecord], sent: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weights that the client got, which have the names and shapes of those it sends."""
    for record in received.values():
        found = as_tensors(record) if record.keys() == sent.keys() else {}
        if found and all(found[name].shape == sent[name].shape for name in sent):
            return found
    raise GradveilError(
        "the weights that the training function replied with have other names or shapes than those "
        f"it got, so there is no update to protect; gradients go under the key {GRADIENTS!r}"
    )


def _apply(
    defense: Defense, gradients: Gradients, state: State, rng: Generator
) -> tuple[Gradients, State]:
    return protected_gradients(defense, gradients, HIDDEN, state, rng)


def _draws(mods: Sequence[Defend], context: Context, number: int) -> Generator:
    """Return the generator of this client and round; without a seed, one that nobody can repeat."""
    seeds = [mod.seed for mod in mods if mod.seed is not None]
    if not seeds:
        return Generator().manual_seed(secrets.randbits(63))
    return generator(min(seeds), "defend", client_of(context), number)


def _recall(defense: Defense, context: Context) -> tuple[State, int]:
    """Return what this client's defense kept from its last round, and how many there were."""
    found = context.state.config_records.get(KEPT)
    return unpack(defense, found, Path("state")) if found is not None else (defense.start(), 0)


def unpack(defense: Defense, found: Mapping[str, object], path: Path) -> tuple[State, int]:
    """Return the state in what was kept, in this file, and the rounds; of another defense, none."""
    if found["defense"] != str(defense):
        return defense.start(), 0
    data, count = found.get("state"), found["rounds"]
    assert isinstance(count, int)
    if not isinstance(data, bytes):
        return defense.start(), count
    packed = unpickle(data, path)
    return defense.unpack_state(packed, torch.device("cpu")), count


def _keep(defense: Defense, state: State, count: int, context: Context) -> None:
    packed, file = defense.pack_state(state), io.BytesIO()
    kept = ConfigRecord({"defense": str(defense), "rounds": count})
    if not _is_empty(packed):
        torch.save(packed, file)
        kept["state"] = file.getvalue()
    context.state[KEPT] = kept


def _is_empty(packed: object) -> bool:
    return packed is None or (isinstance(packed, list | tuple) and all(map(_is_empty, packed)))


@public
def policy(given: Defense | Policy | str, *, seed: int | None = None) -> "ImagePolicy":
    """Return a function for a training function: it changes images as a policy says.

    `given` is a policy such as `3-1-7+43-18-18`, the policies.toml of a search, or any defense of
    images. Each call takes floats (N, C, H, W) in [0, 1] and draws anew, from the operating system
    or from `seed`.
    """
    defense = as_defense(given, "policy")
    check_defense(defense)
    other = next((part for part in defense.parts() if part.acts_on != "batch"), None)
    if other is not None:
        raise GradveilError(
            f"policy {defense}: {other} acts on the {other.acts_on}, not on images; give it to "
            "gradveil.federated.defend"
        )
    return ImagePolicy(defense, seed)


@dataclass(frozen=True)
class ImagePolicy:
    """A function made by `policy`."""

    defense: Defense
    seed: int | None

    @cached_property
    def _rng(self) -> Generator:
        if self.seed is None:
            return Generator().manual_seed(secrets.randbits(63))
        return generator(self.seed, "policy")

    def __call__(self, images: Tensor) -> Tensor:
        """Return the images as the policy changes them, of the same shape, type and device."""
        _check_images(images)
        labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
        return protected_batch(self.defense, Batch(images, labels), self._rng).images

    def __getstate__(self) -> dict[str, Any]:
        """Leave the generator out: processes that get a copy must not draw the same."""
        return {"defense": self.defense, "seed": self.seed}


def _check_images(images: Tensor) -> None:
    if images.dim() != 4 or not images.is_floating_point():
        raise GradveilError(
            f"policy: images of shape {tuple(images.shape)} and type {images.dtype}; expected "
            "floats (N, C, H, W)"
        )
    low, high = (float(images.min()), float(images.max())) if images.numel() else (0.0, 1.0)
    if not (low >= 0 and high <= 1):
        raise GradveilError(
            f"policy: images with values from {low:g} to {high:g}; expected [0, 1], before they "
            "are normalized"
        )
