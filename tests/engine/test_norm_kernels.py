"""The kernels of batch norm, in eval mode and by statistics of each victim, against plain torch.

They run on a GPU, or anywhere by Triton's interpreter: TRITON_INTERPRET=1 with Triton installed.
"""

import os
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.engine.fused import load_kernels, load_norm_kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or not (INTERPRETED or torch.cuda.is_available()),
    reason="no GPU and no Triton that interprets",
)
SHAPES = [(2, 64, 8, 8), (3, 5, 7, 3), (1, 130, 9, 9)]


def maps(shape: tuple[int, ...], seed: int, last: bool = True) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return drawn.contiguous(memory_format=torch.channels_last) if last else drawn


def kept(
    channels: int, weighted: bool = True
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    rng = torch.Generator().manual_seed(9)
    mean, variance, weight, bias = torch.rand(4, channels, generator=rng).to(DEVICE).unbind()
    return mean, variance + 0.1, weight if weighted else None, bias if weighted else None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [True, False])
def test_the_affine_kernel_is_batch_norm_in_eval_mode_and_its_slope(
    shape: tuple[int, ...], weighted: bool
) -> None:
    kernels, values = load_kernels(), maps(shape, 0).requires_grad_()
    mean, variance, weight, bias = kept(shape[1], weighted)
    expected = F.batch_norm(values, mean, variance, weight, bias, eps=1e-3)
    statistics = kernels.Statistics(mean, variance, weight, bias, 1e-3)
    found = kernels.affine(values.detach(), statistics, shifted=True)
    torch.testing.assert_close(found, expected.detach())
    blame = maps(shape, 1)
    (slope,) = torch.autograd.grad(expected, values, blame)
    torch.testing.assert_close(kernels.affine(blame, statistics, shifted=False), slope)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("last", [True, False])
def test_sums_and_slopes_of_batch_norm_are_those_of_autograd(
    shape: tuple[int, ...], last: bool
) -> None:
    kernels = load_kernels()
    blame, inputs = (maps(shape, seed, last).requires_grad_() for seed in (2, 3))
    mean, variance, _, _ = kept(shape[1])
    statistics = kernels.Statistics(mean, variance, None, None, 1e-3)
    normal = F.batch_norm(inputs, mean, variance, eps=1e-3)
    expected = (blame * normal).sum((2, 3)), blame.sum((2, 3))
    found = kernels.norm_sums(blame.detach(), inputs.detach(), statistics)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-4, atol=1e-4)
    to_sums = [maps((shape[0], shape[1]), seed, last=False) for seed in (4, 5)]
    slopes = torch.autograd.grad(expected, [blame, inputs], to_sums)
    made = kernels.norm_slopes(blame.detach(), inputs.detach(), *to_sums, statistics)
    for mine, theirs in zip(made, slopes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_large_mean_costs_the_sums_and_slopes_of_batch_norm_no_digits() -> None:
    kernels, shape = load_kernels(), (2, 5, 8, 8)
    blame, inputs = maps(shape, 0), 1_000 + 0.01 * maps(shape, 1)
    mean, variance = (torch.full((5,), value, device=DEVICE) for value in (1e3, 1e-4))
    statistics = kernels.Statistics(mean, variance, None, None, 1e-5)
    r = (variance.double() + 1e-5).rsqrt()[:, None, None]
    normal = (inputs.double() - 1_000) * r
    assert apart(kernels.affine(inputs, statistics, shifted=True), normal) < 1e-5
    found, _ = kernels.norm_sums(blame, inputs, statistics)
    assert apart(found, (blame.double() * normal).sum((2, 3))) < 1e-5
    to_weight, to_bias = maps((2, 2, 5), 2, last=False).unbind()
    to_blame, _ = kernels.norm_slopes(blame, inputs, to_weight, to_bias, statistics)
    expected = to_bias[:, :, None, None] + normal * to_weight[:, :, None, None]
    assert apart(to_blame, expected) < 1e-5


def test_products_and_mixtures_of_several_gradients_have_their_factors() -> None:
    kernels, factors = load_kernels(), (1.0, 0.5, 3.0)
    shapes = [(3, 5, 4), (3, 9_001), (3, 2, 3, 3)]
    found = [maps(shape, k, last=False) for k, shape in enumerate(shapes)]
    target = [maps(shape, k + 9, last=False) for k, shape in enumerate(shapes)]
    dot, square = kernels.products(found, target, factors)
    pairs = zip(found, target, factors, strict=True)
    expected = [(f * g * t, f * g * g) for g, t, f in pairs]
    for mine, number in ((dot, 0), (square, 1)):
        whole = torch.stack([parts[number].flatten(1).sum(1) for parts in expected]).sum(0)
        torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-3)
    a, b = maps((2, 3), 30, last=False).unbind()
    for g, t, f in zip(found, target, factors, strict=True):
        shape = (-1, *(1,) * (g.dim() - 1))
        expected_mix = f * (2 * a.view(shape) * g + b.view(shape) * t)
        torch.testing.assert_close(kernels.mix(g, t, a, b, f), expected_mix)


