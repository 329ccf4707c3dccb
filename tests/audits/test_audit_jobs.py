"""What an audit can be asked for, and what is refused before anything runs."""

from typing import Any

import pytest
import torch

from gradveil.attacks import GradientMatching, find
from gradveil.audits import AuditJob
from gradveil.audits.jobs import shortened
from gradveil.core import GradveilError
from gradveil.data import load
from gradveil.transforms import Policy, Preparation


def job(**changes: Any) -> AuditJob:
    settings: dict[str, Any] = {
        "data": "fashion-mnist-mini",
        "model": "lenet",
        "attacks": ("adam-cosine",),
        "images": 4,
    }
    return AuditJob(**(settings | changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"images": 0}, "images 0: it must be at least 1"),
        ({"first": -1}, "first -1: it must be at least 0"),
        ({"batch_size": 0}, "batch size 0: it must be at least 1"),
        ({"batch_size": 3}, "4 images in batches of 3: choose a multiple"),
        ({"victims_at_once": 0}, "victims at once 0: it must be at least 1"),
        ({"steps": 0}, "steps 0: it must be at least 1"),
        ({"labels": "guessed"}, "unknown labels 'guessed': choose from known, inferred"),
        ({"attacks": ()}, "no attack was named"),
        ({"attacks": ("nope",)}, "unknown attack 'nope': choose from adam-cosine"),
        ({"attacks": ("dlg", "dlg")}, "attack 'dlg' is named twice"),
        ({"attacks": (("../x", find("dlg")),)}, "attack name '../x': files are named after it"),
        (
            {"attacks": ("closed-form",), "steps": 3},
            "steps 3: none of closed-form has such a setting",
        ),
    ],
)
def test_bad_settings_are_named_in_one_line(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(GradveilError) as caught:
        job(**changes)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_steps_and_restarts_reach_the_attacks_that_have_them() -> None:
    found = job(attacks=("adam-cosine", "closed-form"), steps=7, restarts=2).find_attacks()
    changed = found["adam-cosine"]
    assert isinstance(changed, GradientMatching) and (changed.steps, changed.restarts) == (7, 2)
    assert found["closed-form"] is find("closed-form")


def test_a_trial_takes_one_step() -> None:
    tried = shortened(find("lbfgs-cosine"))
    assert isinstance(tried, GradientMatching) and (tried.steps, tried.restarts) == (1, 1)
    assert shortened(find("closed-form")) is find("closed-form")


def test_the_device_decides_the_chunks_only_where_the_job_does_not() -> None:
    assert (
        job().on(torch.device("cpu")).victims_at_once == 16
        and job().on(torch.device("cuda")).victims_at_once == 100
    )
    assert job(victims_at_once=3).on(torch.device("cuda")).victims_at_once == 3


def test_without_a_policy_images_are_used_as_they_are() -> None:
    assert job().preparation() is None and job(defense="prune:0.9").preparation() is None


@pytest.mark.parametrize(
    "changes",
    [{"policy": Policy.parse("3-1-7")}, {"defense": "3-1-7"}, {"defense": "3-1-7,then,prune:0.5"}],
)
def test_candidates_are_prepared_as_published_by_crop_flip_and_policy(
    changes: dict[str, Any],
) -> None:
    prepare, pixels = job(**changes).preparation(), load("fashion-mnist-mini", "test").images[:50]
    assert prepare is not None
    expected = Preparation(policy=Policy.parse("3-1-7"))(pixels, torch.Generator().manual_seed(1))
    assert torch.equal(prepare(pixels, torch.Generator().manual_seed(1)), expected)


def test_a_policy_is_the_same_audit_however_it_is_given() -> None:
    assert job(policy=Policy.parse("3-1-7")).settings() == job(defense="3-1-7").settings()
    chained = job(defense="3-1-7,then,prune:0.5").settings()
    assert (chained["policy"], chained["defense"]) == ("none", "3-1-7,then,prune:0.5")


def test_a_policy_beside_a_defense_is_refused() -> None:
    with pytest.raises(
        GradveilError, match=r"policy 3-1-7 and defense prune:0\.5: give one of them"
    ):
        job(policy=Policy.parse("3-1-7"), defense="prune:0.5")


def test_auto_may_leave_out_its_own_attacks_and_no_named_one() -> None:
    both = job(attacks=("auto", "dlg"), defense="prune:0.9")
    assert list(both.find_attacks()) == ["adam-cosine", "masked", "closed-form", "dlg"]
    assert both.optional() == {"adam-cosine", "masked", "closed-form"}
    assert job(attacks=("dlg",)).optional() == set() and job(
        attacks=("dlg",), fitting=True
    ).optional() == {"dlg"}
    assert list(job(attacks=("auto",), defense="prune:0.9", clean=True).find_attacks()) == [
        "adam-cosine",
        "closed-form",
    ]
