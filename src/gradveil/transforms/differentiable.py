"""Policies that an attacker can look through: their values are the policy's own pixels, and they have slopes.

An operation on whole numbers has no slope of use. So its value is the exact one, and its slope that of a smooth stand-in ("straight
through"). Values that the operation cuts off at 0 or 255 keep the slope they would have had, or a search could get stuck there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import signs
from gradveil.transforms import geometry
from gradveil.transforms.colors import BLUE, GREEN, RED
from gradveil.transforms.geometry import GREY, _rotation, _shear
from gradveil.transforms.policy import LONGEST, Policy, Transform
from gradveil.transforms.preparation import Preparation, crop_and_flip

Slope = Callable[[Tensor, Tensor, float, Tensor], Tensor]
"""(soft, exact, magnitude, signs) -> soft; `exact` has the same values as uint8."""

WINDOW = 8  # grey levels to each side over which a histogram is smoothed


def translate_x(soft: Tensor, _: Tensor, fraction: float, signs: Tensor) -> Tensor:
    return geometry.translate_x(soft, fraction, signs)


def translate_y(soft: Tensor, _: Tensor, fraction: float, signs: Tensor) -> Tensor:
    return geometry.translate_y(soft, fraction, signs)


def shear_x(soft: Tensor, _: Tensor, factor: float, signs: Tensor) -> Tensor:
    return _sheared(soft, factor, signs, dim=3)


def shear_y(soft: Tensor, _: Tensor, factor: float, signs: Tensor) -> Tensor:
    return _sheared(soft, factor, signs, dim=2)


def _sheared(soft: Tensor, factor: float, signs: Tensor, dim: int) -> Tensor:
    """Both ways for every image, and then its own: cheaper to differentiate than a choice of rows."""
    both = [_resampled(soft, factor * sign, dim) for sign in (-1, 1)]
    return torch.where((signs == 1).to(soft.device).view(-1, 1, 1, 1), both[1], both[0])


def _resampled(soft: Tensor, factor: float, dim: int) -> Tensor:
    """The cubic through four neighbors: linear in their values."""
    sources, offset, inside = _shear(factor, *soft.shape[2:], dim, soft.device)
    pixels = soft.flatten(2)
    v1, v2, v3, v4 = (pixels.index_select(2, source) for source in sources)
    d = offset.to(soft.dtype)
    value = v2 + d * ((v3 - v1) + d * ((2 * (v1 - v2) + v3 - v4) + d * (v2 - v1 - v3 + v4)))
    return (value * inside).view_as(soft)


def rotate(soft: Tensor, _: Tensor, degrees: float, __: Tensor) -> Tensor:
    if degrees % 360 == 0:
        return soft
    source, inside = _rotation(degrees, *soft.shape[2:], soft.device)
    return torch.where(inside, soft.flatten(2).index_select(2, source), float(GREY)).view_as(soft)


def invert(soft: Tensor, _: Tensor, __: float, ___: Tensor) -> Tensor:
    return 255 - soft


def posterize(soft: Tensor, _: Tensor, __: float, ___: Tensor) -> Tensor:
    """On average over a step, slope 1."""
    return soft


def solarize(soft: Tensor, exact: Tensor, threshold: float, _: Tensor) -> Tensor:
    return torch.where(exact < threshold, soft, 255 - soft)


def autocontrast(soft: Tensor, exact: Tensor, _: float, __: Tensor) -> Tensor:
    """The gain of the stretch; the darkest and the brightest value count as given."""
    low, high = (
        bound(dim=(2, 3), keepdim=True).to(soft.dtype) for bound in (exact.amin, exact.amax)
    )
    return torch.where(high > low, (soft - low) * (255 / (high - low).clamp(min=1)), soft)


def equalize(soft: Tensor, exact: Tensor, _: float, __: Tensor) -> Tensor:
    """v -> 255 CDF(v), whose gain is 255 times the density of the channel's values near v. The histogram counts as given."""
    channels = exact.flatten(2).flatten(0, 1).long()
    ones = torch.ones_like(channels, dtype=soft.dtype)
    histogram = torch.zeros(len(channels), 256, dtype=soft.dtype, device=soft.device).scatter_add_(
        1, channels, ones
    )
    kept = F.avg_pool1d(histogram[:, None], 2 * WINDOW + 1, 1, WINDOW, count_include_pad=False)[
        :, 0
    ]
    gain = 255 * kept / channels.shape[1]
    flat = (
        channels.shape[1] - histogram.gather(1, channels.amax(1, keepdim=True))
    ) < 255  # Pillow leaves such a channel as it is
    gain = torch.where(flat, 1.0, gain)
    return soft * gain.gather(1, channels).view_as(soft)


