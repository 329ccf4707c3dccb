"""A grid: one audit for each defence, every attacker told what it may know, resumed anywhere, with its models' accuracies."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradveil.audits import AuditJob, AuditResult, GridJob, GridResult, audit, grid, grids, runs
from gradveil.audits.folders import images_path, load_images
from gradveil.audits.weights import Trained, measured, trained
from gradveil.core import GradveilError
from gradveil.data import load
from gradveil.defenses import parse
from gradveil.models import build
from gradveil.models.checkpoints import save_checkpoint
from gradveil.transforms import Policy

DEFENSES = ("none", "prune:0.95", "precode:k=16", "3-1-7")


@pytest.fixture(scope="module")
def base(nets: str) -> AuditJob:
    return AuditJob(
        "fashion-mnist-mini",
        f"{nets}:linear",
        ("auto",),
        3,
        steps=4,
        restarts=2,
        victims_at_once=2,
        seed=3,
    )


@pytest.fixture(scope="module")
def job(base: AuditJob) -> GridJob:
    return GridJob(base, DEFENSES, {}, {}, clean="both")


@pytest.fixture(scope="module")
def whole(job: GridJob, tmp_path_factory: pytest.TempPathFactory) -> GridResult:
    return grid(job, tmp_path_factory.mktemp("grid") / "run", progress=False)


def part(result: GridResult, defense: str, clean: bool = False) -> AuditResult:
    (found,) = (
        one.audit for one in result.parts if (one.case.defense, one.case.clean) == (defense, clean)
    )
    return found


def test_each_defense_meets_the_standard_attack_and_its_own_breakers(whole: GridResult) -> None:
    attacks = {one.case.folder: set(one.audit.settings["attacks"]) for one in whole.parts}
    policy = {"early-step", "transform-known", "transform-drawn", "transform-guessed", "class-mean"}
    standard = {"adam-cosine", "closed-form"}
    assert attacks == {
        "none": standard,
        "prune-0.95-clean": standard,
        "prune-0.95": standard | {"masked"},
        "precode-k-16": standard | {"joint-noise"},
        "3-1-7": standard | policy,
    }
    assert {folder.name for folder in whole.out.iterdir()} == {*attacks, "settings.json"}


def test_attacks_that_do_not_suit_are_left_out_with_the_reason(whole: GridResult) -> None:
    left = part(whole, "precode:k=16").settings["left_out"]
    assert set(left) == {"without-random-layers"}  # the bottleneck comes first in this model
    assert "leave no parameter to match" in left["without-random-layers"]
    assert part(whole, "none").settings["left_out"] == {}


def test_the_strongest_attack_is_the_one_that_identifies_most_then_that_with_most_decibels(
    whole: GridResult,
) -> None:
    strongest = {one.case.defense: one.audit.strongest for one in whole.parts if not one.case.clean}
    assert strongest["none"].attack == "closed-form" and strongest["none"].identified == 3
    assert (strongest["3-1-7"].attack, strongest["3-1-7"].truth) == ("closed-form", "used")
    rows = [
        row
        for row in part(whole, "prune:0.95").rows
        if row.kind == "attack" and row.truth == "used"
    ]
    assert strongest["prune:0.95"].identified == max(row.identified for row in rows)


def test_the_clean_gradient_is_that_of_no_defense(whole: GridResult) -> None:
    clean, none, pruned = (
        part(whole, "prune:0.95", True),
        part(whole, "none"),
        part(whole, "prune:0.95"),
    )
    scores = [
        [record.scores for record in one.of("attack", "closed-form")]
        for one in (clean, none, pruned)
    ]
    assert scores[0] == scores[1] != scores[2]


def test_one_part_alone_has_positive_controls_and_all_have_blind_ones(whole: GridResult) -> None:
    assert [bool(one.audit.of("positive")) for one in whole.parts] == [
        True,
        False,
        False,
        False,
        False,
    ]
    assert all(len({record.attack for record in one.audit.of("blind")}) == 4 for one in whole.parts)


def test_a_policy_as_a_defense_shares_what_it_shares_as_a_policy(
    base: AuditJob, whole: GridResult, tmp_path: Path
) -> None:
    plain = audit(
        replace(
            base, attacks=("closed-form",), steps=None, restarts=None, policy=Policy.parse("3-1-7")
        ),
        tmp_path / "run",
        progress=False,
    )
    ours, theirs = (
        load_images(images_path(one.out, "attack", "closed-form", 0))[0]
        for one in (part(whole, "3-1-7"), plain)
    )
    assert torch.equal(ours["used"], theirs["used"]) and torch.equal(ours["found"], theirs["found"])


def test_a_grid_that_is_done_is_read_back(job: GridJob, whole: GridResult) -> None:
    assert grid(job, whole.out, progress=False) == whole == GridResult.read(whole.out)


def test_a_grid_killed_between_its_audits_goes_on_to_the_same_records(
    base: AuditJob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    without_times: Callable[[Any], list[Any]],
    guess: Any,
) -> None:
    quick = GridJob(
        replace(base, attacks=(("guess", guess()),), steps=None, restarts=None),
        ("none", "prune:0.5", "3"),
        {},
        {},
        clean="both",
    )
    expected = grid(quick, tmp_path / "whole", progress=False)
    run, calls = runs.run_audit, []

    def killed(*given: Any) -> AuditResult:
        calls.append(given)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return run(*given)

    with monkeypatch.context() as patch:
        patch.setattr(grids, "run_audit", killed)
        with pytest.raises(KeyboardInterrupt):
            grid(quick, tmp_path / "again", progress=False)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "again").glob("*/records.jsonl")}
    assert len(times) == 2
    again = grid(quick, tmp_path / "again", progress=False)
    assert [without_times(one.audit.records) for one in again.parts] == [
        without_times(one.audit.records) for one in expected.parts
    ]
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())


@pytest.mark.parametrize(
    ("defense", "changes", "says"),
    [
        ("precode:k=4,position=nowhere", {}, "unknown position of defense precode"),
        ("dp:norm=1,multiplier=1", {"model": "resnet20-4"}, "GroupNorm"),
        ("prune:0.5", {"attacks": ("masked-rounds",), "restarts": None}, "no attack suits it"),
        ("prune:0.5", {"images": 501}, "has 500"),
    ],
)
def test_what_cannot_be_audited_is_said_before_anything_is_written(
    base: AuditJob, tmp_path: Path, defense: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(GradveilError) as caught:
        grid(
            GridJob(replace(base, **changes), ("none", defense), {}, {}),
            tmp_path / "run",
            progress=False,
        )
    assert says in str(caught.value) and not (tmp_path / "run").exists()


def test_another_grid_in_the_folder_is_refused(
    job: GridJob, whole: GridResult, tmp_path: Path, base: AuditJob
) -> None:
    with pytest.raises(GradveilError, match="holds a grid of audits with other settings"):
        grid(replace(job, defenses=("none",)), whole.out, progress=False)
    single = replace(base, attacks=("closed-form",), steps=None, restarts=None)
    out = audit(single, tmp_path / "single", progress=False).out
    with pytest.raises(GradveilError, match="holds an audit, no grid of audits"):
        GridResult.read(out)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plain mlp-like lenet, the same as PRECODE protects it, and one that says nothing of its training."""
    folder = tmp_path_factory.mktemp("weights")
    plain = build("lenet", channels=1, size=28, classes=10, seed=5)
    facts = {"data": "fashion-mnist-mini", "model": "lenet", "image_size": 28, "policy": "none"}
    protected = parse("precode:k=8,seed=7").protect_model(plain, (1, 28, 28))
    save_checkpoint(
        folder / "plain.safetensors",
        plain,
        facts | {"defense": "none", "test_accuracy": 0.8, "step": 40},
    )
    save_checkpoint(
        folder / "precode.safetensors",
        protected,
        facts | {"defense": "precode:k=8", "test_accuracy": 0.7},
    )
    save_checkpoint(folder / "silent.safetensors", plain, {})
    return {name: folder / f"{name}.safetensors" for name in ("plain", "precode", "silent")}