def test_a_mixture_reads_slopes_that_all_victims_share() -> None:
    kernels = load_kernels()
    found, target = maps((3, 5), 0, last=False), maps((3, 5), 1, last=False)
    spread = [torch.tensor([value], device=DEVICE).expand(3) for value in (1.0, -2.0)]
    mixed = kernels.mix(found, target, *spread, 1.0)
    torch.testing.assert_close(mixed, 2 * found - 2 * target)


def test_a_mixture_of_a_large_gradient_has_no_more_programs_than_a_gpu_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels, grids = load_kernels(), []

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            grids.append(grid)
            return lambda *_: None

    monkeypatch.setattr(kernels, "_mix", Launched())
    large = torch.empty(2, 4_096, 25_088, device="meta")  # the first linear layer of VGG
    kernels.mix(large, large, *torch.empty(2, 2, device="meta").unbind(), 1.0)
    assert max(grids[0][1:]) <= 65_535


GROUPS = [(2, 3, 40, 25), (3, 1, 5, 300), (1, 2, 33, 1)]


def layouts(shape: tuple[int, ...], seed: int, last: bool) -> Tensor:
    """Return maps (groups, rows, channels, positions) in either order of the memory."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return drawn.transpose(2, 3).contiguous().transpose(2, 3) if last else drawn


def by_torch(values: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Normalize each group as torch does."""
    flat = [part.transpose(0, 1).flatten(1).T for part in values]  # (entries, channels)
    made = [
        F.batch_norm(
            part,
            None,
            None,
            None if weight is None else weight[group],
            None if bias is None else bias[group],
            training=True,
            eps=1e-3,
        )
        for group, part in enumerate(flat)
    ]
    _, rows, channels, positions = values.shape
    return torch.stack([part.T.view(channels, rows, positions).transpose(0, 1) for part in made])


@pytest.mark.parametrize("shape", GROUPS)
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_normalization_by_groups_and_two_derivatives_are_those_of_torch(
    shape: tuple[int, ...], last: bool, weighted: bool
) -> None:
    kernels = load_norm_kernels()
    values = (layouts(shape, 0, last) + 30).double().requires_grad_()
    numbers = maps((2, shape[0], shape[2]), 1, last=False).double()
    weight, bias = (numbers[k].requires_grad_() if weighted else None for k in (0, 1))
    leaves = [values, *(part for part in (weight, bias) if part is not None)]
    expected = by_torch(values, weight, bias)
    slope = layouts(shape, 2, last).double().requires_grad_()
    slopes = torch.autograd.grad(expected, leaves, slope, create_graph=True)
    u = layouts(shape, 3, last).double()
    to_first = maps((2, shape[0], shape[2]), 4, last=False).double().unbind()
    wanted = [slope, values, *([weight] if weight is not None else [])]
    seconds = torch.autograd.grad(slopes, wanted, [u, *to_first][: len(slopes)])

    plain = [None if part is None else part.detach().float() for part in (weight, bias)]
    x, g = values.detach().float(), slope.detach().float()
    found, kept = kernels.forward(x, *plain, 1e-3)
    assert apart(found, expected) < 1e-4
    to_values, mixed, to_bias = kernels.backward(g, x, plain[0], kept)
    made = [to_values, mixed, to_bias]
    for mine, theirs in zip(made[: len(slopes)], slopes, strict=True):
        assert apart(mine, theirs) < 1e-4
    zeros = [torch.zeros_like(part) for part in to_first]
    given = [part.float() for part in (to_first if weighted else zeros)]
    again = kernels.second(u.float(), g, x, plain[0], kept, (mixed, to_bias), tuple(given))
    for mine, theirs in zip(again[: len(seconds)], seconds, strict=True):
        assert apart(mine, theirs) < 1e-4


def test_the_maps_of_a_large_batch_have_no_more_programs_than_a_gpu_takes() -> None:
    values = torch.empty(1, 128, 64, 224 * 224, device="meta")
    assert max(load_norm_kernels()._grid(values)[1:]) <= 65_535


def apart(found: Tensor, expected: Tensor) -> float:
    """Return the error beside the size of what is expected."""
    difference = found.double() - expected.detach()
    return float(difference.norm() / expected.detach().norm().clamp_min(1e-12))
