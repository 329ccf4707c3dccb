"""The scores of a chunk: every image against the one that was used and against the original."""

from torch import Tensor

from gradveil.audits.pools import Pool
from gradveil.scores import mse, over_blind, psnr, psnr_affine, ssim

CEILING = (
    200.0  # dB; an exact copy would be infinite, which JSON cannot hold and a mean cannot bear
)


def score(
    found: Tensor, truths: dict[str, Tensor], guesses: Tensor, images: Tensor, pool: Pool
) -> list[dict[str, dict[str, float]]]:
    """For each found image and each truth, six numbers. `guesses` are (images, guesses, C, H, W), `images` the places in the split."""
    tables = {
        truth: _score(found, true, guesses, pool.identified(truth, found, images, true))
        for truth, true in truths.items()
    }
    return [
        {
            truth: {name: values[i] for name, values in table.items()}
            for truth, table in tables.items()
        }
        for i in range(len(found))
    ]


def _score(
    found: Tensor, true: Tensor, guesses: Tensor, identified: Tensor
) -> dict[str, list[float]]:
    values = {
        "mse": mse(found, true),
        "psnr": psnr(found, true),
        "ssim": ssim(found, true),
        "psnr_affine": psnr_affine(found, true),
        "over_blind": over_blind(found, true, guesses),
        "identified": identified,
    }
    return {name: value.clamp(-CEILING, CEILING).tolist() for name, value in values.items()}
