"""Policies: sequences of up to three transformations, as text, as functions, and in files.

A policy is written `3-1-7`; a hybrid is several joined by `+`, one drawn for each image. A search
writes its policies into a TOML file, which `Policy.load` reads.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import overload

import numpy as np
import torch
from PIL import Image
from torch import Generator, Tensor

from gradveil.core.boundary import check_value
from gradveil.core.errors import GradveilError, GradveilWarning, unknown
from gradveil.core.files import MissingFileError, shown
from gradveil.core.formats import PoliciesFile
from gradveil.core.reading import MalformedError, WrongTypeError, convert, read_toml
from gradveil.core.seeds import signs
from gradveil.transforms.library import LIBRARY, OPERATIONS

POLICY_LENGTH = 3  # the most transformations in a row
CHUNK_ON_CPU = 256  # images whose intermediate results stay in the cache
CHUNK_ON_GPU = 16_384  # images whose intermediate results stay under a gigabyte
MOST_MEMBERS = 10_000  # of a hybrid: each is looked for in every batch
LONGEST = 1_000_000  # letters of a policy's text
NO_POLICY = "none"
FORMAT = "gradveil policies 1"  # of a search's file
MOST = 16 << 20  # bytes of such a file: it has 20 for each image that scores used


@dataclass(frozen=True)
class Transform:
    """An operation at a magnitude index; `index` is its library number if it was named by that."""

    name: str
    magnitude: int
    index: int | None = None

    def __post_init__(self) -> None:
        if self.name not in OPERATIONS:
            raise unknown("transformation", self.name, OPERATIONS)
        if not 0 <= self.magnitude <= 9:
            raise GradveilError(
                f"magnitude {self.magnitude} of {self.name} is out of range: choose 0 to 9"
            )

    @classmethod
    def parse(cls, text: str) -> "Transform":
        """Parse `3`, an index of the library, or `translate_x(9)`, a name and a magnitude."""
        if re.fullmatch(r"[0-9]{1,4}", text):
            index = int(text)
            if index >= len(LIBRARY):
                raise GradveilError(
                    f"transformation {index} is out of range: "
                    f"choose 0 to {len(LIBRARY) - 1}, or a name such as translate_x(9)"
                )
            return cls(*LIBRARY[index], index=index)
        named = re.fullmatch(r"([A-Za-z_]+)\(([0-9]{1,4})\)", text)
        if not named:
            raise GradveilError(
                f"{shown(repr(text))} is no transformation: write 0 to {len(LIBRARY) - 1}, or a "
                "name and magnitude 0 to 9 such as translate_x(9)"
            )
        return cls(named[1], int(named[2]))

    def __str__(self) -> str:
        return f"{self.name}({self.magnitude})" if self.index is None else str(self.index)

    @property
    def value(self) -> float:
        """The value of the magnitude index, in the operation's unit."""
        return OPERATIONS[self.name].magnitudes[self.magnitude]

    @property
    def signed(self) -> bool:
        """Whether a direction is drawn for each image."""
        return OPERATIONS[self.name].signed

    def idle(self, channels: int = 3) -> bool:
        """Tell whether it leaves every image of so many channels as it is."""
        return self.value == OPERATIONS[self.name].rest or (self.name == "color" and channels == 1)

    def describe(self) -> str:
        """Say it in words, such as `translate_x(9): ±0.4532 of the width`."""
        means = OPERATIONS[self.name].means.format(self.value)
        return f"{self.name}({self.magnitude})" + (f": {means}" if means else "")

    def apply(self, images: Tensor, signs: Tensor) -> Tensor:
        """Transform uint8 images (N, C, H, W), with a sign (-1 or +1) for each."""
        return OPERATIONS[self.name].apply(images, self.value, signs)


