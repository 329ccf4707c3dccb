"""Every built-in model: batches, seeds, second derivatives, layers and normalization."""

import pytest
import torch
from torch import nn

import toys
from gradveil import models


def make(
    name: str, channels: int = 3, size: int = 16, classes: int = 10, seed: int = 0
) -> nn.Module:
    return models.build(name, channels=channels, size=size, classes=classes, seed=seed)


@pytest.mark.parametrize("name", models.names())
def test_a_batch_gives_the_logits_of_its_images_one_by_one(name: str) -> None:
    model = make(name, 2, 12, 5).double().eval()
    images = torch.rand(3, 2, 12, 12, dtype=torch.float64)
    logits = model(images)
    assert logits.shape == (3, 5)
    torch.testing.assert_close(
        logits, torch.cat([model(image[None]) for image in images]), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("name", models.names())
def test_a_seed_fixes_the_weights_and_another_changes_them(name: str) -> None:
    first, again, other = (dict(make(name, seed=seed).named_parameters()) for seed in (3, 3, 4))
    assert all(torch.equal(value, again[key]) for key, value in first.items())
    drawn = [key for key, value in first.items() if value.ndim > 1]
    assert drawn and not any(torch.equal(first[key], other[key]) for key in drawn)


@pytest.mark.parametrize("name", models.names())
def test_building_leaves_the_global_generator_as_it_was(name: str) -> None:
    before = torch.get_rng_state()
    make(name)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", models.names())
def test_the_gradient_can_be_differentiated_again(name: str) -> None:
    model = make(name, 1, 12, 3).eval()
    images = torch.rand(2, 1, 12, 12, requires_grad=True)
    loss = nn.functional.cross_entropy(model(images), torch.tensor([0, 2]))
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (second,) = torch.autograd.grad(
        sum((g.square().sum() for g in gradients), torch.tensor(0.0)), images
    )
    assert bool(second.isfinite().all()) and bool((second.abs().sum(dim=(1, 2, 3)) > 0).all())


@pytest.mark.parametrize("name", models.names())
def test_every_layer_with_weights_is_used_once_and_nothing_works_in_place(name: str) -> None:
    model = make(name)
    calls: dict[str, int] = {
        key: 0 for key, module in model.named_modules() if list(module.parameters(recurse=False))
    }
    for key, module in model.named_modules():
        assert not getattr(module, "inplace", False)
        if key in calls:

            def count(_module: nn.Module, _inputs: object, _output: object, key: str = key) -> None:
                calls[key] += 1

            module.register_forward_hook(count)
    model(torch.rand(2, 3, 16, 16))
    assert set(calls.values()) == {1}


@pytest.mark.parametrize("name", models.names())
def test_normalizing_inside_equals_normalizing_outside(name: str) -> None:
    mean, std = (0.5, 0.25, 0.125), (0.25, 0.5, 2.0)
    inside = models.build(name, channels=3, size=12, classes=4, mean=mean, std=std).double().eval()
    outside = make(name, 3, 12, 4).double().eval()
    images = torch.rand(1, 3, 12, 12, dtype=torch.float64)
    moved = torch.stack([(images[:, c] - mean[c]) / std[c] for c in range(3)], dim=1)
    torch.testing.assert_close(inside(images), outside(moved))
    assert not torch.allclose(inside(images), outside(images))


@pytest.mark.parametrize("name", [name for name in models.names() if name != "lenet"])
def test_a_narrow_toy_has_the_layers_of_the_model_with_a_quarter_of_the_channels(name: str) -> None:
    wide, narrow = make(name), toys.narrow(lambda: make(name))
    layers = [[type(module) for module in model.modules()] for model in (wide, narrow)]
    assert layers[0] == layers[1]
    sizes = [sum(value.numel() for value in model.parameters()) for model in (wide, narrow)]
    assert 4 < sizes[0] / sizes[1] < 16
