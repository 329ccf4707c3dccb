"""PRECODE's bottleneck: its penalty, its shapes, and answers that carry the penalty.

Nothing is kept between passes.
"""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import vmap

from gradveil.core.seeds import generator
from gradveil.engine.draws import given
from gradveil.models.bottleneck import (
    AlwaysDropout,
    Bottleneck,
    Penalized,
    at_rest,
    bottlenecks,
    divergence,
    penalties,
)


class Between(nn.Module):
    """Two bottlenecks, the second behind a layer that knows nothing of penalties."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Bottleneck(12, 5, 0.1), Bottleneck(8, 3, 0.2, seed=1)
        self.layer = nn.Linear(12, 8)

    def forward(self, images: Tensor) -> Tensor:
        values: Tensor = self.second(self.layer(self.first(images.flatten(1))[0]))[0]
        return values


def images(count: int = 4) -> Tensor:
    return torch.rand(count, 3, 2, 2, generator=generator(0)).double()


def test_the_divergence_equals_the_closed_form_and_that_of_torch_distributions() -> None:
    mu = torch.randn(6, 7, generator=generator(1)).double()
    sigma = torch.rand(6, 7, generator=generator(2)).double() + 0.1
    found = divergence(mu, sigma)
    torch.testing.assert_close(found, kl_divergence(Normal(mu, sigma), Normal(0.0, 1.0)).sum(1))
    for row, value in enumerate(found):
        terms = [
            m**2 + s**2 - 1 - math.log(s**2)
            for m, s in zip(mu[row].tolist(), sigma[row].tolist(), strict=True)
        ]
        assert float(value) == pytest.approx(0.5 * sum(terms))


def test_a_standard_normal_has_no_divergence() -> None:
    assert torch.equal(divergence(torch.zeros(2, 3), torch.ones(2, 3)), torch.zeros(2))


@pytest.mark.parametrize("shape", [(12,), (3, 4), (3, 2, 2)])
def test_features_keep_their_shape_and_come_from_mu_plus_sigma_eps(shape: tuple[int, ...]) -> None:
    model = Bottleneck(12, 5, 1e-3).double()
    features, eps = (
        torch.rand(4, *shape, generator=generator(0)).double(),
        torch.randn(4, 5, generator=generator(1)).double(),
    )
    with given(model, {"draw": eps}):
        decoded, penalty = model(features)
    mu, raw = model.encoder(features.flatten(1)).split(5, 1)
    sigma = torch.log1p(raw.exp())
    torch.testing.assert_close(decoded, model.decoder(mu + sigma * eps).view(4, *shape))
    torch.testing.assert_close(
        penalty, 1e-3 * kl_divergence(Normal(mu, sigma), Normal(0.0, 1.0)).sum(1)
    )


def test_in_bits_the_penalty_is_larger_by_one_over_ln_2() -> None:
    nats, bits = (
        Bottleneck(12, 5, 0.5, bits=flag).double()(images().flatten(1))[1] for flag in (False, True)
    )
    torch.testing.assert_close(bits, nats / math.log(2))


def test_weights_depend_on_the_seed_alone_and_torch_s_generator_stays_as_it_was() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (
        Bottleneck(4, 2, 1.0, seed=3),
        Bottleneck(4, 2, 1.0, seed=3),
        Bottleneck(4, 2, 1.0, seed=4),
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.encoder.weight, again.encoder.weight) and not torch.equal(
        first.encoder.weight, other.encoder.weight
    )


def test_each_bottleneck_adds_a_column_behind_the_logits() -> None:
    inner = Between().double()
    model = Penalized(inner)
    eps = {
        "inner.first.draw": torch.zeros(4, 5).double(),
        "inner.second.draw": torch.zeros(4, 3).double(),
    }
    with given(model, eps):
        answers = model(images())
        plain = inner(images())
        decoded, first = inner.first(images().flatten(1))
        _, second = inner.second(inner.layer(decoded))
    assert penalties(model) == 2 and penalties(inner) == 0 and len(bottlenecks(model)) == 2
    torch.testing.assert_close(answers, torch.cat([plain, first[:, None], second[:, None]], 1))


def test_nothing_stays_on_the_model_after_a_pass_even_one_that_failed() -> None:
    model = Penalized(Between()).double()
    state = {name: dict(module.__dict__) for name, module in model.named_modules()}
    model(images())
    with pytest.raises(RuntimeError):
        model(torch.rand(2, 5).double())
    for name, module in model.named_modules():
        assert module.__dict__.keys() == state[name].keys() and not module._forward_hooks


def test_under_vmap_it_equals_a_loop() -> None:
    model = Penalized(Between()).double()
    eps = {
        "inner.first.draw": torch.ones(1, 5).double(),
        "inner.second.draw": -torch.ones(1, 3).double(),
    }
    with given(model, eps):
        together = vmap(lambda one: model(one[None])[0])(images())
        torch.testing.assert_close(together, torch.cat([model(one[None]) for one in images()]))


def test_a_bottleneck_draws_anew_in_each_pass_in_either_mode() -> None:
    for model in (Penalized(Between()).double().train(), Penalized(Between()).double().eval()):
        assert not torch.equal(model(images()), model(images()))


def test_dropout_stays_on_in_eval_mode_and_rests_where_asked() -> None:
    model = nn.Sequential(AlwaysDropout(0.5), nn.BatchNorm1d(100)).eval()
    assert model[0].training and not model[1].training
    values = torch.ones(1, 100)
    assert bool((model[0](values) == 0).any())
    with at_rest(model):
        assert torch.equal(model[0](values), values)
    assert model[0].training
