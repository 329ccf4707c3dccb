"""The kernels that multiply maps where they lie, against plain torch in float64.

They run on a GPU, or anywhere by Triton's interpreter: TRITON_INTERPRET=1 with Triton installed.
Elsewhere these tests are skipped.
"""

import os
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from gradveil.engine.fused import load_convolution_kernels
from gradveil.engine.patches import PatchLayout

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The engine asks for bf16; the interpreter multiplies the bits of bf16 as integers.
DTYPE, ERROR = (torch.float32, 1e-6) if INTERPRETED else (torch.bfloat16, 4e-3)

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or not (INTERPRETED or torch.cuda.is_available()),
    reason="no GPU and no Triton that interprets",
)

SAME = ((1, 1), (1, 1))
NONE = ((0, 0), (0, 0))
CASES = [
    # kernel, stride, dilation, edges, channels, outputs, size, rows of a victim
    ((1, 1), (1, 1), (1, 1), NONE, 16, 10, (5, 7), 1),
    ((1, 1), (2, 2), (1, 1), NONE, 64, 100, (8, 8), 3),
    ((3, 3), (1, 1), (1, 1), SAME, 3, 64, (32, 32), 1),
    ((3, 3), (1, 1), (1, 1), SAME, 64, 64, (8, 8), 3),
    ((3, 3), (1, 1), (1, 1), SAME, 130, 100, (5, 7), 1),
    ((3, 3), (1, 1), (2, 2), NONE, 24, 10, (8, 8), 3),
    ((3, 3), (2, 2), (1, 1), SAME, 16, 64, (5, 7), 3),
    ((3, 3), (2, 2), (1, 1), SAME, 3, 10, (8, 8), 1),
    ((3, 3), (2, 2), (2, 2), ((2, 2), (2, 2)), 16, 10, (8, 8), 1),
    ((3, 3), (3, 2), (1, 3), ((0, 1), (4, 2)), 24, 10, (5, 7), 3),
    ((5, 5), (1, 1), (1, 1), ((2, 2), (2, 2)), 3, 10, (5, 7), 3),
    ((5, 5), (2, 1), (1, 1), ((1, 0), (0, 2)), 24, 64, (8, 8), 1),
    ((2, 4), (1, 1), (1, 1), ((1, 0), (2, 1)), 16, 10, (5, 7), 1),
]


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation", "edges", "channels", "outputs", "size", "each"), CASES
)
def test_weight_gradients_and_their_slopes_are_those_of_a_convolution_of_each_victim(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    edges: tuple[tuple[int, int], tuple[int, int]],
    channels: int,
    outputs: int,
    size: tuple[int, int],
    each: int,
) -> None:
    victims, rng = 2, Generator().manual_seed(0)
    layout = PatchLayout(kernel, stride, dilation, edges, 1, victims)
    inputs = torch.randn(victims * each, channels, *size, generator=rng).to(DEVICE, DTYPE)
    area = kernel[0] * kernel[1]
    slope = torch.randn(victims, outputs, area, channels, generator=rng).to(DEVICE, DTYPE)
    to_blame = torch.cat(
        [_convolve(a, s, layout) for a, s in zip(inputs.chunk(victims), slope, strict=True)]
    )
    blame = torch.randn(to_blame.shape, generator=rng).to(DEVICE, DTYPE)
    found = (
        load_convolution_kernels().weight_products(inputs, blame, layout),
        load_convolution_kernels().blame_slope(inputs, slope, to_blame.shape[2:], layout),
        load_convolution_kernels().input_slope(blame, slope, size, layout),
    )
    weights, to_inputs = [], []
    for a, b, s in zip(inputs.chunk(victims), blame.chunk(victims), slope, strict=True):
        a, s = a.double().requires_grad_(), s.double().requires_grad_()
        parts = torch.autograd.grad(_convolve(a, s, layout), (a, s), b.double())
        to_inputs.append(parts[0])
        weights.append(parts[1])
    wanted = torch.stack(weights), to_blame, torch.cat(to_inputs)
    for part, exact in zip(found, wanted, strict=True):
        assert part.dtype == DTYPE and part.shape == exact.shape
        assert float((part.double() - exact).norm() / exact.norm()) < ERROR


def _convolve(inputs: Tensor, slope: Tensor, layout: PatchLayout) -> Tensor:
    """Return the output of one victim, in float64, with `slope` (outputs, area, channels)."""
    (top, bottom), (left, right) = layout.edges
    weight = slope.double().unflatten(1, layout.kernel).permute(0, 3, 1, 2)
    padded = F.pad(inputs.double(), (left, right, top, bottom))
    return F.conv2d(padded, weight, None, layout.stride, 0, layout.dilation)
