"""Tunings: what they try, what they find, what their file says, and how they go on after a stop."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradveil as gv
import toys
from gradveil.attacks import Race, adam_cosine
from gradveil.attacks.attack_files import image_digest
from gradveil.attacks.labels import Joint, Known
from gradveil.attacks.optimizers import Adam
from gradveil.attacks.priors import PriorState, TotalVariation, Weighted, none
from gradveil.core.errors import GradveilError
from gradveil.data import Images
from gradveil.search.engine import LocalEngine
from gradveil.tuning import Amount, AttackSpace, Choice, Searches, TuningJob, run_tuning
from gradveil.tuning.results import TuningResult, compare
from gradveil.tuning.setup import UNFIT, Setup
from gradveil.tuning.space import usual_space


@dataclass(frozen=True)
class Dark(Weighted):
    """A prior of a user's: pictures are dark."""

    def penalty(self, images: Tensor, state: PriorState) -> Tensor:
        return images.flatten(1).mean(1)


SPACE = AttackSpace(
    (
        Amount("optimizer", Adam, 1e-4, 0.5, "rate"),
        Amount("prior", TotalVariation, 1e-4, 1.0, "total variation"),
        Choice("prior", {"none": none, "dark": Dark(0.1)}, "other prior"),
        Choice("labels", {"told": Known(), "optimized": Joint()}),
    ),
    {"1": Searches(), "raced": Searches(1, Race(((4, 1 / 4),)))},
)
POOL = toys.split(240, part="train")
JOB = TuningJob(
    model=toys.lenet().float(),
    data=POOL,
    images=12,
    held_out=3,
    trials=6,
    at_once=2,
    space=SPACE,
    work=6,
    confidence=0.5,
    seed=3,
)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> TuningResult:
    return run_tuning(JOB, tmp_path_factory.mktemp("tuned") / "run", progress=False)


def number(images: Images, digest: str) -> int:
    return next(n for n in range(len(images)) if image_digest(images.images[n]) == digest)


def test_the_best_of_the_trials_is_kept_with_its_settings(tuned: TuningResult) -> None:
    scored = [trial for trial in tuned.trials if trial.state == "scored"]
    assert len(tuned.trials) == 6 and tuned.best == min(scored, key=lambda t: t.missed).number
    drawn = tuned.drawn
    assert isinstance(tuned.attack.optimizer, Adam) and tuned.attack.optimizer.lr == drawn["rate"]
    for trial in scored:
        assert trial.updates == 12
        assert trial.missed == pytest.approx(1 - (trial.lineup + trial.ssim) / 2) or (
            trial.missed == UNFIT
        )


def test_trials_that_are_clearly_worse_end_after_the_first_images(tuned: TuningResult) -> None:
    dropped = [trial for trial in tuned.trials if trial.state == "dropped"]
    assert dropped and all(trial.updates == 8 for trial in dropped)


def test_the_file_is_the_attack_with_the_digests_of_its_images(tuned: TuningResult) -> None:
    attack = gv.attacks.find(str(tuned.out / "attack.toml"))
    assert attack == tuned.attack
    assert isinstance(attack, gv.GradientMatching) and len(attack.tuned_on) == 12
    used = tuned.file.images
    chosen = [number(POOL, digest) for digest in (*used.tuned_on, *used.held_out)]
    assert len({*chosen}) == 15 and list(attack.tuned_on) == used.tuned_on


def test_every_trial_and_the_standard_attack_do_the_same_work(tuned: TuningResult) -> None:
    for trial in tuned.trials:
        attack = SPACE.attack(trial.drawn, JOB.work)
        assert attack.race.work(attack.restarts, attack.steps) <= 6
        assert attack.race.work(attack.restarts, attack.steps + 1) > 6
    assert tuned.file.cost.standard == 6 and tuned.file.cost.tuned <= 6


def test_a_finished_tuning_is_read_back_and_nothing_is_tried(
    tuned: TuningResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalEngine, "score_units", lambda *_: pytest.fail("tried again"))
    again = run_tuning(JOB, tuned.out, progress=False)
    assert again.plain() == tuned.plain() and again.attack == tuned.attack
    assert "against the standard attack" in repr(again)
    other = toys.refused(run_tuning, replace(JOB, work=9), tuned.out, progress=False)
    assert "holds a tuning with other settings (work 6 there, 9 here)" in other


