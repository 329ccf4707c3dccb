"""Candidates: the true image is among them, all were prepared alike, and the chance is that of a guess by label."""

import pytest
import torch
from torch import Tensor

from gradveil.audits.guesses import blind_attacks, class_means
from gradveil.audits.pools import make_pool
from gradveil.core import GradveilError
from gradveil.data import Images, load
from gradveil.scores import identify
from gradveil.transforms import Policy, Preparation


@pytest.fixture(scope="module")
def split() -> Images:
    return load("fashion-mnist-mini", "test")


@pytest.fixture(scope="module")
def means() -> Tensor:
    return class_means(load("fashion-mnist-mini"))[0]


def test_victims_come_first_and_nothing_comes_twice(split: Images, means: Tensor) -> None:
    victims = torch.arange(100, 108)
    pool = make_pool(split, victims, None, means, 1, seed=0)
    assert torch.equal(pool.indices[:8], victims) and len(pool) == len(split) == len(
        set(pool.indices.tolist())
    )


def test_a_reconstruction_that_is_the_used_image_is_identified(
    split: Images, means: Tensor
) -> None:
    prepare = Preparation(policy=Policy.parse("3-1-7"))
    victims = torch.arange(20)
    pool = make_pool(split, victims, prepare, means, 1, seed=0)
    used = prepare(split.images[victims], torch.Generator().manual_seed(9)).float() / 255
    assert not torch.equal(used, pool.candidates["used"][:20])
    assert pool.identified("used", used, victims, used).sum() == 20
    noise = torch.rand(20, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    assert pool.identified("used", noise, victims, used).sum() <= 1


def test_without_a_policy_used_and_original_candidates_are_the_same(
    split: Images, means: Tensor
) -> None:
    pool = make_pool(split, torch.arange(4), None, means, 1, seed=0)
    assert (
        torch.equal(pool.candidates["used"], pool.candidates["original"])
        and pool.chance["used"] == pool.chance["original"]
    )


def test_the_chance_is_what_the_class_mean_reaches_and_grows_with_the_batch(
    split: Images, means: Tensor
) -> None:
    everything = torch.arange(len(split))
    reached = float(identify(means[split.labels], split.images.float() / 255, everything).mean())
    assert reached > 2 / len(split)  # so chance alone would be too low a bar
    assert make_pool(split, torch.arange(4), None, means, 1, seed=0).chance[
        "original"
    ] == pytest.approx(reached)
    assert make_pool(split, torch.arange(4), None, means, 4, seed=0).chance[
        "original"
    ] == pytest.approx(4 * reached)


def test_one_image_has_nothing_to_be_told_from(split: Images, means: Tensor) -> None:
    with pytest.raises(GradveilError, match="has 1 image: identification needs at least two"):
        make_pool(split.select([0]), torch.arange(1), None, means, 1, seed=0)


def test_class_means_are_means_and_an_absent_class_gets_the_mean_of_all() -> None:
    train = load("fashion-mnist-mini").select(list(range(0, 40, 2)))  # even classes alone
    means, color = class_means(train)
    images = train.images.double() / 255
    torch.testing.assert_close(means[2], images[train.labels == 2].mean(0).float())
    torch.testing.assert_close(means[3], images.mean(0).float())
    torch.testing.assert_close(color, images.mean().float().expand(1, 28, 28))
    assert list(blind_attacks(means, color)) == [
        "blind: noise",
        "blind: gray",
        "blind: mean color",
        "blind: class mean",
    ]
