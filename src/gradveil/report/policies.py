"""A picture of what a policy does: a row for each member, a column for each transformation, one random draw."""

from pathlib import Path

import torch
from PIL import Image, UnidentifiedImageError
from torch import Generator, Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.files import replacing
from gradveil.transforms import Policy


def draw_policy(policy: Policy, picture: Image.Image, rng: Generator, path: Path) -> None:
    """A PNG. Other draws of the signs look different: change the generator's seed."""
    from matplotlib.figure import Figure  # slow to import, and only needed here

    columns = 1 + max(len(member) for member in policy.members)
    figure = Figure(figsize=(2.3 * columns, 2.6 * len(policy.members) + 0.4), layout="constrained")
    grid = figure.subplots(len(policy.members), columns, squeeze=False)
    for axes, member in zip(grid, policy.members, strict=True):
        shown, title = picture, "original"
        for axis, transform in zip(axes, (None, *member), strict=False):
            if transform is not None:
                shown = Policy(((transform,),))(shown, rng)
                number = "" if transform.index is None else f"{transform.index}: "
                title = f"{number}{transform.name}({transform.magnitude})"
            axis.imshow(shown, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            axis.set_title(title, fontsize=9)
        for axis in axes:
            axis.axis("off")
    figure.suptitle(f"policy {policy}", fontsize=11)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def open_picture(path: Path) -> Image.Image:
    """A user's picture as RGB, or as grey where it is grey."""
    try:
        with Image.open(path) as picture:
            return picture.convert("L" if picture.mode in ("1", "L", "LA", "I;16") else "RGB")
    except FileNotFoundError:
        raise GradveilError(f"no picture at {path}") from None
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
        raise GradveilError(f"{path} is no picture that can be read: {error}") from None


def as_picture(image: Tensor) -> Image.Image:
    """A uint8 CHW image as a picture."""
    return Image.fromarray(image[0].numpy() if image.shape[0] == 1 else image.permute(1, 2, 0).to(torch.uint8).contiguous().numpy())


def save_picture(path: Path, picture: Image.Image) -> None:
    with replacing(path) as temporary:
        picture.save(temporary, format="PNG")
