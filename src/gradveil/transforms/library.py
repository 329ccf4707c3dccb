"""The operations with ten magnitudes each, and the 50 functions of the search space.

Both are those of Gao et al. 2021, after AutoAugment.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from torch import Tensor

from gradveil.transforms import colors, geometry


@dataclass(frozen=True)
class Operation:
    """An operation on a batch of uint8 images, and the value of each of its magnitude indices."""

    apply: Callable[[Tensor, float, Tensor], Tensor]
    magnitudes: tuple[float, ...]
    signed: bool
    means: str = ""  # the magnitude in words
    rest: float | None = 0.0  # the value at which no image changes; None where there is none


def _line(start: float, stop: float) -> tuple[float, ...]:
    return tuple(float(value) for value in np.linspace(start, stop, 10))


_NONE = (0.0,) * 10
_HALF = _line(0.0, 0.5)

OPERATIONS = MappingProxyType(
    {
        "shear_x": Operation(geometry.shear_x, _line(0.0, 0.3), True, "shear by ±{:.4g}"),
        "shear_y": Operation(geometry.shear_y, _line(0.0, 0.3), True, "shear by ±{:.4g}"),
        "translate_x": Operation(
            geometry.translate_x, _line(0.0, 150 / 331), True, "±{:.4g} of the width"
        ),
        "translate_y": Operation(
            geometry.translate_y, _line(0.0, 150 / 331), True, "±{:.4g} of the height"
        ),
        "rotate": Operation(geometry.rotate, _line(0.0, 30.0), False, "{:.4g} degrees"),
        "color": Operation(colors.color, _HALF, True, "factor 1 ± {:.4g}"),
        "contrast": Operation(colors.contrast, _HALF, True, "factor 1 ± {:.4g}"),
        "sharpness": Operation(colors.sharpness, _HALF, True, "factor 1 ± {:.4g}"),
        "brightness": Operation(colors.brightness, _HALF, True, "factor 1 ± {:.4g}"),
        "posterize": Operation(
            colors.posterize,
            tuple(float(round(bits)) for bits in _line(8.0, 4.0)),
            False,
            "{:.0f} bits kept",
            8.0,
        ),
        "solarize": Operation(
            colors.solarize, _line(256.0, 0.0), False, "values from {:.4g} on inverted", 256.0
        ),
        "autocontrast": Operation(colors.autocontrast, _NONE, False, rest=None),
        "equalize": Operation(colors.equalize, _NONE, False, rest=None),
        "invert": Operation(colors.invert, _NONE, False, rest=None),
    }
)

LIBRARY: tuple[tuple[str, int], ...] = (
    ("invert", 7), ("contrast", 6), ("rotate", 2), ("translate_x", 9), ("sharpness", 1),
    ("sharpness", 3), ("shear_y", 2), ("translate_y", 2), ("autocontrast", 5), ("equalize", 2),
    ("shear_y", 5), ("posterize", 5), ("color", 3), ("brightness", 5), ("sharpness", 9),
    ("brightness", 9), ("equalize", 5), ("equalize", 1), ("contrast", 7), ("sharpness", 5),
    ("color", 5), ("translate_x", 5), ("equalize", 7), ("autocontrast", 8), ("translate_y", 3),
    ("sharpness", 6), ("brightness", 6), ("color", 8), ("solarize", 0), ("invert", 0),
    ("equalize", 0), ("autocontrast", 0), ("equalize", 8), ("equalize", 4), ("color", 5),
    ("equalize", 5), ("autocontrast", 4), ("solarize", 4), ("brightness", 3), ("color", 0),
    ("solarize", 1), ("autocontrast", 0), ("translate_y", 3), ("translate_y", 3),
    ("autocontrast", 1), ("solarize", 1), ("equalize", 5), ("invert", 0), ("translate_y", 3),
    ("autocontrast", 1),
)  # fmt: skip
"""(name, magnitude index) of each of the 50, in the published order."""
