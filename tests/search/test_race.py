"""The race's test against scipy's, its error and power, and whole races of made-up policies."""

import pytest
import torch
from scipy.stats import ttest_rel
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.scores.scorer import image_blocks
from gradveil.search.trials import worse

KEEP = 10


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "race"), dtype=torch.float64)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("images", [5, 10, 40])
def test_a_policy_is_worse_where_scipys_paired_test_says_so(images: int, confidence: float) -> None:
    rival = normal(images, seed=1)
    values = rival + 0.5 * normal(60, images) + torch.linspace(-1, 1, 60)[:, None]
    expected = [
        float(ttest_rel(one, rival, alternative="greater").pvalue) < 1 - confidence
        for one in values
    ]
    assert worse(values, rival, confidence).tolist() == expected
    assert 0 < sum(expected) < 60


@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_equal_policies_are_called_worse_as_rarely_as_the_confidence_says(
    confidence: float,
) -> None:
    count = 40_000
    for images in (5, 20):
        pairs = normal(2, count, images, seed=images)
        share = float(worse(pairs[0] - pairs[1], torch.zeros(images), confidence).double().mean())
        error = (confidence * (1 - confidence) / count) ** 0.5
        assert abs(share - (1 - confidence)) < 4 * error


def test_a_policy_worse_by_one_spread_is_nearly_always_seen_after_forty_images() -> None:
    rival = normal(40, seed=1)
    values = rival + 1 + normal(1_000, 40)
    assert float(worse(values, rival, 0.99).double().mean()) > 0.99
    assert not worse(rival - 1 + normal(1_000, 40), rival, 0.99).any()


def test_what_all_images_share_does_not_blur_a_difference() -> None:
    rival = 100 * normal(10, seed=1)
    values = rival + 0.1 + 0.01 * normal(1, 10)
    assert worse(values, rival, 0.999).tolist() == [True]


def test_constant_differences_decide_by_their_sign() -> None:
    rival = torch.arange(8.0)
    assert worse(torch.stack([rival + 0.5, rival, rival - 0.5]), rival, 0.999).tolist() == [
        True,
        False,
        False,
    ]


def test_fewer_than_five_images_drop_nothing() -> None:
    rival = torch.zeros(4)
    assert worse(torch.full((3, 4), 100.0), rival, 0.5).tolist() == [False] * 3
    assert worse(torch.zeros(3, 0), torch.zeros(0), 0.5).tolist() == [False] * 3


def test_no_policies_give_no_answers() -> None:
    assert worse(torch.zeros(0, 20), torch.zeros(20), 0.99).shape == (0,)


def test_bad_shapes_and_confidences_are_refused() -> None:
    with pytest.raises(GradveilError, match=r"values of shape \(2, 6\) and a rival of \(5,\)"):
        worse(torch.zeros(2, 6), torch.zeros(5), 0.9)
    for confidence in (0.4, 1.0, float("nan")):
        with pytest.raises(GradveilError, match=f"confidence {confidence}: choose"):
            worse(torch.zeros(2, 6), torch.zeros(6), confidence)


@pytest.mark.parametrize(
    ("confidence", "seeds", "least", "saving"), [(0.99, 20, 18, 0.68), (0.999, 50, 50, 0.57)]
)
def test_a_race_of_1500_policies_ends_with_the_ten_of_a_whole_scoring(
    confidence: float, seeds: int, least: int, saving: float
) -> None:
    """An image's spread about its policy's mean is twice that of the means: column 2 of the table
    in `gradveil.search.loop`."""
    saved, same = [], 0
    for seed in range(seeds):
        values = (
            normal(1_500, 1, seed=seed)
            + 3 * normal(1, 100, seed=1_000 + seed)
            + 2 * normal(1_500, 100, seed=2_000 + seed)
        )
        found, work = race(values, confidence)
        same += set(found) == set(values.mean(1).argsort()[:KEEP].tolist())
        saved.append(1 - work / values.numel())
    assert same >= least
    assert sum(saved) / len(saved) == pytest.approx(saving, abs=0.02)


def race(values: Tensor, confidence: float, at_once: int = 25) -> tuple[list[int], int]:
    """The ten best of (policies, images), and how many values were asked for.

    Policies come some at a time, as in a search.
    """
    whole, work, means = torch.empty(0, dtype=torch.long), 0, values.mean(1)
    for some in torch.arange(len(values)).split(at_once):
        rival = values[whole[means[whole].argsort()[KEEP - 1]]] if len(whole) >= KEEP else None
        seen, alive = 0, some
        for size in image_blocks(values.shape[1]):
            if rival is not None and seen:
                alive = alive[~worse(values[alive, :seen], rival[:seen], confidence)]
            seen += size
            work += size * len(alive)
        whole = torch.cat([whole, alive])
    return whole[means[whole].argsort()[:KEEP]].tolist(), work