def brightness(soft: Tensor, _: Tensor, magnitude: float, signs: Tensor) -> Tensor:
    return _blend(torch.zeros_like(soft), soft, magnitude, signs)


def contrast(soft: Tensor, _: Tensor, magnitude: float, signs: Tensor) -> Tensor:
    return _blend(_luminance(soft).mean(dim=(1, 2, 3), keepdim=True), soft, magnitude, signs)


def color(soft: Tensor, _: Tensor, magnitude: float, signs: Tensor) -> Tensor:
    return _blend(_luminance(soft), soft, magnitude, signs)


def sharpness(soft: Tensor, _: Tensor, magnitude: float, signs: Tensor) -> Tensor:
    if min(soft.shape[2:]) < 3:
        return soft
    kernel = torch.ones(3, 3, dtype=soft.dtype, device=soft.device)
    kernel[1, 1] = 5
    planes = F.conv2d(soft.flatten(0, 1)[:, None], kernel[None, None] / 13)
    smooth = F.pad(planes.view(*soft.shape[:2], *planes.shape[2:]), (1, 1, 1, 1))
    inside = F.pad(torch.ones_like(planes[0, 0]), (1, 1, 1, 1)).bool()
    return _blend(torch.where(inside, smooth, soft), soft, magnitude, signs)


def _luminance(soft: Tensor) -> Tensor:
    if soft.shape[1] == 1:
        return soft
    parts = torch.tensor([RED, GREEN, BLUE], dtype=soft.dtype, device=soft.device) / 65536
    return (soft * parts.view(3, 1, 1)).sum(1, keepdim=True)


def _blend(start: Tensor, soft: Tensor, magnitude: float, signs: Tensor) -> Tensor:
    factor = (1 + signs.to(soft.device, soft.dtype) * magnitude).view(-1, 1, 1, 1)
    return start + factor * (soft - start)


SLOPES: dict[str, Slope] = {
    "shear_x": shear_x,
    "shear_y": shear_y,
    "translate_x": translate_x,
    "translate_y": translate_y,
    "rotate": rotate,
    "color": color,
    "contrast": contrast,
    "sharpness": sharpness,
    "brightness": brightness,
    "posterize": posterize,
    "solarize": solarize,
    "autocontrast": autocontrast,
    "equalize": equalize,
    "invert": invert,
}


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
            raise GradveilError(
                "transforms of different policies cannot be joined: call each on its own images"
            )
        member, directions = (
            torch.cat(parts)
            for parts in ([one.member for one in every], [one.signs for one in every])
        )
        return Drawn(self.policy, member, directions, torch.cat(sources) if sources else None)

    def _run(self, exact: Tensor, soft: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Whole numbers, and beside them the stand-in in 0..255 where slopes are wanted."""
        if self.source is not None:
            exact, soft = (
                _cropped(exact, self.source),
                None if soft is None else _cropped(soft, self.source),
            )
        if len(self.policy.members) == 1:
            return _followed(self.policy.members[0], exact, soft, self.signs)
        out, slopes = torch.empty_like(exact), None if soft is None else torch.empty_like(soft)
        for number, member in enumerate(self.policy.members):
            rows = (self.member == number).nonzero().squeeze(1)
            there = rows.to(exact.device)
            out[there], part = _followed(
                member, exact[there], None if soft is None else soft[there], self.signs[rows]
            )
            if slopes is not None and part is not None:
                slopes = slopes.index_put((there,), part)
        return out, slopes

    def _check(self, images: Tensor) -> None:
        if images.dim() != 4 or len(images) != len(self):
            raise GradveilError(
                f"images of shape {tuple(images.shape)}: the draws are those of {len(self)} image(s), NCHW"
            )


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
    places = (
        torch.arange(1, height * width + 1, device=images.device)
        .view(1, 1, height, width)
        .expand(count, 1, height, width)
    )
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
        member = torch.randint(
            len(policy.members), (count,), generator=rng, device=rng.device
        ).cpu()
    directions = torch.ones(count, LONGEST, dtype=torch.long)
    for number, transforms in enumerate(policy.members):
        rows = (member == number).nonzero().squeeze(1)
        for place, transform in enumerate(transforms):
            if transform.signed and len(rows):
                directions[rows, place] = signs(len(rows), rng).cpu()
    return member, directions


def _followed(
    member: tuple[Transform, ...], exact: Tensor, soft: Tensor | None, directions: Tensor
) -> tuple[Tensor, Tensor | None]:
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
    return torch.where(
        source > 0, taken, torch.zeros((), dtype=images.dtype, device=images.device)
    ).view_as(images)
