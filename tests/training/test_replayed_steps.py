"""Steps that are replayed train as plain ones do: with a stand-in here, with graphs on a GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradveil.core.seeds import generator
from gradveil.core.types import Batch
from gradveil.defenses import parse
from gradveil.models import build
from gradveil.training import step as steps
from gradveil.training.step import DefendedStep, GraphedStep, Objective, Step

SIZES = (
    8,
    8,
    8,
    8,
    8,
    8,
    3,
    8,
    8,
    3,
    8,
)  # warm-up, capture, replays, and odd batches between replays
NEW_RATE = 8  # the step from which the learning rate is another


class Stand:
    """As `Replayed` without a GPU.

    After three calls what was returned stays, and new values are written into it.
    """

    def __init__(self, function: Callable[[], dict[str, Tensor] | None]) -> None:
        self.function, self.calls = function, 0
        self.kept: dict[str, Tensor] | None = None

    def __call__(self) -> dict[str, Tensor] | None:
        self.calls += 1
        found = self.function()
        if self.calls <= 3 or found is None:
            return found
        if self.kept is None:
            self.kept = found
        for name, value in found.items():
            self.kept[name].copy_(value)
        return self.kept


def stepped(
    defense: str, device: str, graphs: bool
) -> tuple[dict[str, Tensor], tuple[float, float]]:
    torch.manual_seed(0)
    protection = parse(defense)
    model = (
        protection.protect_model(
            build("lenet", channels=1, size=28, classes=10, seed=0), (1, 28, 28)
        )
        .to(device)
        .train()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    objective, count = Objective.of(protection, 1.0), 0

    def stream() -> torch.Generator:
        return torch.Generator(device).manual_seed(count)

    step: Step
    if protection.changes("gradients"):
        step = DefendedStep(model, objective, optimizer, False, protection, stream, graphs)
    else:
        step = (GraphedStep if graphs else Step)(model, objective, optimizer, False)
    rng = generator(1)
    for count, size in enumerate(SIZES):  # the stream reads it
        optimizer.param_groups[0]["lr"] = 0.05 if count < NEW_RATE else 0.005
        images, labels = (
            torch.rand(size, 1, 28, 28, generator=rng),
            torch.randint(10, (size,), generator=rng),
        )
        step(Batch(images.to(device), labels.to(device)))
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}, step.averages()


DEFENSES = [
    "none",
    "prune:0.9",
    "prune-feedback:0.9",
    "gaussian:1e-2",
    "clip:0.5,then,laplacian:1e-3",
    "dropout:0.3,then,prune:0.5",
]


@pytest.mark.parametrize("defense", DEFENSES)
def test_replayed_steps_end_with_the_weights_of_plain_ones(
    defense: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "Replayed", Stand)
    plain, plain_averages = stepped(defense, "cpu", graphs=False)
    replayed, averages = stepped(defense, "cpu", graphs=True)
    assert averages == plain_averages
    for name, value in plain.items():
        assert torch.equal(replayed[name], value), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("defense", [*DEFENSES, "precode:k=16,then,gaussian:1e-3", "precode:k=16"])
def test_steps_captured_on_a_gpu_end_with_the_weights_of_plain_ones(defense: str) -> None:
    plain, plain_averages = stepped(defense, "cuda", graphs=False)
    replayed, averages = stepped(defense, "cuda", graphs=True)
    assert averages == pytest.approx(plain_averages, rel=1e-4)
    for name, value in plain.items():
        assert torch.allclose(replayed[name], value, rtol=1e-3, atol=1e-5), name


def test_a_capture_made_for_one_learning_rate_is_not_replayed_at_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Stand] = []

    class Counted(Stand):
        def __init__(self, function: Callable[[], None]) -> None:
            super().__init__(function)
            made.append(self)

    monkeypatch.setattr(steps, "Replayed", Counted)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = GraphedStep(model, nn.CrossEntropyLoss(), optimizer, False)
    batch = Batch(torch.rand(2, 1, 2, 2, generator=generator(0)), torch.tensor([0, 1]))
    for rate in (0.1, 0.1, 0.01, 0.01):
        optimizer.param_groups[0]["lr"] = rate
        step(batch)
    assert [one.calls for one in made] == [2, 2]
