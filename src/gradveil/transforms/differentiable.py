"""Policies that an attacker can look through: the policy's exact pixels, with slopes.

An operation on whole numbers has no slope of use. So its value is the exact one, and its slope that
of a smooth stand-in ("straight through"). Values that the operation cuts off at 0 or 255 keep the
slope they would have had, or a search could get stuck there.
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
from gradveil.transforms.geometry import GRAY, rotation_sources, shear_sources
from gradveil.transforms.policy import POLICY_LENGTH, Policy, Transform
from gradveil.transforms.preparation import Preparation, crop_and_flip

Prepare = Policy | Preparation

Slope = Callable[[Tensor, Tensor, float, Tensor], Tensor]
"""(soft, exact, magnitude, signs) -> soft, in 0..255; `exact` has the same values as uint8."""

HISTOGRAM_REACH = 8  # gray levels to each side over which a histogram is smoothed


@dataclass(frozen=True, eq=False)
class Drawn:
    """A policy, and the crop and flip before it if any, with all draws made.

    Call it with float images in [0, 1], (N, C, H, W); it is differentiable. For each image there is
    the `member` of the hybrid, the `signs` (N, 3) of its transformations, and the `source`
    (N, 1, H, W): the pixel of the image that each pixel is cropped from, counted from 1; 0 is the
    black border.
    """

    policy: Policy
    member: Tensor
    signs: Tensor
    source: Tensor | None = None

    def __len__(self) -> int:
        return len(self.member)

    def __call__(self, images: Tensor) -> Tensor:
        """Return the client's pixels for these images, which are rounded as the client does."""
        if images.dim() != 4 or len(images) != len(self):
            raise GradveilError(
                f"images of shape {tuple(images.shape)}: "
                f"the draws are those of {len(self)} image(s), NCHW"
            )
        exact = (images.detach() * 255).round().clamp(0, 255).to(torch.uint8)
        sloped = torch.is_grad_enabled() and images.requires_grad
        exact, soft = self._run(exact, images * 255 if sloped else None)
        whole = exact.to(images.dtype) / 255
        return whole if soft is None else whole + (soft - soft.detach()) / 255

    def again(self, row: int, count: int) -> "Drawn":
        """Return the draws of the image in this row for so many images."""
        rows = torch.full((count,), row, device=self.member.device)
        source = None if self.source is None else self.source[rows.to(self.source.device)]
        return Drawn(self.policy, self.member[rows], self.signs[rows.to(self.signs.device)], source)

    def beside(self, others: Sequence["Drawn"]) -> "Drawn":
        """Join the draws of one policy: for these images and then those of the others."""
        every = (self, *others)
        sources = [drawn.source for drawn in every if drawn.source is not None]
        alike = all(drawn.policy == self.policy for drawn in others)
        if not alike or len(sources) not in (0, len(every)):
            raise GradveilError(
                "transforms of different policies cannot be joined: call each on its own images"
            )
        member = torch.cat([drawn.member for drawn in every])
        directions = torch.cat([drawn.signs for drawn in every])
        return Drawn(self.policy, member, directions, torch.cat(sources) if sources else None)

    def _run(self, exact: Tensor, soft: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the exact whole numbers and the smooth stand-in, both in 0..255.

        Without a stand-in, where no slopes are asked for, there is none of the outcome.
        """
        if self.source is not None:
            exact = _cropped(exact, self.source)
            soft = None if soft is None else _cropped(soft, self.source)
        if len(self.policy.members) == 1:
            return _followed(self.policy.members[0], exact, soft, self.signs)
        out, slopes = torch.empty_like(exact), None if soft is None else torch.empty_like(soft)
        for number, member in enumerate(self.policy.members):
            rows = (self.member == number).nonzero().squeeze(1)
            there = rows.to(exact.device)
            part = None if soft is None else soft[there]
            out[there], part = _followed(member, exact[there], part, self.signs[rows])
            if slopes is not None and part is not None:
                slopes = slopes.index_put((there,), part)
        return out, slopes


@dataclass(frozen=True)
class Anew:
    """A policy whose draws are unknown: each call draws anew."""

    prepare: Prepare

    def __call__(self, images: Tensor, rng: Generator) -> Tensor:
        return self.draw(images, rng)(images)

    def draw(self, images: Tensor, rng: Generator) -> Drawn:
        """Draw once, for as many images of this shape, to be kept."""
        return draw(self.prepare, images, rng)


def draw(prepare: Prepare, images: Tensor, rng: Generator) -> Drawn:
    """Draw as `prepare(images, rng)` would; the generator ends up in the same state.

    Of the images only the shape counts.
    """
    if isinstance(prepare, Policy):
        return Drawn(prepare, *_draw_policy(prepare, len(images), rng))
    count, _, height, width = images.shape
    numbered = torch.arange(1, height * width + 1, device=images.device)
    numbered = numbered.view(1, 1, height, width).expand(count, 1, height, width)
    source = crop_and_flip(numbered, prepare.padding, prepare.flip, rng)
    return Drawn(prepare.policy, *_draw_policy(prepare.policy, count, rng), source)


def _draw_policy(policy: Policy, count: int, rng: Generator) -> tuple[Tensor, Tensor]:
    """Draw the member (count,) and the signs (count, POLICY_LENGTH) of each image.

    They are drawn in the order of `Policy`: a member for each image, then for each member that
    occurs the signs of each of its transformations.
    """
    member = torch.zeros(count, dtype=torch.long)
    if len(policy.members) > 1:
        member = torch.randint(
            len(policy.members), (count,), generator=rng, device=rng.device
        ).cpu()
    directions = torch.ones(count, POLICY_LENGTH, dtype=torch.long)
    for number, transforms in enumerate(policy.members):
        rows = (member == number).nonzero().squeeze(1)
        for step, transform in enumerate(transforms):
            if transform.signed and len(rows):
                directions[rows, step] = signs(len(rows), rng).cpu()
    return member, directions


def _followed(
    member: tuple[Transform, ...], exact: Tensor, soft: Tensor | None, directions: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Apply the transformations to both; a stand-in gets the exact values after each."""
    for step, transform in enumerate(member if len(exact) else ()):
        chosen = directions[:, step]
        after = transform.apply(exact, chosen)
        if soft is not None:
            soft = SLOPES[transform.name](soft, exact, transform.value, chosen)
            soft = after.to(soft.dtype) + (soft - soft.detach())
        exact = after
    return exact, soft


def _cropped(images: Tensor, source: Tensor) -> Tensor:
    source = source.to(images.device).flatten(2).expand(-1, images.shape[1], -1)
    taken = images.flatten(2).gather(2, (source - 1).clamp(min=0))
    black = torch.zeros((), dtype=images.dtype, device=images.device)
    return torch.where(source > 0, taken, black).view_as(images)


def translate_x(soft: Tensor, _: Tensor, fraction: float, signs: Tensor) -> Tensor:
    return geometry.translate_x(soft, fraction, signs)


def translate_y(soft: Tensor, _: Tensor, fraction: float, signs: Tensor) -> Tensor:
    return geometry.translate_y(soft, fraction, signs)


def shear_x(soft: Tensor, _: Tensor, factor: float, signs: Tensor) -> Tensor:
    return _sheared(soft, factor, signs, dim=3)


def shear_y(soft: Tensor, _: Tensor, factor: float, signs: Tensor) -> Tensor:
    return _sheared(soft, factor, signs, dim=2)


def _sheared(soft: Tensor, factor: float, signs: Tensor, dim: int) -> Tensor:
    """Shear every image both ways and take the one of its sign.

    That is cheaper to differentiate than a choice of rows.
    """
    both = [_resampled(soft, factor * sign, dim) for sign in (-1, 1)]
    return torch.where((signs == 1).to(soft.device).view(-1, 1, 1, 1), both[1], both[0])


def _resampled(soft: Tensor, factor: float, dim: int) -> Tensor:
    """Evaluate the cubic through four neighbors, which is linear in their values."""
    sources, offset, inside = shear_sources(factor, *soft.shape[2:], dim, soft.device)
    pixels = soft.flatten(2)
    v1, v2, v3, v4 = (pixels.index_select(2, source) for source in sources)
    d = offset.to(soft.dtype)
    value = v2 + d * ((v3 - v1) + d * ((2 * (v1 - v2) + v3 - v4) + d * (v2 - v1 - v3 + v4)))
    return (value * inside).view_as(soft)


def rotate(soft: Tensor, _: Tensor, degrees: float, __: Tensor) -> Tensor:
    if degrees % 360 == 0:
        return soft
    source, inside = rotation_sources(degrees, *soft.shape[2:], soft.device)
    return torch.where(inside, soft.flatten(2).index_select(2, source), float(GRAY)).view_as(soft)


def invert(soft: Tensor, _: Tensor, __: float, ___: Tensor) -> Tensor:
    return 255 - soft


def posterize(soft: Tensor, _: Tensor, __: float, ___: Tensor) -> Tensor:
    """Return the values themselves: averaged over a step, the slope is 1."""
    return soft


def solarize(soft: Tensor, exact: Tensor, threshold: float, _: Tensor) -> Tensor:
    return torch.where(exact < threshold, soft, 255 - soft)


def autocontrast(soft: Tensor, exact: Tensor, _: float, __: Tensor) -> Tensor:
    """Stretch each channel; the darkest and the brightest value count as constants."""
    low, high = (
        bound(dim=(2, 3), keepdim=True).to(soft.dtype) for bound in (exact.amin, exact.amax)
    )
    return torch.where(high > low, (soft - low) * (255 / (high - low).clamp(min=1)), soft)


def equalize(soft: Tensor, exact: Tensor, _: float, __: Tensor) -> Tensor:
    """Map v to 255 CDF(v), whose gain is 255 times the density of the channel's values near v.

    The histogram counts as constant.
    """
    channels = exact.flatten(2).flatten(0, 1).long()
    ones = torch.ones_like(channels, dtype=soft.dtype)
    histogram = torch.zeros(len(channels), 256, dtype=soft.dtype, device=soft.device)
    histogram.scatter_add_(1, channels, ones)
    width = 2 * HISTOGRAM_REACH + 1
    density = F.avg_pool1d(histogram[:, None], width, 1, HISTOGRAM_REACH, count_include_pad=False)[
        :, 0
    ]
    gain = 255 * density / channels.shape[1]
    brightest = histogram.gather(1, channels.amax(1, keepdim=True))
    flat = (channels.shape[1] - brightest) < 255  # Pillow leaves such a channel as it is
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
"""By the name of an operation: its smooth stand-in."""
