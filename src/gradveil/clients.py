"""The client's side: from private batches to what the server sees of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from gradveil.core.boundary import check_fields, public
from gradveil.core.errors import GradveilError, kind_of, text_of
from gradveil.core.importing import user_code
from gradveil.core.seeds import as_generator, drawn_seed, following, forked
from gradveil.core.types import (
    Batch,
    Gradients,
    Knowledge,
    Loss,
    Observation,
    Protocol,
    Statistics,
)
from gradveil.defenses.applied import (
    check_defense,
    known_in_mode,
    protected_batch,
    protected_gradients,
    protected_model,
)
from gradveil.defenses.base import Defense, Moment
from gradveil.engine.draws import Draws, draw, draw_shapes, drawing
from gradveil.engine.gradients import cross_entropy, in_mode, trainable, try_pass
from gradveil.engine.shares import Shares
from gradveil.models.bottleneck import penalties
from gradveil.models.factories import check_weights_exist

MOST_VICTIMS = 64
MOST_IMAGES = 512  # in one pass, so that its memory has a bound


class Rounds:
    """The gradients of some victims round after round, of the same batches at the same weights.

    `statistics` are the running ones that each victim sends along in the last round.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        protocol: Protocol,
        defense: Defense,
        used: Sequence[Batch],
        streams: Sequence[Generator],
    ) -> None:
        self._model, self._loss, self._protocol = model, loss, protocol
        self._defense, self._used, self._streams = defense, used, streams
        self._states = [defense.start() for _ in used]
        self._clean: list[Gradients] | None = None
        with self._mode():
            names = set(drawing(model))
            self._shapes = draw_shapes(model, used[0].images, names) if names else {}
        self._told = not protocol.moves(len(used[0]))
        self.statistics: list[Statistics] = []
        self.shares = Shares(model, loss, protocol, told=self._shapes if self._told else ())

    def next(self) -> list[Gradients]:
        """Return the gradients that each victim shares in the next round."""
        with self._mode():
            drawn = [
                _drawn(self._model, self._shapes, batch, stream)
                for batch, stream in zip(self._used, self._streams, strict=True)
            ]
        if self._clean is None or self._shapes:
            self._clean = self._gradients(drawn)
        found = []
        with self._mode():
            for victim, (gradients, batch, draws) in enumerate(
                zip(self._clean, self._used, drawn, strict=True)
            ):
                moment = Moment(self._model, batch, self._loss, draws)
                shared = protected_gradients(
                    self._defense, gradients, moment, self._states[victim], self._streams[victim]
                )
                found.append(shared[0])
                self._states[victim] = shared[1]
        return found

    def _gradients(self, drawn: Sequence[Draws]) -> list[Gradients]:
        found: list[tuple[Gradients, Statistics]] = []
        if self._told or not self._shapes:
            for some in _chunks(self._used):
                found += _shared(self.shares, self._used, drawn, some)
        else:
            for victim, stream in enumerate(self._streams):
                alone = range(victim, victim + 1)
                with following(stream):  # each local step draws anew, from torch's generator
                    found += _shared(self.shares, self._used, [{}] * len(drawn), alone)
        self.statistics = [statistics for _, statistics in found]
        return [gradients for gradients, _ in found]

    def _mode(self) -> AbstractContextManager[None]:
        return in_mode(self._model, self._protocol.train_mode)


def _drawn(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], batch: Batch, rng: Generator
) -> dict[str, Tensor]:
    """Draw for the model's modules as a pass of this batch would, for `engine.draws.given`."""
    return {
        name: draw(model.get_submodule(name), (len(batch), *shape), batch.images, rng)
        for name, shape in shapes.items()
    }


