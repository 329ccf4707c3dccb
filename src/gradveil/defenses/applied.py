"""Applying a defense and checking what it gives back: its class may be a user's own.

Clients, chains and training call a defense through these functions, so a mistake in a class is one
line that names it, wherever it shows.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import get_args

import torch
from torch import Generator, Tensor, nn

from gradveil.core.errors import GradveilError, kind_of, text_of
from gradveil.core.importing import user_code
from gradveil.core.types import Batch, Gradients, ImageShape, Knowledge
from gradveil.defenses.base import Defense, Moment, Seam, State, is_built_in
from gradveil.defenses.insertion import parameters_from
from gradveil.engine.draws import DROPOUTS, drawing
from gradveil.engine.gradients import cross_entropy, in_mode

NAMED = 3  # names in an error


def check_defense(defense: Defense) -> None:
    """Refuse a class whose members are not what `Defense` says of them, before it is applied."""
    if is_built_in(type(defense)) and type(defense).__name__ != "Chain":
        return
    with _explained(defense, "parts"):
        parts: object = defense.parts()
    if not isinstance(parts, tuple) or not all(isinstance(part, Defense) for part in parts):
        raise _wrong(defense, "parts", _kind(parts), "a tuple of defenses")
    for part in (defense, *parts):
        if part.acts_on not in get_args(Seam):
            said = f"acts_on is {part.acts_on!r}; choose from {', '.join(get_args(Seam))}"
            raise GradveilError(f"defense {_text(part)}: {said}")
        for name in ("breakers", "strongest", "instead"):
            value = getattr(part, name)
            if not isinstance(value, tuple):
                said = f"{name} is {kind_of(value)}; expected a tuple of names of attacks"
                raise GradveilError(f"defense {_text(part)}: {said}")
        with _explained(part, "protect_loss"):
            loss: object = part.protect_loss(cross_entropy)
        if not callable(loss):
            raise _wrong(part, "protect_loss", _kind(loss), "a function of logits and labels")
        with _explained(part, "without_gradients"):
            rest: object = part.without_gradients()
        if not isinstance(rest, Defense):
            raise _wrong(part, "without_gradients", _kind(rest), "a Defense")


def told_knowledge(defense: Defense, knowledge: Knowledge, model: nn.Module) -> Knowledge:
    """Return what an attacker knows who knows the defense, beside what it knew before."""
    with _explained(defense, "tell"):
        found: object = defense.tell(knowledge, model)
    if not isinstance(found, Knowledge):
        raise _wrong(defense, "tell", _kind(found), "a Knowledge")
    return found


def known_in_mode(
    defense: Defense, knowledge: Knowledge, model: nn.Module, train_mode: bool
) -> Knowledge:
    """Return what is told of the defense, and which layers draw in this mode.

    The server has the model, so it knows of layers that draw without any defense too.
    """
    known = told_knowledge(defense, knowledge, model)
    with in_mode(model, train_mode):
        drawn = drawing(model)
    if not drawn:
        return known
    layers = dict.fromkeys(
        (*(known.random_layers or ()), *parameters_from(model, next(iter(drawn))))
    )
    masks = any(isinstance(module, DROPOUTS) for module in drawn.values())
    return replace(known, random_layers=tuple(layers), train_masks=masks or known.train_masks)


def protected_model(
    defense: Defense, model: nn.Module, image_shape: ImageShape | None = None
) -> nn.Module:
    """Return the model that the defense makes of this one, a module that can be trained."""
    with _explained(defense, "protect_model"):
        made: object = defense.protect_model(model, image_shape)
    if not isinstance(made, nn.Module):
        raise _wrong(defense, "protect_model", _kind(made), "a torch.nn.Module")
    return made


def protected_batch(defense: Defense, batch: Batch, rng: Generator) -> Batch:
    """Return the batch as the defense leaves it: images of the same shape and type, and labels."""
    with _explained(defense, "protect_batch"):
        made: object = defense.protect_batch(batch, rng)
    if not isinstance(made, Batch):
        raise _wrong(defense, "protect_batch", _kind(made), "a Batch")
    for name, value, given in (
        ("images", made.images, batch.images),
        ("labels", made.labels, batch.labels),
    ):
        if not _alike(value, given):
            found = _form(value) if isinstance(value, Tensor) else kind_of(value)
            raise _wrong(defense, "protect_batch", f"{name} of {found}", _form(given))
    return made


def protected_gradients(
    defense: Defense,
    gradients: Gradients,
    moment: Moment,
    state: State,
    rng: Generator,
    *,
    finite: bool = True,
) -> tuple[Gradients, State]:
    """Return what is shared, by the names given and in their order, and what is kept.

    `finite` False leaves out the look at each value, which would keep a GPU waiting.
    """
    with _explained(defense, "protect_gradients"):
        answer: object = defense.protect_gradients(gradients, moment, state, rng)
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], dict):
        expected = "a dict of gradients and what is kept for the next round"
        raise _wrong(defense, "protect_gradients", _kind(answer), expected)
    shared, kept = answer
    if shared is gradients:
        return shared, kept
    if shared.keys() != gradients.keys():
        absent = [str(name) for name in gradients if name not in shared]
        extra = [str(name) for name in shared if name not in gradients]
        found = f"no gradient of {_few(absent)}" if absent else f"a gradient of {_few(extra)}"
        raise _wrong(defense, "protect_gradients", found, "the names it was given, no others")
    for name, given in gradients.items():
        value = shared[name]
        if not _alike(value, given):
            form = _form(value) if isinstance(value, Tensor) else kind_of(value)
            found = f"a gradient of {name!r} of {form}"
            raise _wrong(defense, "protect_gradients", found, _form(given))
    if finite and shared:
        _check_finite(defense, shared)
    return {name: _detached(shared[name]) for name in gradients}, kept


def _check_finite(defense: Defense, shared: Gradients) -> None:
    finite = torch.stack([value.isfinite().all() for value in shared.values()])
    if not bool(finite.all()):
        name = list(shared)[int((~finite).nonzero()[0])]
        raise _wrong(
            defense, "protect_gradients", f"a gradient of {name!r} that is not finite", "numbers"
        )


def _explained(defense: Defense, method: str) -> AbstractContextManager[None]:
    """Tell in a line what a user's own class raised; an error in this package stays as it is."""
    if is_built_in(type(defense)):
        return nullcontext()
    return user_code(f"defense {_text(defense)}: {method} failed", torch.OutOfMemoryError)


def _wrong(defense: Defense, method: str, found: str, expected: str) -> GradveilError:
    return GradveilError(f"defense {_text(defense)}: {method} gave {found}; expected {expected}")


def _text(defense: Defense) -> str:
    return text_of(defense, type(defense).__name__)


def _alike(value: object, given: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and value.shape == given.shape
        and value.dtype == given.dtype
        and value.device == given.device
    )


def _detached(value: Tensor) -> Tensor:
    return value.detach() if value.requires_grad else value


def _form(value: Tensor) -> str:
    device = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"shape {tuple(value.shape)} and type {str(value.dtype).removeprefix('torch.')}{device}"


def _kind(answer: object) -> str:
    if isinstance(answer, tuple):
        return f"({', '.join(type(part).__name__ for part in answer)})"
    return kind_of(answer)


def _few(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(map(repr, names[:NAMED])) + more
