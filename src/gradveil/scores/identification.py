"""Identification: is the true image the nearest to the reconstruction among many candidates?

Images are compared by their locally normalized luminance, which keeps shapes and drops colors,
brightness and contrast. Share identified of 1,000 test images among the same 1,000 (%), by the
window's sigma in pixels, of which 4 is kept:

|                                      |      CIFAR-100        |     Fashion-MNIST     |
| reconstruction                       |     2 |     3 |     4 |     2 |     3 |     4 |
|--------------------------------------|-------|-------|-------|-------|-------|-------|
| uniform noise (chance: 0.1)          |   0.2 |   0.1 |   0.1 |   0.0 |   0.1 |   0.1 |
| + Gaussian noise of 0.1, 0.2         | 100.0 | 100.0 | 100.0 | 100.0 | 100.0 | 100.0 |
| + Gaussian noise of 0.3              | 100.0 | 100.0 | 100.0 |  99.9 | 100.0 | 100.0 |
| + Gaussian noise of 0.8              |  91.9 |  95.4 |  96.6 |  86.5 |  86.3 |  86.8 |
| blurred, sigma 1                     | 100.0 | 100.0 | 100.0 | 100.0 |  99.9 |  99.6 |
| blurred, sigma 2                     |  99.9 | 100.0 | 100.0 |  74.4 |  73.0 |  71.8 |
| 0.5 x + 0.3; random gain per channel | 100.0 | 100.0 | 100.0 | 100.0 | 100.0 | 100.0 |
| moved by 1 pixel                     | 100.0 | 100.0 | 100.0 |  60.3 |  64.2 |  66.4 |
| gains, blur of 1 and noise of 0.2    |  99.0 |  99.6 |  99.9 |  83.8 |  87.9 |  88.9 |
| negative, 1 - x                      |   0.0 |   0.0 |   0.0 |   0.0 |   0.0 |   0.0 |

Two windows summed (2 and 5) were not clearly better. A negative counts as not identified. For a
victim's batch, `assign` first says which reconstruction is meant for which image.
"""

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.core.errors import GradveilError, kind_of
from gradveil.scores.images import pair, smooth

SMOOTHING = 0.7  # sigma in pixels of the first, slight smoothing
WINDOW = 4.0  # sigma in pixels of the local mean and spread
FLOOR = 0.5  # of the image's spread, added to the local one
FLAT_IMAGE = 1e-5  # an image with less spread shows nothing
TIE = 1e-9
IMAGES_AT_ONCE = 256
WORST = 1e12  # above any error of real images; the solver takes neither NaN nor infinity


def assign(found: Tensor, truth: Tensor) -> Tensor:
    """Return the order in which `found[order]` lines up with `truth` with the least squared error.

    Both are a victim's batch, (B, C, H, W). A reconstruction with NaN or infinity is as far as can
    be from every image.
    """
    moved, fixed = pair(found, truth)
    distance = torch.cdist(
        fixed.flatten(1), moved.flatten(1), compute_mode="donot_use_mm_for_euclid_dist"
    )
    cost = distance.square().nan_to_num(nan=WORST, posinf=WORST).clamp(max=WORST)
    _, order = linear_sum_assignment(cost.cpu().numpy())
    return torch.as_tensor(order, dtype=torch.long, device=found.device)


def signatures(images: Tensor) -> Tensor:
    """Return a vector of length 1 for each image, (N, H x W), the same for a x + b with a > 0.

    It is `local_contrast`, normalized; zero for an image that is flat or not finite.
    """
    if images.ndim != 4 or not images.is_floating_point():
        kind = f"{str(images.dtype).removeprefix('torch.')} of shape {tuple(images.shape)}"
        raise GradveilError(
            f"images are {kind}: expected floats of shape (images, channels, height, width)"
        )
    parts = torch.split(images, IMAGES_AT_ONCE)
    return torch.cat(
        [F.normalize(local_contrast(luminance(part)).flatten(1), dim=1) for part in parts]
    )


def rank(found: Tensor, candidates: Tensor, index: Tensor) -> Tensor:
    """Return the rank of the true image `candidates[index[i]]` by likeness to `found[i]`, (N,).

    1 is the nearest. Candidates just as near as the true image do not count against it. A flat or
    non-finite reconstruction ranks it last.
    """
    _check(found, candidates, index)
    return rank_among(found, signatures(candidates), index)


def rank_among(found: Tensor, known: Tensor, index: Tensor) -> Tensor:
    """Return the ranks as `rank` does, (N,), from the candidates' `signatures` (K, H x W).

    Who compares many reconstructions with the same candidates computes their signatures once.
    """
    ranks = []
    parts = found.split(IMAGES_AT_ONCE), index.to(found.device).split(IMAGES_AT_ONCE)
    for part, true in zip(*parts, strict=True):
        made = signatures(part)
        likeness = made @ known.T
        nearer = (likeness > likeness.gather(1, true[:, None]) + TIE).sum(dim=1)
        ranks.append(torch.where(made.any(dim=1), nearer + 1, len(known)))
    return torch.cat(ranks).double()


def identify(found: Tensor, candidates: Tensor, index: Tensor) -> Tensor:
    """Return 1 where the true image `candidates[index[i]]` is the nearest to `found[i]`, else 0.

    By chance the mean is 1 / candidates.
    """
    return (rank(found, candidates, index) == 1).double()


def local_contrast(planes: Tensor) -> Tensor:
    """Return z of each plane (N, H, W), which keeps shapes and drops brightness and contrast.

    It is z = (x - local mean) / (local std + half the plane's std) for x the slightly smoothed
    plane; zero for one that is flat or not finite.
    """
    x = smooth(planes, SMOOTHING)
    spread = x.std(dim=(1, 2), correction=0)[:, None, None]
    centered = x - smooth(x, WINDOW)
    z = centered / (smooth(centered.square(), WINDOW).sqrt() + FLOOR * spread)
    usable = spread.isfinite() & (spread > FLAT_IMAGE)
    return torch.where(usable, z, 0.0)


def luminance(images: Tensor) -> Tensor:
    """Return the brightness of the pixels of images (N, C, H, W), (N, H, W) in double precision."""
    images = images.double()
    if images.shape[1] != 3:
        return images.mean(dim=1)
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=images.dtype, device=images.device)
    return torch.einsum("nchw,c->nhw", images, weights)


def _check(found: Tensor, candidates: Tensor, index: Tensor) -> None:
    for name, value in (("found", found), ("candidates", candidates), ("index", index)):
        if not isinstance(value, Tensor):
            raise GradveilError(f"{name}: {kind_of(value)}; expected a torch.Tensor")
    if found.shape[1:] != candidates.shape[1:] or len(candidates) < 2:
        raise GradveilError(
            f"found has shape {tuple(found.shape)} and candidates {tuple(candidates.shape)}: "
            "expected images of the same shape, and at least two candidates"
        )
    kind = f"{str(index.dtype).removeprefix('torch.')} of shape {tuple(index.shape)}"
    if index.shape != found.shape[:1] or index.dtype != torch.long:
        raise GradveilError(
            f"index is {kind}: expected one int64 for each of {len(found)} reconstructions"
        )
    wrong = index[(index < 0) | (index >= len(candidates))]
    if len(wrong):
        raise GradveilError(
            f"index holds {int(wrong[0])}: "
            f"expected a number from 0 to {len(candidates) - 1}, one of the candidates"
        )