def test_a_checkpoint_of_the_protected_model_is_audited_as_it_is(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    small = AuditJob("fashion-mnist-mini", "lenet", ("adam-cosine",), 1, steps=1)
    by_defense = {"": checkpoints["plain"], "precode:k=8": checkpoints["precode"]}
    result = grid(
        GridJob(small, ("none", "precode:k=8", "prune:0.5", "precode:k=4"), by_defense, {}),
        tmp_path / "run",
        progress=False,
    )
    none, trained_so, pruned, added = result.parts
    assert [one.audit.settings["protected"] for one in result.parts] == [False, True, False, False]
    assert none.own == Trained(0.8, 500, "none", 40) and result.baselines == {None: none.trained}
    assert trained_so.own == Trained(0.7, 500, "precode:k=8", None)
    assert pruned.trained == none.trained and pruned.own is None  # it was not trained under pruning
    assert added.trained is None  # the bottleneck is untrained
    assert json.loads(json.dumps(result.plain()))[1]["trained"]["accuracy"] == 0.7


def test_a_model_with_a_defense_in_it_is_not_taken_for_a_plain_one(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    small = AuditJob(
        "fashion-mnist-mini",
        "lenet",
        ("adam-cosine",),
        1,
        steps=1,
        checkpoint=checkpoints["precode"],
        defense="prune:0.5",
    )
    with pytest.raises(
        GradveilError,
        match="was trained under precode:k=8, a part of the model: audit it with that defense",
    ):
        audit(small, tmp_path / "run", progress=False)
    other = replace(small, defense="precode:k=9")
    with pytest.raises(GradveilError, match="does not fit the model"):
        audit(other, tmp_path / "run", progress=False)


def test_an_accuracy_that_no_file_tells_is_measured(checkpoints: dict[str, Path]) -> None:
    small, test = (
        AuditJob(
            "fashion-mnist-mini", "lenet", ("adam-cosine",), 1, checkpoint=checkpoints["silent"]
        ),
        load("fashion-mnist-mini", "test"),
    )
    model = build("lenet", channels=1, size=28, classes=10, seed=5, mean=test.mean, std=test.std)
    found = trained(small, test, torch.device("cpu"))
    with torch.no_grad():
        right = (
            (
                build("lenet", channels=1, size=28, classes=10, seed=5)
                .eval()(test.images.float() / 255)
                .argmax(1)
                == test.labels
            )
            .float()
            .mean()
        )
    assert (
        found is not None
        and found.accuracy == pytest.approx(float(right))
        and (found.tested, found.under) == (500, None)
    )
    assert measured(model, test, 100)[1] == 100 and model.training


def test_accuracy_is_measured_without_dropout_and_counts_logits_alone() -> None:
    test = load("fashion-mnist-mini", "test")

    class Knows(nn.Module):
        """Answers with the hidden label of each image; a last column that is no logit is the largest."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            places = [
                int((test.images.float() / 255 == image).flatten(1).all(1).nonzero()[0, 0])
                for image in images
            ]
            return (
                torch.cat(
                    [
                        nn.functional.one_hot(test.labels[places], 10).float(),
                        torch.full((len(images), 1), 9.0),
                    ],
                    1,
                )
                * self.weight
            )

    assert measured(Knows(), test, 20) == (1.0, 20)
