"""Pruning keeps the right entries, exactly as many as stated; with feedback nothing is lost."""

import math
import time

import pytest
import torch
from torch import Generator, Tensor, nn

from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Gradients
from gradveil.defenses import FeedbackPruning, Moment, Pruning
from gradveil.defenses.pruning import Residuals, keep_largest, kept, kept_each
from gradveil.engine.gradients import cross_entropy

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SHARES = (0.0, 0.1, 0.5, 0.7, 0.95, 0.999, 0.99999999)
MOMENT = Moment(
    nn.Linear(1, 1), Batch(torch.zeros(1, 1), torch.zeros(1, dtype=torch.long)), cross_entropy
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "values"), dtype=torch.float64)


def pruned(gradients: Gradients, share: float) -> Gradients:
    return Pruning(share).protect_gradients(gradients, MOMENT, None, generator(0))[0]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.29, 0.5, 0.7, 0.95, 0.999])
def test_pruning_keeps_the_largest_share_of_each_layer(share: float) -> None:
    gradients = {"wide": normal(40, 25), "small": 1e-6 * normal(100, seed=1)}
    for name, found in pruned(gradients, share).items():
        value = gradients[name]
        order = value.abs().flatten().sort(descending=True).indices
        largest = order[: value.numel() - int(share * value.numel() + 1e-9)]
        expected = torch.zeros(value.numel(), dtype=torch.float64).scatter(
            0, largest, value.flatten()[largest]
        )
        assert torch.equal(found.flatten(), expected)


@pytest.mark.parametrize(
    ("count", "share", "zeros"),
    [
        (10, 0.7, 7),
        (100, 0.29, 29),
        (1, 0.999, 0),
        (10, 0.999, 9),
        (3, 0.34, 1),
        (10, 0.99999999, 9),
    ],
)
def test_exactly_the_stated_number_of_entries_becomes_zero(
    count: int, share: float, zeros: int
) -> None:
    assert int((pruned({"w": normal(count)}, share)["w"] == 0).sum()) == zeros


def test_of_equal_entries_exactly_as_many_go_as_stated() -> None:
    values = torch.tensor([1.0, -1, 1, -1, 1, 2, 0.5, 1, 1, 1])
    found = pruned({"w": values}, 0.5)["w"]
    assert int((found == 0).sum()) == 5 and found[5] == 2 and found[6] == 0
    assert int(kept(torch.ones(1000), 0.9).sum()) == 100


def test_twenty_million_entries_in_one_tensor_are_pruned_exactly_and_in_seconds() -> None:
    """`torch.quantile` refuses as many."""
    values = torch.randn(20_000_000, generator=generator(3))
    began = time.perf_counter()
    mask = kept(values, 0.95)
    assert time.perf_counter() - began < 10
    assert int(mask.sum()) == 1_000_000
    assert values[mask].abs().min() >= values[~mask].abs().max()


def shared_over_rounds(
    defense: FeedbackPruning, rounds: list[Tensor]
) -> tuple[list[Tensor], Residuals]:
    state, shared = defense.start(), []
    for value in rounds:
        found, state = defense.protect_gradients({"w": value}, MOMENT, state, generator(0))
        shared.append(found["w"])
    assert isinstance(state, Residuals)
    return shared, state


@pytest.mark.parametrize("share", [0.5, 0.9, 0.999])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_feedback_equals_a_plain_simulation_entry_by_entry(share: float, momentum: float) -> None:
    rounds = [normal(200, seed=number) for number in range(8)]
    shared, _ = shared_over_rounds(FeedbackPruning(share, momentum), rounds)
    u, v = [0.0] * 200, [0.0] * 200
    for value, found in zip(rounds, shared, strict=True):
        for i in range(200):
            u[i] = momentum * u[i] + float(value[i])
            v[i] += u[i]
        sent = sorted(range(200), key=lambda i: -abs(v[i]))[: 200 - int(share * 200 + 1e-9)]
        expected = [v[i] if i in sent else 0.0 for i in range(200)]
        assert found.tolist() == pytest.approx(expected, abs=1e-12)
        for i in sent:
            u[i] = v[i] = 0.0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_feedback_nothing_is_lost(momentum: float) -> None:
    """What was shared and what still waits is the sum of the momentum-corrected gradients."""
    rounds = [normal(300, seed=number) for number in range(10)]
    shared, state = shared_over_rounds(FeedbackPruning(0.95, momentum), rounds)
    total, u = torch.zeros(300, dtype=torch.float64), torch.zeros(300, dtype=torch.float64)
    for value, found in zip(rounds, shared, strict=True):
        u = momentum * u + value
        total += u
        u = torch.where(found != 0, 0, u)
    torch.testing.assert_close(sum(shared, torch.zeros(())) + state.unsent["w"], total)
    assert not bool((state.unsent["w"].bool() & (shared[-1] != 0)).any())


def test_the_first_round_with_feedback_is_plain_pruning() -> None:
    value = normal(50)
    assert torch.equal(
        shared_over_rounds(FeedbackPruning(0.8), [value])[0][0], pruned({"w": value}, 0.8)["w"]
    )


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
