"""The closed form leaves out entries that pruning cut off, and changes nothing elsewhere."""

import pytest
import torch
from torch import Generator, Tensor

from gradveil.attacks.linear import LinearInversion, solve
from gradveil.clients import Client
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.defenses import parse
from gradveil.models import build
from gradveil.scores import psnr

COUNT = 8


def rng() -> Generator:
    return Generator().manual_seed(0)


def plain(weight: Tensor, bias: Tensor) -> Tensor:
    """Least squares over all entries, zeros too."""
    scaled = bias / bias.abs().max()
    return (scaled @ weight) / (scaled @ scaled) / bias.abs().max()


def shared(defense: str) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor]:
    """Images, the first layer's gradients of each, and what the attack makes of them."""
    data = load("fashion-mnist-mini", "test")
    model = build("mlp", channels=1, size=28, classes=10, mean=data.mean, std=data.std)
    images = data.images[:COUNT].float() / 255
    batches = [Batch(images[i : i + 1], data.labels[i : i + 1]) for i in range(COUNT)]
    seen = [
        one
        for one, _ in Client(model, classes=10, defense=parse(defense)).share_batches(
            batches, rng()
        )
    ]
    names = list(seen[0].gradients)[:2]
    found = torch.cat([own.images for own in LinearInversion()(seen, rng())])
    return images, [(one.gradients[names[0]], one.gradients[names[1]]) for one in seen], found


def test_entries_set_to_zero_give_no_equation() -> None:
    bias, x = (
        torch.randn(40, generator=rng()).double(),
        torch.rand(30, generator=rng()).double() + 0.1,
    )
    weight = bias[:, None] * x
    weight[weight.abs() < weight.abs().flatten().quantile(0.8)] = 0
    some = weight.any(0)
    assert 0 < int(some.sum()) < 30
    found = solve(weight, bias)
    torch.testing.assert_close(found[some], x[some])
    assert not found[~some].any()
    assert float((plain(weight, bias) - x)[some].norm()) > 0.1


def test_a_column_left_only_where_the_bias_was_cut_is_zero_and_spares_the_others() -> None:
    bias, weight = torch.tensor([2.0, 0.0]), torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    assert torch.equal(solve(weight, bias), torch.tensor([0.5, 0.0]))


def test_inputs_that_are_zero_come_back_as_zero() -> None:
    bias, x = torch.tensor([0.5, -2.0, 0.0]), torch.tensor([0.0, 0.25, 1.0, 0.0])
    torch.testing.assert_close(solve(bias[:, None] * x, bias), x)


def test_gradients_that_nobody_pruned_give_the_same_to_the_last_bit() -> None:
    _, gradients, _ = shared("none")
    for weight, bias in gradients:
        assert bool((weight == 0).any())  # dead units
        assert torch.equal(solve(weight, bias), plain(weight, bias))


@pytest.mark.parametrize(("share", "gain"), [(0.9, 6.0), (0.95, 2.0)])  # measured: 10.6 and 3.6 dB
def test_pruned_gradients_give_better_images_than_with_their_zeros_counted_as_measured(
    share: float, gain: float
) -> None:
    data = load("fashion-mnist-mini", "test")
    images, gradients, found = shared(f"prune:{share}")
    counted = (
        torch.stack([plain(*own) for own in gradients]).view_as(images) * data.std[0] + data.mean[0]
    )
    assert float((psnr(found, images) - psnr(counted.clamp(0, 1), images)).mean()) > gain