@dataclass(frozen=True)
class Policy:
    """One or more sequences of transformations, one of them drawn for each image.

    The result replaces the image. Call it on a tensor (uint8, or float in [0, 1]; CHW or NCHW; one
    or three channels; any device) or on a `PIL.Image` (mode L or RGB). Without a generator it draws
    from torch's default one, which a `DataLoader` seeds in each worker. With `alike`, every so many
    images in a row share their draws: the first of them stand for the draws of all.
    `scored_on` are short digests of the images that a search chose it by: an audit draws its
    victims from others.
    """

    members: tuple[tuple[Transform, ...], ...] = ((),)
    scored_on: tuple[str, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.members:
            raise GradveilError(
                "a policy needs at least one member; the empty sequence changes nothing"
            )
        if len(self.members) > MOST_MEMBERS:
            raise GradveilError(
                f"a policy of {len(self.members):,} members: at most {MOST_MEMBERS:,} are allowed"
            )
        for member in self.members:
            if len(member) > POLICY_LENGTH:
                raise GradveilError(
                    f"policy {shown(repr('-'.join(map(str, member))))} has {len(member)} "
                    f"transformations: at most {POLICY_LENGTH} are allowed"
                )

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """Read `3-1-7+43-18-18`, `translate_x(9)-contrast(6)`, or `none`."""
        check_value(text, str, "policy")
        try:
            if len(text) > LONGEST or text.count("+") >= MOST_MEMBERS:
                raise GradveilError(
                    f"{len(text):,} letters, {text.count('+') + 1:,} members: at most "
                    f"{LONGEST:,} and {MOST_MEMBERS:,} are allowed"
                )
            return cls(tuple(_member(part.strip()) for part in text.split("+")))
        except GradveilError as error:
            raise GradveilError(f"policy {shown(repr(text))}: {error}") from None

    @classmethod
    def load(cls, path: Path | str, which: str = "hybrid") -> "Policy":
        """Read a search's policies.toml: its `hybrid`, `best`, or a rank such as `3`.

        Where the search found no hybrid, its best policy is used, and a warning says so.
        """
        check_value(path, Path | str, "path")
        check_value(which, str, "which")
        found = read_policies(Path(path))
        if which == "hybrid" and found.hybrid is None:
            warnings.warn(
                f"{path} holds no hybrid ({shown(found.no_hybrid)}):"
                f" the best policy, {shown(found.best)}, is used",
                GradveilWarning,
                stacklevel=2,
            )
            which = "best"
        named = {"hybrid": found.hybrid, "best": found.best}
        named |= {str(rank): each.policy for rank, each in enumerate(found.policy, start=1)}
        if (text := named.get(which)) is None:
            raise GradveilError(
                f"no policy {shown(repr(which))} in {path}:"
                f" choose hybrid, best, or a rank from 1 to {len(found.policy)}"
            )
        try:
            policy = cls.parse(text)
        except GradveilError as error:
            raise GradveilError(f"{path} is damaged: {error}") from None
        return replace(policy, scored_on=() if found.images is None else tuple(found.images.scored))

    @classmethod
    def find(cls, text: str) -> "Policy":
        """Read a policy as text, or a search's file, `PATH.toml` or `PATH.toml:WHICH`."""
        path, dot, which = check_value(text, str, "policy").rpartition(".toml:")
        if dot:
            return cls.load(f"{path}.toml", which)
        return cls.load(text) if text.endswith(".toml") else cls.parse(text)

    def __str__(self) -> str:
        return "+".join("-".join(map(str, member)) or NO_POLICY for member in self.members)

    @overload
    def __call__(
        self, images: Tensor, rng: Generator | None = None, *, alike: int = 1
    ) -> Tensor: ...
    @overload
    def __call__(self, images: Image.Image, rng: Generator | None = None) -> Image.Image: ...
    def __call__(
        self, images: Tensor | Image.Image, rng: Generator | None = None, *, alike: int = 1
    ) -> Tensor | Image.Image:
        if isinstance(images, Image.Image):
            return _on_picture(images, lambda pixels: self(pixels, rng))
        if not isinstance(images, Tensor):
            raise GradveilError(
                f"a policy takes a torch.Tensor or a PIL.Image, not {type(images).__name__}"
            )
        batch = _checked(images)
        if alike < 1 or len(batch) % alike:
            raise GradveilError(f"{len(batch)} images: they cannot share draws by {alike}")
        if batch.dtype == torch.uint8:
            return self._run(batch, rng, alike).view_as(images)
        pixels = (batch * 255).round_().clamp_(0, 255).to(torch.uint8)
        return (self._run(pixels, rng, alike).to(images.dtype) / 255).view_as(images)

    def _run(self, images: Tensor, rng: Generator | None, alike: int) -> Tensor:
        if len(self.members) == 1:
            return _apply(self.members[0], images, rng, alike)
        device = "cpu" if rng is None else rng.device
        count = len(images) // alike
        drawn = torch.randint(len(self.members), (count,), generator=rng, device=device)
        drawn = drawn.repeat_interleave(alike)
        out = torch.empty_like(images)
        for number, member in enumerate(self.members):
            rows = (drawn == number).nonzero().squeeze(1).to(images.device, non_blocking=True)
            out[rows] = _apply(member, images[rows], rng, alike)
        return out


def _member(text: str) -> tuple[Transform, ...]:
    if text == NO_POLICY:
        return ()
    parts = text.split("-")
    if len(parts) > MOST_MEMBERS:  # all are made before they are counted, for a better message
        raise GradveilError(f"{len(parts):,} transformations: at most {POLICY_LENGTH} are allowed")
    return tuple(Transform.parse(part.strip()) for part in parts)


def _apply(
    member: tuple[Transform, ...], images: Tensor, rng: Generator | None, alike: int
) -> Tensor:
    if not len(images):
        return images
    count = len(images) // alike
    each = [
        signs(count, rng) if transform.signed else torch.ones(count, dtype=torch.long)
        for transform in member
    ]
    drawn = [directions.repeat_interleave(alike) for directions in each]
    pieces = []
    for rows in torch.arange(len(images)).split(CHUNK_ON_GPU if images.is_cuda else CHUNK_ON_CPU):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        piece = images[part]
        for transform, directions in zip(member, drawn, strict=True):
            piece = transform.apply(piece, directions[part])
        pieces.append(piece)
    return torch.cat(pieces)


def _checked(images: Tensor) -> Tensor:
    """Return images (N, C, H, W); refuse other types and shapes."""
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise GradveilError(
            f"images of type {images.dtype}: a policy takes uint8, or floats in [0, 1]"
        )
    if images.dim() not in (3, 4) or images.shape[-3] not in (1, 3):
        raise GradveilError(
            f"images of shape {tuple(images.shape)}: "
            "a policy takes CHW or NCHW with 1 or 3 channels"
        )
    return images if images.dim() == 4 else images[None]


def _on_picture(picture: Image.Image, change: Callable[[Tensor], Tensor]) -> Image.Image:
    if picture.mode not in ("L", "RGB"):
        raise GradveilError(
            f"a picture of mode {picture.mode}: a policy takes L or RGB; convert it first"
        )
    pixels = torch.from_numpy(np.array(picture))
    pixels = pixels[None] if picture.mode == "L" else pixels.permute(2, 0, 1)
    changed = change(pixels.contiguous())
    changed = changed[0] if picture.mode == "L" else changed.permute(1, 2, 0)
    return Image.fromarray(changed.numpy())


def read_policies(path: Path) -> PoliciesFile:
    """Read the whole file, and check its types."""
    try:
        found = read_toml(path, dict[str, object], most=MOST)
        if found.get("format") != FORMAT:
            raise GradveilError(
                f"{path} is no file of `gradveil search`:"
                f" its format is {shown(repr(found.get('format')))}, expected {FORMAT!r}"
            )
        return convert(found, PoliciesFile, path)
    except MissingFileError:
        raise GradveilError(
            f"no file of policies at {shown(path)}: `gradveil search` writes one"
        ) from None
    except MalformedError as error:
        raise GradveilError(f"{shown(path)} is damaged, or no TOML: {error.problem}") from None
    except WrongTypeError as error:
        raise GradveilError(f"{error}; the file is damaged") from None
