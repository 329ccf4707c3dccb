"""Policies that an attacker can look through: their values are the policy's own pixels, and they have slopes.

An operation on whole numbers has no slope of use. So its value is the exact one, and its slope that of a smooth stand-in ("straight
through"). Values that the operation cuts off at 0 or 255 keep the slope they would have had, or a search could get stuck there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import signs
from gradveil.transforms.policy import LONGEST, Policy, Transform
from gradveil.transforms.preparation import Preparation, crop_and_flip
from gradveil.transforms.slopes import SLOPES

Prepare = Policy | Preparation


@dataclass(frozen=True, eq=False)
class Drawn:
    """A policy, and the crop and flip before it if any, with all draws made: called with float images in [0, 1], NCHW, differentiable.

    For each image: `member` of the hybrid, `signs` (N, 3) of its transformations, and `source` (N, 1, H, W), the place in the
    image that each pixel is cropped from, counted from 1; 0 is the black border.
    """

    policy: Policy
    member: Tensor
    signs: Tensor
    source: Tensor | None = None

    def __len__(self) -> int:
        return len(self.member)

    def __call__(self, images: Tensor) -> Tensor:
        """The client's own pixels for the images rounded to whole numbers, as it rounds them."""
        self._check(images)
        exact = (images.detach() * 255).round().clamp(0, 255).to(torch.uint8)
        return _through(*self._run(exact, images * 255), images.dtype)

    def pixels(self, images: Tensor) -> Tensor:
        """Of uint8 images, what the client's policy makes of them."""
        self._check(images)
        return self._run(images, None)[0]

    def beside(self, others: Sequence["Drawn"]) -> "Drawn":
        """This one's images and then those of others, in one call. All must be of one policy."""
        every = (self, *others)
        sources = [one.source for one in every if one.source is not None]
        if any(one.policy != self.policy for one in others) or len(sources) not in (0, len(every)):
            raise GradveilError("transforms of different policies cannot be joined: call each on its own images")
        member, directions = (torch.cat(parts) for parts in ([one.member for one in every], [one.signs for one in every]))
        return Drawn(self.policy, member, directions, torch.cat(sources) if sources else None)

    def _run(self, exact: Tensor, soft: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Whole numbers, and beside them the stand-in in 0..255 where slopes are wanted."""
        if self.source is not None:
            exact, soft = _cropped(exact, self.source), None if soft is None else _cropped(soft, self.source)
        if len(self.policy.members) == 1:
            return _followed(self.policy.members[0], exact, soft, self.signs)
        out, slopes = torch.empty_like(exact), None if soft is None else torch.empty_like(soft)
        for number, member in enumerate(self.policy.members):
            rows = (self.member == number).nonzero().squeeze(1)
            there = rows.to(exact.device)
            out[there], part = _followed(member, exact[there], None if soft is None else soft[there], self.signs[rows])
            if slopes is not None and part is not None:
                slopes = slopes.index_put((there,), part)
        return out, slopes

    def _check(self, images: Tensor) -> None:
        if images.dim() != 4 or len(images) != len(self):
            raise GradveilError(f"images of shape {tuple(images.shape)}: the draws are those of {len(self)} image(s), NCHW")


@dataclass(frozen=True)
class Anew:
    """A policy whose draws are unknown: each call draws anew."""

    prepare: Prepare

    def __call__(self, images: Tensor, rng: Generator) -> Tensor:
        return self.draw(images, rng)(images)

    def draw(self, images: Tensor, rng: Generator) -> Drawn:
        """One draw, to be kept."""
        return draw(self.prepare, images, rng)


def draw(prepare: Prepare, images: Tensor, rng: Generator) -> Drawn:
    """What `prepare(images, rng)` would draw; the generator ends up in the same state. Of the images only the shape counts."""
    if isinstance(prepare, Policy):
        return Drawn(prepare, *_draw_policy(prepare, len(images), rng))
    count, _, height, width = images.shape
    places = torch.arange(1, height * width + 1, device=images.device).view(1, 1, height, width).expand(count, 1, height, width)
    source = crop_and_flip(places, prepare.padding, prepare.flip, rng)
    return Drawn(prepare.policy, *_draw_policy(prepare.policy, count, rng), source)


def drawn(prepare: Prepare, images: Tensor, rng: Generator) -> tuple[Tensor, Drawn]:
    """`prepare(images, rng)` for uint8 images, and beside it the same transform for an attacker who knows the draws."""
    made = draw(prepare, images, rng)
    return made.pixels(images), made


def _draw_policy(policy: Policy, count: int, rng: Generator) -> tuple[Tensor, Tensor]:
    """In the order of `Policy`: a member for each image, then for each member that occurs the signs of each of its transformations."""
    member = torch.zeros(count, dtype=torch.long)
    if len(policy.members) > 1:
        member = torch.randint(len(policy.members), (count,), generator=rng, device=rng.device).cpu()
    directions = torch.ones(count, LONGEST, dtype=torch.long)
    for number, transforms in enumerate(policy.members):
        rows = (member == number).nonzero().squeeze(1)
        for place, transform in enumerate(transforms):
            if transform.signed and len(rows):
                directions[rows, place] = signs(len(rows), rng).cpu()
    return member, directions


def _followed(member: tuple[Transform, ...], exact: Tensor, soft: Tensor | None, directions: Tensor) -> tuple[Tensor, Tensor | None]:
    for place, transform in enumerate(member if len(exact) else ()):
        chosen = directions[:, place]
        after = transform.apply(exact, chosen)
        if soft is not None:
            soft = _as_if(SLOPES[transform.name](soft, exact, transform.value, chosen), after)
        exact = after
    return exact, soft


def _as_if(soft: Tensor, exact: Tensor) -> Tensor:
    """The value of one, the slope of the other."""
    return exact.to(soft.dtype) + (soft - soft.detach())


def _through(exact: Tensor, soft: Tensor | None, dtype: torch.dtype) -> Tensor:
    assert soft is not None
    return exact.to(dtype) / 255 + (soft - soft.detach()) / 255


def _cropped(images: Tensor, source: Tensor) -> Tensor:
    source = source.to(images.device).flatten(2).expand(-1, images.shape[1], -1)
    taken = images.flatten(2).gather(2, (source - 1).clamp(min=0))
    return torch.where(source > 0, taken, torch.zeros((), dtype=images.dtype, device=images.device)).view_as(images)
