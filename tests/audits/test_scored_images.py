"""An audit draws its victims from images that the search of its defenses has not scored."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import toys
from gradveil.assessment import assess
from gradveil.attacks.attack_files import SHORT, image_digest, short_digest
from gradveil.audits import AuditResult, audit
from gradveil.audits.victims import find_scored, find_victims
from gradveil.core.errors import GradveilWarning
from gradveil.data import Images, load
from gradveil.defenses import Defense, PolicyDefense, Pruning, chain, parse
from gradveil.report.audit import audit_in_words
from gradveil.transforms import Policy

QUICK: dict[str, Any] = {
    "control": False,
    "attacks": ["closed-form"],
    "sham": False,
    "progress": False,
}


@pytest.fixture(scope="module")
def split() -> Images:
    return load("fashion-mnist-mini", "test")


@pytest.fixture(scope="module")
def searched(split: Images) -> Policy:
    """A policy as a search of the embedded images leaves it: it scores those from 200 on."""
    return scored_on(split, range(200, 500))


def scored_on(split: Images, numbers: range) -> Policy:
    digests = tuple(short_digest(split.images[number]) for number in numbers)
    return replace(Policy.parse("3-1-7"), scored_on=digests)


def linear() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))


def attacked(result: AuditResult) -> list[list[int]]:
    """Return the numbers of the images attacked in each case."""
    return [sorted({record.image for record in case.of("attack")}) for case in result.cases]


def test_victims_are_images_that_the_search_has_not_scored_and_the_same_in_every_case(
    split: Images, searched: Policy
) -> None:
    usual = find_victims(split, 16, 1, None, 0).numbers
    assert int((usual >= 200).sum()) >= 5  # else this could not fail
    result = audit(linear(), "fashion-mnist-mini", defenses=["none", searched], victims=16, **QUICK)
    plain, defended = attacked(result)
    assert plain == defended and len(plain) == 16 and max(plain) < 200
    assert result.settings["scored"] == 300
    assert "None of them is among the 300 that the search of a defense has scored." in (
        audit_in_words(result)
    )


def test_without_scored_images_among_them_victims_and_settings_stay_as_they_were(
    split: Images, tmp_path: Path
) -> None:
    usual = sorted(find_victims(split, 6, 1, None, 0).numbers.tolist())
    result = audit(
        linear(), "fashion-mnist-mini", defenses=["3-1-7"], victims=6, out=tmp_path, **QUICK
    )
    assert attacked(result) == [usual]
    written = [*tmp_path.glob("settings.json"), *tmp_path.glob("*/settings.json")]
    assert len(written) == 2 and not any('scored"' in path.read_text() for path in written)
    elsewhere = replace(Policy.parse("3-1-7"), scored_on=("0" * SHORT,))
    result = audit(linear(), "fashion-mnist-mini", defenses=[elsewhere], victims=6, **QUICK)
    assert attacked(result) == [usual]


def test_too_few_images_that_were_not_scored_are_one_line_and_nothing_is_written(
    searched: Policy, tmp_path: Path
) -> None:
    asked = {"defenses": [searched], "out": tmp_path / "run", **QUICK}
    said = toys.refused(audit, linear(), "fashion-mnist-mini", victims=201, **asked)
    assert said == (
        "images 201: fashion-mnist-mini test has 200 that the search of the defense has not "
        "scored; choose at most 200, or other images; those from `first` on are attacked whatever "
        "was scored"
    )
    assert not (tmp_path / "run").exists()


def test_images_that_were_all_scored_are_refused_as_such(split: Images) -> None:
    few = split.select(range(4))
    said = toys.refused(audit, linear(), few, defenses=[scored_on(split, range(4))], **QUICK)
    assert "has 0 that the search of the defense has not scored; choose other images;" in said


def test_first_takes_scored_images_with_a_warning_that_stays(
    searched: Policy, tmp_path: Path
) -> None:
    asked = {"defenses": ["none", searched], "victims": 4, "out": tmp_path / "run", **QUICK}
    with pytest.warns(GradveilWarning, match="3 of the 4 images attacked were used by the search"):
        result = audit(linear(), "fashion-mnist-mini", first=199, **asked)
    assert attacked(result) == [[199, 200, 201, 202]] * 2
    for case in result.cases:
        kept = json.loads((case.out / "settings.json").read_text())
        assert (kept["scored"], kept["victims_scored"]) == (300, 3)
    assert any(
        line.startswith("Warning: 3 of the 4 images attacked were used by the search that chose")
        for line in audit_in_words(result)
    )
    again = audit(linear(), "fashion-mnist-mini", first=199, **asked)  # done: nothing to warn of
    assert attacked(again) == attacked(result)
    other = {**asked, "out": tmp_path / "other"}
    free = audit(linear(), "fashion-mnist-mini", first=196, **other)
    assert "victims_scored" not in free.cases[0].settings


def test_a_defense_tells_the_images_it_was_scored_on_through_chains_and_changes(
    searched: Policy,
) -> None:
    defense = PolicyDefense(searched)
    for made in (
        chain([defense, Pruning(0.9)]),
        chain([defense, Pruning(0.9)]).without_gradients(),
        defense.without_augmentation(),
    ):
        assert made.scored_on == searched.scored_on
    assert Defense().scored_on == parse("prune:0.9").scored_on == parse("random").scored_on == ()
    plain = Policy.parse("3-1-7")
    assert searched == plain and repr(searched) == repr(plain) and str(defense) == "3-1-7"


def test_images_are_found_by_pixels_and_shape_whatever_their_number(split: Images) -> None:
    turned = split.select(range(9, -1, -1))
    digests = {short_digest(split.images[number]) for number in (2, 7)}
    assert find_scored(turned, digests) == (2, 7)
    assert find_scored(turned.select(range(5)), digests) == (2,)
    assert find_scored(turned, frozenset()) == ()
    flat = split.images[2].view(1, 14, 56)
    assert short_digest(flat) not in digests and len(short_digest(flat)) == SHORT
    assert image_digest(flat).startswith(short_digest(flat))


def test_an_assessment_refuses_too_few_images_before_it_trains(
    searched: Policy, tmp_path: Path
) -> None:
    said = toys.refused(
        assess,
        linear(),
        "fashion-mnist-mini",
        defenses=[searched],
        victims=201,
        out=tmp_path / "run",
        progress=False,
    )
    assert "has 200 that the search of the defense has not scored" in said
    assert not (tmp_path / "run").exists()