def test_a_tuning_that_was_stopped_in_a_group_goes_on_to_the_same_result(
    tuned: TuningResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, plain = [], LocalEngine.score_units

    def stopped(self: LocalEngine, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(self, *arguments)

    out = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LocalEngine, "score_units", stopped)
        run_tuning(JOB, out, progress=False)
    result = run_tuning(JOB, out, progress=False)
    assert result.trials == tuned.trials
    assert (out / "attack.toml").read_bytes() == (tuned.out / "attack.toml").read_bytes()


@pytest.mark.slow
def test_a_database_and_a_cluster_give_the_same_result(
    tuned: TuningResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    tests = [str(Path(toys.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(tests))  # a worker imports this module
    ways: dict[str, dict[str, Any]] = {
        "database": {"storage": f"sqlite:///{tmp_path}/study.db"},
        "cluster": {"engine": "ray", "ray_address": "local"},
    }
    for name, way in ways.items():
        result = run_tuning(JOB, tmp_path / name, progress=False, **way)
        assert [trial.drawn for trial in result.trials] == [trial.drawn for trial in tuned.trials]
        assert (result.best, result.attack) == (tuned.best, tuned.attack)


def test_an_audit_refuses_an_attack_that_was_tuned_on_a_victim(
    tuned: TuningResult, tmp_path: Path
) -> None:
    victim = number(POOL, tuned.file.images.tuned_on[0])
    audit: dict[str, Any] = {
        "attacks": [str(tuned.out / "attack.toml")],
        "victims": 1,
        "progress": False,
    }
    said = toys.refused(
        gv.audit, JOB.model, POOL, first=victim, out=tmp_path / "run", device="cpu", **audit
    )
    assert said == (
        f"attack tuned: image {victim} of toy train is among the 12 that its settings were chosen "
        "on; audit other images"
    )
    assert not (tmp_path / "run").exists()
    free = number(POOL, tuned.file.images.held_out[0])
    result = gv.audit(JOB.model, POOL, first=free, out=tmp_path / "run", sham=False, **audit)
    assert {row.attack for row in result.cases[0].rows if row.kind == "attack"} == {"tuned"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"work": 3}, "work 3: too small for one iteration of every attack; give at least 5"),
        ({"budget": 1e-9}, "budget 1e-09: these minutes are too few for one iteration"),
        ({"images": 300}, "images 300 and 3 held out: toy has 240 public images; choose fewer"),
        ({"trials": 0}, "trials 0: it must be at least 1"),
        ({"batch_size": 5}, "images 12 in batches of 5: choose a multiple of the batch size"),
        ({"data": toys.split(40)}, "toy: no line-ups can be made, and attacks are judged by them"),
        (
            {"public": toys.split(40, size=9)},
            "public: images of shape (3, 9, 9); those of toy have (3, 8, 8)",
        ),
        (
            {"public": replace(toys.split(40), classes=tuple("abc"))},
            "public: 3 classes, such as 'a'; toy has 10, such as 'class 0'",
        ),
    ],
)
def test_settings_that_cannot_work_are_one_line_and_leave_nothing(
    change: Mapping[str, Any], said: str, tmp_path: Path
) -> None:
    def start() -> None:
        run_tuning(replace(JOB, **change), tmp_path / "run", progress=False)

    assert said in toys.refused(start)
    assert not (tmp_path / "run").exists()


def test_a_race_that_keeps_more_rows_than_it_has_is_refused() -> None:
    said = toys.refused(Race, ((2, 0.1), (4, 0.1)))
    assert "follows one of 2; rows can only become fewer" in said


def test_a_space_takes_only_fields_of_the_attack_each_by_one_name() -> None:
    choice = Choice("speed", {"fast": 1})
    assert "no field 'speed' can be tuned; choose from distance" in toys.refused(
        AttackSpace, (choice,), {"1": Searches()}
    )
    twice = (Choice("signed", {"yes": True}), Choice("signed", {"no": False}))
    assert "setting 'signed' is there twice" in toys.refused(AttackSpace, twice, {"1": Searches()})
    wrong = Choice("signed", {"maybe": "perhaps"})
    assert "signed 'perhaps': expected True or False" in toys.refused(
        AttackSpace, (wrong,), {"1": Searches()}
    )


def test_the_standard_attack_is_the_first_trial_of_the_usual_space() -> None:
    space = usual_space(toys.lenet(), gv.Defense())
    assert space.attack(space.first[0], 4_800) == replace(adam_cosine, frames=0)
    raced = space.attack(space.first[1], 17_600)
    assert raced == replace(gv.attacks.raced, frames=0)


def test_under_a_defense_its_breakers_are_tried_with_the_distance_they_need() -> None:
    space = usual_space(toys.lenet(), gv.Pruning(0.9))
    masked = space.attack({**space.first[0], "against": "masked", "distance": "l2"}, 100)
    assert masked.distance == gv.attacks.masked.distance
    plain = space.attack({**space.first[0], "distance": "l2"}, 100)
    assert plain.distance == gv.attacks.dlg.distance


def test_public_images_take_the_labels_of_the_data_by_the_names_of_their_classes() -> None:
    names = tuple(reversed(POOL.classes))
    job = replace(JOB, public=replace(POOL, name="public", classes=names))
    setup = Setup.of(job, None, torch.device("cpu"))
    assert setup.pool.classes == POOL.classes
    assert torch.equal(setup.pool.labels, 9 - POOL.labels[: len(setup.pool)])


def test_a_model_of_a_user_is_tuned_behind_its_normalization_on_images_it_can_take() -> None:
    model = gv.normalized("breaking:linear", 0.5, 0.25)
    assert isinstance(model, gv.models.NormalizedName)
    job = replace(JOB, model=model, data="fashion-mnist-mini", channels=3)
    assert {"normalize": "0.5,0.25", "channels": 3}.items() <= job.settings().items()
    setup = Setup.of(job, None, torch.device("cpu"))
    assert setup.pool.channels == 3
    assert setup.stage.client.model.get_submodule("normalize").get_buffer("mean").numel() == 3
    said = toys.refused(replace, JOB, channels=3)
    assert said == "channels 3: only named data sets are converted; convert your own images first"


def test_a_long_tuning_says_beforehand_how_long_it_takes_and_one_that_goes_on_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gradveil.tuning.setup.time_iteration", lambda *_: 0.5)
    calls, plain = [], LocalEngine.score_units

    def stopped(self: LocalEngine, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:  # two trials are done
            raise KeyboardInterrupt
        return plain(self, *arguments)

    said = []
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(LocalEngine, "score_units", stopped)
            run_tuning(JOB, tmp_path / "run")
        said.append(capsys.readouterr().err.splitlines()[0])
        calls[:] = [(), ()]
    # 6 iterations of half a second, on 12 images of 6 trials and twice on 3 held out
    assert said[0] == "about 4 min on this machine; --work 1: 39 s"
    assert said[1] == "about 3 min on this machine"  # of 4 trials


def test_gains_are_tested_update_by_update() -> None:
    ours = {"lineup": [1.0] * 6 + [0.0], "ssim": [0.5, 0.6, 0.7, 0.6, 0.5, 0.4, 0.3]}
    theirs = {"lineup": [0.0] * 6 + [1.0], "ssim": [0.4, 0.4, 0.4, 0.2, 0.0, 0.1, 0.1]}
    found = compare(ours, theirs)
    assert found["lineup"].p == pytest.approx(8 / 128)  # 6 or 7 of 7 by coin flips
    assert found["ssim"].p == pytest.approx(1 / 128, rel=1e-4)


def test_a_damaged_result_is_one_line(tuned: TuningResult, tmp_path: Path) -> None:
    for name in ("settings.json", "tuning.json", "attack.toml"):
        (tmp_path / name).write_bytes((tuned.out / name).read_bytes())
    found = json.loads((tmp_path / "tuning.json").read_text())
    (tmp_path / "tuning.json").write_text(json.dumps(found | {"best": 99}))
    with pytest.raises(GradveilError, match=r"tuning.json is damaged \(best: expected the number"):
        TuningResult.read(tmp_path)
