"""The policies that are drawn, and the front of two objectives."""

import math
from collections import Counter
from pathlib import Path
from types import ModuleType

import torch

from gradveil.search.loop import front
from gradveil.search.space import CHOICES, EMPTY, SLOTS, FinishedTrial, draw, policy_of
from gradveil.transforms import Policy


def test_a_drawn_policy_depends_on_the_seed_and_the_number_alone() -> None:
    first = [draw(3, number) for number in range(50)]
    assert [draw(3, number) for number in reversed(range(50))] == first[::-1]
    assert [draw(4, number) for number in range(50)] != first


def test_all_functions_and_the_empty_slot_are_equally_likely_in_every_slot() -> None:
    drawn = [draw(0, number) for number in range(5100)]
    for slot in SLOTS:
        counts = Counter(slots[slot] for slots in drawn)
        assert counts.keys() == set(CHOICES) and len(CHOICES) == 51
        assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 50 + 4 * math.sqrt(
            2 * 50
        )  # chi-squared, 50 degrees


def test_empty_slots_are_left_out_of_a_policy() -> None:
    assert policy_of(dict(zip(SLOTS, ("3", EMPTY, "7"), strict=True))) == Policy.parse("3-7")
    assert str(policy_of(dict.fromkeys(SLOTS, EMPTY))) == "none"


def outcome(number: int, privacy: float, accuracy: float) -> FinishedTrial[Policy]:
    return FinishedTrial(
        number, Policy(), "scored", {"privacy": (privacy - 1, privacy + 1), "accuracy": (accuracy,)}
    )


def test_the_front_holds_exactly_those_that_no_other_beats() -> None:
    points = (
        torch.randint(0, 12, (80, 2), generator=torch.Generator().manual_seed(0)).double().tolist()
    )
    trials = [outcome(number, *point) for number, point in enumerate(points)]
    beaten = {
        mine
        for mine, (low, high) in enumerate(points)
        if any(a <= low and b >= high and (a, b) != (low, high) for a, b in map(tuple, points))
    }
    found = front(trials)
    assert {trial.number for trial in found} == set(range(80)) - beaten
    assert [trial.mean("privacy") for trial in found] == sorted(
        trial.mean("privacy") for trial in found
    )


def test_trials_without_both_finite_values_are_not_on_the_front() -> None:
    half = FinishedTrial(1, Policy(), "dropped", {"privacy": (-9.0,)})
    assert front([half, outcome(2, math.nan, 5), outcome(3, -math.inf, 5), outcome(4, 1, 1)]) == [
        outcome(4, 1, 1)
    ]


def test_tpe_comes_back_to_what_scored_well(searching: ModuleType, tmp_path: Path) -> None:
    study = searching.join(tmp_path / "study.log", "tpe")
    while trials := study.claim(10, 120):
        for trial in trials:
            good = sum(transform.index in (3, 15) for transform in trial.tried.members[0])
            study.finish(trial, "scored", {"privacy": [-good]})
    late = [
        transform.index
        for trial in study.finished(120)[60:]
        for transform in trial.tried.members[0]
    ]
    study.close()
    assert sum(index in (3, 15) for index in late) / len(late) > 3 * 2 / 50


def test_nsga2_breeds_from_the_front(searching: ModuleType, tmp_path: Path) -> None:
    study = searching.join(tmp_path / "study.log", "nsga2")
    while trials := study.claim(25, 150):
        for trial in trials:
            indices = [transform.index or 0 for transform in trial.tried.members[0]]
            study.finish(
                trial,
                "scored",
                {"privacy": [-float(sum(indices))], "accuracy": [float(-len(indices))]},
            )
    finished = study.finished(150)
    study.close()
    early, late = (
        [trial.mean("privacy") for trial in part] for part in (finished[:50], finished[100:])
    )
    assert sum(late) / 50 < sum(early) / 50 - 10
