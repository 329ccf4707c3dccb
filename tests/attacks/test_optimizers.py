"""Each row of a batched search takes the steps of torch's optimizer on that row alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import toys
from gradveil.attacks import lbfgs
from gradveil.attacks.lbfgs import LBFGS
from gradveil.attacks.optimizers import SGD, Adam, Optimizer, Search

ROWS, DIM = 5, 6


def problem(rows: int = ROWS) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor], Tensor]:
    """Quartic bowls of very different steepness, one for each row."""
    rng = torch.Generator().manual_seed(0)
    centers = torch.randn(rows, DIM, generator=rng, dtype=torch.double)
    steep = torch.logspace(-1, 1, rows, dtype=torch.double)
    start = torch.randn(rows, DIM, generator=rng, dtype=torch.double)

    def loss(x: Tensor, row: Tensor) -> Tensor:
        away = x - centers[row]
        return steep[row] * (
            away.square().sum(-1) + 0.1 * away.pow(4).sum(-1) + (away[..., 0] * away[..., 1])
        )

    return start, loss, torch.arange(rows)


def batched(
    optimizer: Optimizer,
    steps: int,
    *,
    signed: bool = False,
    decay: bool = False,
    low: float = -9.0,
    replayable: bool = False,
) -> Tensor:
    start, loss, rows = problem()
    x = start.clone()

    def evaluate() -> tuple[Tensor, list[Tensor]]:
        leaf = x.detach().requires_grad_()
        losses = loss(leaf, rows)
        return losses.detach(), [torch.autograd.grad(losses.sum(), leaf)[0]]

    def confine() -> None:
        x.clamp_(min=low)

    seen: list[int] = []
    search = Search([x], evaluate, steps, signed, decay, confine, seen.append, replayable)
    optimizer.minimize(search)
    assert seen == list(range(1, steps + 1))
    return x


def alone(
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    steps: int,
    *,
    signed: bool = False,
    decay: bool = False,
) -> Tensor:
    start, loss, rows = problem()
    out = []
    for row in rows:
        x = start[row].clone().requires_grad_()
        optimizer = make([x])
        milestones = [
            step
            for step in range(steps)
            if any(step == -(-int(part * 8) * steps // 8) for part in (3 / 8, 5 / 8, 7 / 8))
        ]
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones if decay else [])

        def closure(
            x: Tensor = x, row: Tensor = row, optimizer: torch.optim.Optimizer = optimizer
        ) -> Tensor:
            optimizer.zero_grad()
            value = loss(x, row)
            value.backward()
            if signed:
                assert x.grad is not None
                x.grad.sign_()
            return value

        for _ in range(steps):
            optimizer.step(closure)  # type: ignore[arg-type]
            scheduler.step()
        out.append(x.detach())
    return torch.stack(out)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("decay", [False, True])
def test_adam_takes_torchs_steps_in_every_row(signed: bool, decay: bool) -> None:
    expected = alone(lambda x: torch.optim.Adam(x, 0.1), 40, signed=signed, decay=decay)
    torch.testing.assert_close(batched(Adam(0.1), 40, signed=signed, decay=decay), expected)


@pytest.mark.parametrize("decay", [False, True])
def test_sgd_takes_torchs_nesterov_steps_in_every_row(decay: bool) -> None:
    expected = alone(lambda x: torch.optim.SGD(x, 0.01, 0.9, nesterov=True), 40, decay=decay)
    torch.testing.assert_close(batched(SGD(0.01), 40, decay=decay), expected)


@pytest.mark.parametrize(("lr", "steps"), [(1e-4, 5), (0.3, 2), (1.0, 1)])
def test_lbfgs_without_a_line_search_takes_torchs_steps_in_every_row(lr: float, steps: int) -> None:
    expected = alone(
        lambda x: torch.optim.LBFGS(x, lr, max_iter=6, tolerance_change=0, tolerance_grad=0), steps
    )
    found = batched(LBFGS(lr, inner=6, line_search=False), steps)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_lbfgs_forgets_the_oldest_pairs_as_torch_does() -> None:
    expected = alone(
        lambda x: torch.optim.LBFGS(
            x, 0.2, max_iter=9, history_size=3, tolerance_change=0, tolerance_grad=0
        ),
        1,
    )
    found = batched(LBFGS(0.2, inner=9, history=3, line_search=False), 1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "optimizer",
    [
        LBFGS(1.0, inner=20),
        LBFGS(1.0, inner=7, history=4),
        LBFGS(0.2, inner=9, history=3, line_search=False),
        LBFGS(6e3, inner=5, history=3),  # some line searches fail, and their rows forget
    ],
    ids=str,
)
def test_lbfgs_takes_the_same_steps_where_they_are_replayed(
    optimizer: LBFGS, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lbfgs, "Replayed", toys.AsReplayed)
    for low in (-9.0, -0.2):
        plain, replayed = (batched(optimizer, 6, low=low, replayable=way) for way in (False, True))
        assert torch.equal(plain, replayed)


def test_a_line_search_brings_every_row_to_its_own_minimum() -> None:
    x = batched(LBFGS(1.0, inner=20), 3)
    _, loss, rows = problem()
    leaf = x.requires_grad_()
    slope = torch.autograd.grad(loss(leaf, rows).sum(), leaf)[0]
    assert float(slope.abs().max()) < 1e-5


def test_the_box_is_kept_after_every_step() -> None:
    for optimizer in (Adam(0.5), SGD(0.1), LBFGS(1.0)):
        assert float(batched(optimizer, 5, low=-0.2).min()) >= -0.2


def test_a_row_that_is_not_finite_leaves_the_others_alone() -> None:
    start, loss, rows = problem()
    for optimizer in (Adam(0.1), SGD(0.01), LBFGS(1.0), LBFGS(0.1, line_search=False)):
        results = []
        for broken in (False, True):
            x = start.clone()

            def evaluate(x: Tensor = x, broken: bool = broken) -> tuple[Tensor, list[Tensor]]:
                leaf = x.detach().requires_grad_()
                losses = loss(leaf, rows) * torch.where(
                    rows == 2, torch.nan if broken else 1.0, 1.0
                )
                return losses.detach(), [torch.autograd.grad(losses.sum(), leaf)[0]]

            optimizer.minimize(Search([x], evaluate, 3, False, False, lambda: None, lambda _: None))
            results.append(x)
        keep = rows != 2
        torch.testing.assert_close(results[0][keep], results[1][keep])
        assert bool(results[1][keep].isfinite().all())
