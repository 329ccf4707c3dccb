"""The weights of a pass in short formats, which are made once; bf16 on a CPU stands for a GPU's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradveil.engine import batched
from gradveil.engine.batched import BatchedGradients
from gradveil.engine.convolutions import shortened
from gradveil.engine.gradients import cross_entropy, loop_gradients
from gradveil.engine.layers import SHORT_TWICE


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched, "suits", lambda values: values.dtype == torch.float32)


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Softplus(), nn.Conv2d(4, 4, 3), nn.Softplus(),
        nn.Flatten(), nn.Linear(64, 5),
    ).eval()  # fmt: skip


def images_and_labels() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(3)
    return torch.rand(2, 2, 3, 6, 6, generator=rng), torch.arange(4).view(2, 2)


def assert_near_the_loop(engine: BatchedGradients, model: nn.Module) -> None:
    found = engine(*images_and_labels())
    looped = loop_gradients(model, cross_entropy, *images_and_labels())
    for name, expected in looped.items():
        flat = found[name].float().flatten(1), expected.flatten(1)
        assert float(torch.cosine_similarity(*flat).min()) > 0.95, name


def step(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


def load(model: nn.Module) -> None:
    model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()})


def replace(model: nn.Module) -> None:
    for _ in range(3):  # the last may lie where the first did
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter)


def transpose(model: nn.Module) -> None:
    weight = model.get_parameter("2.weight")
    weight.data = weight.data.transpose(0, 1)


@pytest.mark.parametrize("change", [step, load, replace, transpose])
def test_a_change_of_the_weights_is_noticed(
    model: nn.Module, change: Callable[[nn.Module], None]
) -> None:
    engine = BatchedGradients(model, cross_entropy, short=True)
    assert_near_the_loop(engine, model)
    assert engine._forwards is SHORT_TWICE
    change(model)
    engine(*images_and_labels())
    for name, kept in engine._shortened.items():
        assert torch.equal(kept.value, shortened(model.get_parameter(name).detach()))


def test_weights_that_stay_are_made_once(model: nn.Module) -> None:
    engine = BatchedGradients(model, cross_entropy, short=True)
    engine(*images_and_labels())
    kept = {name: part.value for name, part in engine._shortened.items()}
    assert list(kept) == ["0.weight", "2.weight"]
    engine(*images_and_labels())
    assert all(engine._shortened[name].value is value for name, value in kept.items())


def test_a_weight_shared_with_a_layer_that_is_not_short_is_right(model: nn.Sequential) -> None:
    shared = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")
    other = model.get_submodule("2")
    assert isinstance(other, nn.Conv2d)
    shared.weight = other.weight
    both = nn.Sequential(*list(model)[:4], shared, *list(model)[4:])
    assert_near_the_loop(BatchedGradients(both, cross_entropy, short=True), both)


def test_a_weight_that_the_model_reads_by_itself_is_right() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
            self.second.weight.requires_grad_(False)
            self.last = nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            maps = self.second(self.first(x)).mean((2, 3)).to(x.dtype)
            found: Tensor = self.last(maps @ self.second.weight.mean((2, 3)))
            return found

    model = Reading()
    assert_near_the_loop(BatchedGradients(model, cross_entropy, short=True), model)
