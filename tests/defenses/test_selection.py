"""Selection by counting bits gives the masks of sorting."""

import math

import pytest
import torch
from torch import Generator, Tensor

from gradveil.defenses.pruning import kept, kept_each
from gradveil.defenses.selection import keep_largest

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SHARES = (0.0, 0.1, 0.5, 0.7, 0.95, 0.999, 0.99999999)


def tensors() -> list[Tensor]:
    """Many kinds of float32 numbers: spread widely, tied, zero, denormal, infinite."""
    rng = Generator().manual_seed(0)
    normal = torch.randn(30_000, generator=rng)
    tiny = torch.randint(-40, 40, (2_000,), generator=rng).float() * 2.0**-149
    tied = torch.randint(-3, 4, (5_000,), generator=rng).float()
    infinite = normal[:3_000].clone()
    infinite[::7], infinite[1::7] = math.inf, -math.inf
    scales = torch.exp2(torch.randint(-140, 120, (9_000,), generator=rng).float())
    return [
        normal.view(30, 10, 100),
        tiny,
        tied.view(50, 100),
        infinite,
        normal[:9_000] * scales,
        torch.zeros(500),
        -torch.zeros(3),
        torch.full((64, 4), -1e-30),
        torch.tensor([2.0]),
        torch.tensor(-0.5),
        torch.tensor([1.0, -1.0]),
        normal[:17].double().mul(1e-42).float(),
        normal[:999].bfloat16().float(),
    ]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("device", DEVICES)
def test_all_tensors_together_have_the_masks_of_each_sorted(device: str, share: float) -> None:
    values = [value.to(device) for value in tensors()]
    for value, mask in zip(values, keep_largest(values, share), strict=True):
        assert torch.equal(mask, kept(value, share))


def test_three_million_entries_have_the_mask_of_sorting() -> None:
    value = torch.randn(3_000_000, generator=Generator().manual_seed(1))
    assert torch.equal(keep_largest([value], 0.95)[0], kept(value, 0.95))


def test_not_a_number_counts_as_larger_than_any() -> None:
    values = torch.tensor([math.nan, 3.0, math.inf, 1.0])
    assert keep_largest([values], 0.75)[0].tolist() == [True, False, False, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pruning_on_a_gpu_does_not_wait_for_it(dtype: torch.dtype) -> None:
    values = {str(number): value.to("cuda", dtype) for number, value in enumerate(tensors())}
    kept_each(values, 0.9)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kept_each(values, 0.9)
    finally:
        torch.cuda.set_sync_debug_mode("default")
