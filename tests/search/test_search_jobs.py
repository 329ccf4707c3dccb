"""What a search may be asked for, and which images it looks at."""

from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from gradveil.attacks import find
from gradveil.core.errors import GradveilError
from gradveil.search.job import SearchJob
from gradveil.search.setup import choose_images, in_turn


def test_the_published_search_is_the_papers() -> None:
    job = SearchJob.as_published(data="cifar100", model="resnet20-4")
    assert (job.score, job.rule, job.sampler, job.race) == ("privacy", "code", "random", False)
    assert (job.trials, job.keep, job.threshold, job.objective) == (1500, 10, -85.0, "privacy")


@pytest.mark.parametrize(
    "other", [{"score": "probe"}, {"sampler": "tpe"}, {"race": True}, {"rule": "paper"}]
)
def test_the_published_search_cannot_be_another(other: dict[str, Any]) -> None:
    with pytest.raises(GradveilError, match="the published search has"):
        SearchJob.as_published(data="cifar100", model="resnet20-4", **other)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"trials": 0}, "trials 0: it must be at least 1"),
        ({"keep": 0}, "keep 0: it must be at least 1"),
        ({"trials": 5, "keep": 6}, "as are drawn; give a keep of 5 or less"),
        ({"threshold": float("nan")}, "threshold nan"),
        ({"score": "guess"}, "unknown score 'guess': choose from privacy, probe"),
        ({"rule": "law"}, "unknown rule 'law': choose from code, paper"),
        ({"rank_by": "psnr"}, "unknown rank by 'psnr': choose from ssim, over_blind, lineup"),
        (
            {"score": "privacy", "rank_by": "lineup"},
            "rank by lineup: score privacy is ranked by S_pri",
        ),
        ({"score": "probe", "rule": "paper"}, "rule paper: score probe is not S_pri"),
        ({"race": False, "race_confidence": 0.9}, "race confidence 0.9: there is no race"),
        ({"sampler": "grid"}, "unknown sampler 'grid': choose from random, tpe, nsga2"),
        ({"attack": "dlg"}, "attack: a text; expected an Attack"),
        ({"attack": find("dlg"), "attack_name": "../dlg"}, "attack name '../dlg'"),
        ({"data": [1, 2]}, "data of type list: give the name of a data set"),
        ({"data": (1, 2)}, "data of type tuple: give the name of a data set"),
        ({"model": 3}, "model: a whole number; expected a torch.nn.Module or its name"),
        ({"race": True, "sampler": "nsga2"}, "race with sampler nsga2"),
        ({"race_confidence": 1.0}, "race confidence 1.0"),
        ({"images": 1}, "images 1: it must be at least 2"),
        ({"probe_steps": 0}, "probe steps 0"),
        ({"hybrid": 1}, "hybrid 1: it must be at least 2"),
        ({"at_once": 0}, "at once 0"),
        ({"audit_steps": 0}, "audit steps 0"),
        (
            {"attack": find("closed-form"), "audit_steps": 5},
            "audit steps 5: attack closed-form has no such setting",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes: dict[str, Any], says: str) -> None:
    settings = {"data": "fashion-mnist-mini", "model": "lenet"} | changes
    assert says in toys.refused(SearchJob, **settings)


def test_settings_are_plain_and_say_what_decides_the_result() -> None:
    job = SearchJob(data="d", model="m", checkpoint=Path("c.safetensors"), race=True)
    settings = job.settings()
    assert (
        settings["checkpoint"] == "c.safetensors"
        and settings["at_once"] == 50
        and settings["race"] is True
    )
    assert (
        SearchJob(data="d", model="m").settings()["at_once"] is None
    )  # without a race random policies may be scored in any groups


def test_a_large_split_gives_the_published_images() -> None:
    chosen = choose_images(10_000, None, 100, "cifar100 test")
    assert (
        chosen.leak == tuple(range(200, 700, 5))
        and chosen.accuracy == tuple(range(200, 1200))
        and not chosen.notes
    )


@pytest.mark.parametrize(
    ("size", "wanted", "leak", "accuracy"),
    [
        (10_000, None, range(200, 700, 5), range(200, 1200)),
        (1_200, None, range(200, 700, 5), range(200, 1200)),
        (500, None, range(200, 500, 3), range(200, 500)),
        (500, 8, range(200, 240, 5), range(200, 500)),
        (500, 300, range(200, 500), range(200, 500)),
        (307, None, range(200, 300), range(200, 300)),
        (250, None, range(200, 250), range(200, 250)),
        (220, None, range(200, 220), range(200, 220)),
    ],
)
def test_a_smaller_split_gives_closer_images_and_smaller_batches(
    size: int, wanted: int | None, leak: range, accuracy: range
) -> None:
    chosen = choose_images(size, wanted, 100, "d test")
    assert chosen.leak == tuple(leak) and chosen.accuracy == tuple(accuracy)
    assert max(*chosen.leak, *chosen.accuracy) < size and min(*chosen.leak, *chosen.accuracy) == 200
    assert len(chosen.notes) == (len(leak) < 100) + (len(accuracy) < 1000)


def test_a_split_that_ends_before_the_usual_images_is_halved() -> None:
    chosen = choose_images(182, 4, 100, "d test")
    assert chosen.leak == (91, 96, 101, 106) and chosen.accuracy == tuple(range(91, 181))


def test_of_a_split_that_is_sorted_by_class_all_classes_are_scored() -> None:
    labels = torch.tensor([0] * 30 + [1] * 10 + [2] * 20)
    chosen = choose_images(60, 6, 100, "d test").of_order(in_turn(labels))
    assert labels[list(chosen.accuracy)].bincount().tolist() == [15, 5, 10]
    assert labels[list(chosen.leak)].unique().tolist() == [0, 1, 2]
    assert in_turn(labels).sort().values.tolist() == list(range(60))
    mixed = torch.tensor([1, 0, 2, 1])
    assert in_turn(mixed).tolist() == [0, 1, 2, 3]


def test_what_is_less_than_usual_is_said() -> None:
    fewer, smaller = choose_images(500, 8, 64, "mini test").notes
    assert fewer == "leakage was scored on 8 images instead of 64: the ranking is less sure"
    assert (
        smaller
        == "mini test has 500 images: accuracy was scored on 10 batches of 30 images instead of 100"
    )


@pytest.mark.parametrize(
    ("size", "wanted", "says"),
    [
        (38, None, "d test has 38 images: scores need 20, and the audits others; give at least 39"),
        (150, 76, "images 76: d test has 75 from image 75 on"),
        (500, 301, "images 301: d test has 300 from image 200 on"),
    ],
)
def test_a_split_that_is_too_small_is_refused(size: int, wanted: int | None, says: str) -> None:
    with pytest.raises(GradveilError, match=says):
        choose_images(size, wanted, 100, "d test")