def _chunks(batches: Sequence[Batch]) -> Iterator[range]:
    """Yield the numbers of some victims at a time."""
    step = max(1, min(MOST_VICTIMS, MOST_IMAGES // len(batches[0])))
    for first in range(0, len(batches), step):
        yield range(first, min(first + step, len(batches)))


def _shared(
    shares: Shares, batches: Sequence[Batch], drawn: Sequence[Draws], some: range
) -> list[tuple[Gradients, Statistics]]:
    draws = {name: torch.stack([drawn[victim][name] for victim in some]) for name in drawn[some[0]]}
    images, labels = (
        torch.stack([getattr(batches[victim], part) for victim in some])
        for part in ("images", "labels")
    )
    sent = shares.send(images, labels, draws=draws)
    found = {name: value.detach() for name, value in sent.gradients.items()}
    finite = torch.stack([value.flatten(1).isfinite().all(1) for value in found.values()])
    if not bool(finite.all()):
        layer, victim = (~finite).nonzero()[0].tolist()
        raise GradveilError(
            f"victim {some[victim]}: the gradient of {list(found)[layer]!r} is not finite: "
            "the loss or its slope overflows; take other weights, or fewer local steps at a lower "
            "rate"
        )
    alive = torch.stack([value.flatten(1).any(1) for value in found.values()]).any(0)
    if not bool(alive.all()):
        victim = int((~alive).nonzero()[0])
        raise GradveilError(
            f"victim {some[victim]}: the model's gradient is zero: dead or saturated; nothing can "
            "be matched"
        )
    return [
        (
            {name: value[number] for name, value in found.items()},
            {name: value[number] for name, value in sent.statistics.items()},
        )
        for number in range(len(some))
    ]


class Shared(NamedTuple):
    """An update: the server's observation, and the batch that the client truly used."""

    seen: Observation
    batch: Batch

    @property
    def used(self) -> Tensor:
        """The images used, NCHW in [0, 1] on the CPU, with which reconstructions are compared."""
        return self.batch.images.detach().cpu()


@dataclass(frozen=True, eq=False)
class Client:
    """A participant of collaborative learning: a model, its loss, its protocol and its defense.

    `classes` is the number of logits that the model gives; None asks the model. `clean` leaves
    out what the defense does to gradients, as published evaluations of pruning and noise did.
    `protected` says that the defense is built into the model already, as in a model trained under
    it.
    """

    model: nn.Module
    classes: int | None = None
    loss: Loss = cross_entropy
    protocol: Protocol = field(default_factory=Protocol)
    defense: Defense = field(default_factory=Defense)
    clean: bool = False
    protected: bool = False
    _models: dict[tuple[int, ...], nn.Module] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        check_defense(self.defense)

    @public
    def share(
        self, images: Tensor, labels: Tensor, seed: int | Generator = 0, *, tell: bool = True
    ) -> Shared:
        """Share one update of this batch: images (N, C, H, W) in [0, 1] and N class indices.

        With `tell` the attacker knows the defense and its settings, but none of its draws.
        """
        batch = Batch(images, labels)
        rng = as_generator(seed, "share")
        (shared,) = self.share_batches([batch], rng, tell_defense=tell)
        return shared

    @public
    def share_each(
        self, images: Tensor, labels: Tensor, seed: int | Generator = 0, *, tell: bool = True
    ) -> list[Shared]:
        """Share an update for each image, as clients with a single image each would."""
        _check_form(Batch(images, labels), "images")
        batches = [
            Batch(image[None], label[None]) for image, label in zip(images, labels, strict=True)
        ]
        return self.share_batches(batches, as_generator(seed, "share"), tell_defense=tell)

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
        """Share one update for each batch, all in one batched pass where the model allows it.

        Victims draw from a single `rng` in turn, as if they shared one after the other, or each
        from the generator that it is given. With several rounds each victim shares the same batch
        at the same weights again: the last round is seen, with the earlier ones as knowledge.
        With `tell_defense` the attacker knows the defense and its settings; with `tell_draws` also
        the draws of its policy for these images.
        """
        if not batches:
            return []
        for number, batch in enumerate(batches):
            _check_form(batch, f"victim {number}")
        rngs = [rng] * len(batches) if isinstance(rng, Generator) else list(rng)
        classes = self.count_classes(batches[0].images)
        self._check(batches, classes, rounds)
        victims = self._victims(batches, classes, rngs)
        used = [victim.batch for victim in victims]
        model, loss = self.protected_model(used[0].images), self.acting.protect_loss(self.loss)
        with forked():
            self._check_model(model, loss, used[0].images, classes)
            shared = Rounds(
                model, loss, self.protocol, self.acting, used, [victim.stream for victim in victims]
            )
            found = [shared.next() for _ in range(rounds)]
        updates = []
        kept = shared.statistics
        for victim, (*earlier, last), sent in zip(
            victims, zip(*found, strict=True), kept, strict=True
        ):
            known = Knowledge(
                labels=victim.batch.labels,
                earlier=tuple(earlier) or None,
                statistics=sent or None,
            )
            if tell_defense:
                known = known_in_mode(self.acting, known, model, self.protocol.train_mode)
            known = replace(known, transform=victim.transform) if tell_draws else known
            known = known if tell_labels else replace(known, labels=None)
            _, channels, height, width = victim.batch.images.shape
            shape, size = (channels, height, width), len(victim.batch)
            seen = Observation(model, loss, last, shape, size, classes, self.protocol, known)
            updates.append(Shared(seen, victim.batch))
        return updates

    def count_classes(self, images: Tensor) -> int:
        """Return the number of classes: as given, or the logits of the model for such an image."""
        check_weights_exist(self.model)
        if self.classes is not None:
            return self.classes
        example, name = next(iter(trainable(self.model).values())), type(self.model).__name__
        with forked(), in_mode(self.model, False):
            failing = f"{name} and images of shape {tuple(images.shape)} do not fit"
            answers = try_pass(self.model, images[:1].to(example), failing)
        if answers.dim() != 2 or len(answers) != 1:
            raise GradveilError(
                f"{name} gave {tuple(answers.shape)} for one image: expected (1, classes)"
            )
        return answers.shape[1] - penalties(self.model)

    @property
    def acting(self) -> Defense:
        """The part of the defense that acts on what is shared."""
        return self.defense.without_gradients() if self.clean else self.defense

    def protected_model(self, images: Tensor) -> nn.Module:
        """Return the model that the gradients are of, for such images.

        It is made at the first use, so other weights need another client.
        """
        shape = tuple(images.shape[1:])
        if shape not in self._models:
            made = self.model
            if not self.protected and self.acting.parts():
                with forked():
                    classes = self.count_classes(images)
                    Shares(self.model, self.loss, self.protocol).check(images, classes)
                channels, height, width = shape
                made = protected_model(self.acting, self.model, (channels, height, width))
            self._models[shape] = made
        return self._models[shape]

    def _check_model(self, model: nn.Module, loss: Loss, images: Tensor, classes: int) -> None:
        """Refuse a model that cannot share; one that the defense made is named with it."""
        try:
            check_weights_exist(model)
            trainable(model)
            Shares(model, loss, self.protocol).check(images, classes + penalties(model))
        except GradveilError as error:
            if model is self.model:
                raise
            raise GradveilError(f"defense {self.acting}: its model: {error}") from error

    def _check(self, batches: Sequence[Batch], classes: int, rounds: int) -> None:
        check_weights(self.model)
        for number, batch in enumerate(batches):
            check_batch(batch, classes, f"victim {number}")
        if rounds < 1:
            raise GradveilError(f"rounds {rounds}: there must be at least 1")
        size = len(batches[0])
        for part in self.acting.parts():
            if part.one_step and self.protocol.moves(size):
                raise GradveilError(
                    f"defense {part}: it protects a single gradient, and the client takes "
                    f"{self.protocol.in_words(size)}; take 1"
                )

    def _victims(
        self, batches: Sequence[Batch], classes: int, rngs: Sequence[Generator]
    ) -> list["_Victim"]:
        example = next(iter(trainable(self.model).values()))
        found: list[_Victim] = []
        for number, (batch, rng) in enumerate(zip(batches, rngs, strict=True)):
            given = Batch(
                batch.images.detach().to(example), batch.labels.to(example.device, torch.long)
            )
            with user_code(
                f"defense {text_of(self.acting, type(self.acting).__name__)}: reveal failed"
            ):
                transform = self.acting.reveal(given.images, rng.clone_state())
            used = protected_batch(self.acting, given, rng)
            if used is not given:
                check_batch(used, classes, f"victim {number}, after {self.acting}")
            draws = self.acting.parts() or self._draws(self.protected_model(used.images))
            found.append(_Victim(used, _stream(rng) if draws else rng, transform))
        _check_alike([victim.batch for victim in found])
        return found

    def _draws(self, model: nn.Module) -> bool:
        with in_mode(model, self.protocol.train_mode):
            return bool(drawing(model))


@dataclass(frozen=True, eq=False)
class _Victim:
    """A batch as the defense changed it, by `transform`, and a generator for all later draws."""

    batch: Batch
    stream: Generator
    transform: Callable[[Tensor], Tensor] | None


def _stream(rng: Generator) -> Generator:
    return Generator(rng.device).manual_seed(drawn_seed(rng))


def check_batch(batch: Batch, classes: int, name: str) -> None:
    """Refuse a batch that is not NCHW floats in [0, 1] with a class index for each image."""
    _check_form(batch, name)
    images, labels = batch.images, batch.labels
    if not images.is_floating_point():
        raise GradveilError(
            f"{name}: images of type {images.dtype}; expected floating point in [0, 1], such as "
            "images / 255"
        )
    low, high = float(images.min()), float(images.max())
    if not (low >= 0 and high <= 1):
        raise GradveilError(
            f"{name}: images with values from {low:g} to {high:g}; expected [0, 1], the model "
            "normalizes"
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise GradveilError(
            f"{name}: labels of type {labels.dtype}; expected class indices, integers"
        )
    if not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        wrong = next(label for label in labels.tolist() if not 0 <= label < classes)
        raise GradveilError(
            f"{name}: label {wrong}; there are {classes} classes, 0 to {classes - 1}"
        )


def _check_form(batch: Batch, name: str) -> None:
    for part, value in (("images", batch.images), ("labels", batch.labels)):
        if not isinstance(value, Tensor):
            raise GradveilError(f"{name}: {part}: {kind_of(value)}; expected a torch.Tensor")
    images, labels = tuple(batch.images.shape), tuple(batch.labels.shape)
    if len(images) != 4 or 0 in images or labels != images[:1]:
        raise GradveilError(
            f"{name}: images of shape {images} and labels of shape {labels}; expected images "
            "(N, C, H, W) and N labels, N at least 1"
        )


def check_weights(model: nn.Module) -> None:
    """Refuse a model with a weight or statistic that is not finite."""
    for name, value in chain(model.named_parameters(), model.named_buffers()):
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise GradveilError(
                f"the model's {name!r} has values that are not finite: its training diverged; "
                "load other weights"
            )


def _check_alike(batches: Sequence[Batch]) -> None:
    first = batches[0].images.shape
    for number, batch in enumerate(batches):
        if batch.images.shape != first:
            raise GradveilError(
                f"victim 0 has images of shape {tuple(first)}, victim {number} "
                f"{tuple(batch.images.shape)}: share victims of one batch size and one image shape "
                "together"
            )
