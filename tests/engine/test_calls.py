"""Layers that a model calls by name, `layer(input=x)`, are seen and replaced as all others are."""

import torch
from torch import Generator, Tensor, nn

import toys
from gradveil.attacks.dense_layers import passed
from gradveil.core.types import Protocol
from gradveil.defenses import parse
from gradveil.defenses.applied import protected_model
from gradveil.engine.calls import after_use, before_use, run_instead, run_itself
from gradveil.engine.draws import draw_shapes, given
from gradveil.engine.gradients import cross_entropy, loop_inputs
from gradveil.engine.shares import Shares
from twins import ByName, by_name, victims


def small(*more: nn.Module) -> nn.Module:
    return toys.seeded(
        lambda: ByName(nn.Flatten(), nn.Linear(12, 4), *more, nn.Linear(4, 3))
    ).double()


def test_an_input_is_seen_whether_it_is_given_by_position_or_by_name() -> None:
    layer, x = nn.Linear(2, 3), torch.rand(4, 2)
    before, after = list[Tensor](), list[tuple[Tensor, Tensor]]()
    handles = [
        before_use(layer, lambda _, seen: before.append(seen)),
        after_use(layer, lambda _, seen, made: after.append((seen, made))),
    ]
    made = layer(x), layer(input=x)
    for handle in handles:
        handle.remove()
    layer(x)
    assert len(before) == len(after) == 2 and all(seen is x for seen in before)
    assert [(seen is x, out) for seen, out in after] == [(True, out) for out in made]


def test_what_runs_instead_of_a_layer_takes_its_input_both_ways_until_the_layer_runs_itself() -> (
    None
):
    layer, x = nn.ReLU(), torch.tensor([-1.0, 2.0])
    run_instead(layer, lambda values: 3 * values)
    assert torch.equal(layer(x), 3 * x) and torch.equal(layer(input=x), 3 * x)
    run_itself(layer)
    assert torch.equal(layer(input=x), x.relu()) and "forward" not in vars(layer)


def test_dropout_that_is_called_by_name_takes_the_draws_it_is_given() -> None:
    model, images = small(nn.Dropout(0.5)).train(), torch.rand(5, 3, 2, 2).double()
    assert draw_shapes(model, images, ["2"]) == {"2": (4,)}
    mask = (torch.rand(5, 4, generator=Generator().manual_seed(1)) > 0.5).double()
    with given(model, {"2": mask}):
        found = model(images)
    parts = [model.get_submodule(name) for name in ("1", "3")]
    torch.testing.assert_close(found, parts[1](parts[0](images.flatten(1)) * mask * 2))


def test_the_inputs_of_layers_that_are_called_by_name_are_found_one_by_one_and_batched() -> None:
    model = toys.seeded(by_name).double()
    images, labels = victims(2, 3)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    shares = Shares(model, cross_entropy, Protocol(train_mode=True))
    looped = loop_inputs(model.train(), images, layers)
    for found, expected in zip(shares.inputs(images, labels, layers), looped, strict=True):
        torch.testing.assert_close(found, expected)
    assert shares.why_not is None


def test_attackers_see_the_dense_layers_that_are_called_by_name() -> None:
    victim = toys.observe(small(), toys.batch(1, size=2, classes=3, dtype=torch.float64))
    assert len(passed(victim)) == 2


def test_a_defense_can_put_a_module_before_a_layer_that_is_called_by_name() -> None:
    model, images = small(), torch.rand(2, 3, 2, 2).double()
    made = protected_model(parse("dropout:0.5"), model, (3, 2, 2)).eval()
    assert made(images).shape == (2, 3)
