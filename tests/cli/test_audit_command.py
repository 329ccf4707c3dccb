"""gradveil audit: one JSON object, progress beside it, bad input as one line that costs nothing."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from gradveil.audits import AuditResult
from gradveil.cli import run
from gradveil.cli.audit import parse_paths, parse_steps
from gradveil.core.errors import GradveilError
from gradveil.defenses import parse
from gradveil.report.provenance import command

LENET = "audit --data fashion-mnist-mini --model lenet"
QUICK = f"{LENET} --attack adam-cosine --steps 3 --images 2 --out run"
SOURCE = """
from torch import nn


def linear(classes, size, channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, classes))
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a quick audit."""
    folder = tmp_path_factory.mktemp("audited")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(QUICK.split()) == 0
    return folder / "run"


@pytest.fixture
def audited(
    gradveil: Any,  # noqa: ARG001  # it makes the current folder
    whole: Path,
    tmp_path: Path,
) -> None:
    """A copy of it in the current folder."""
    shutil.copytree(whole, tmp_path / "run")


@pytest.fixture
def linear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a model that gives its images away in closed form, and quickly."""
    (tmp_path / "own_audited_nets.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_audited_nets", raising=False)
    return "own_audited_nets:linear"


def error(outcome: Any) -> str:
    """The last line on the error stream; a bar may stand before it."""
    *_, last = outcome.said.splitlines()
    assert outcome.status == 2 and not outcome.shown and last.startswith("error: ")
    return str(last)


def test_json_is_one_object_and_the_files_it_names_are_there(gradveil: Any) -> None:
    outcome = gradveil(f"{QUICK} --policy 3-1-7 --no-control --json")
    result = outcome.result
    (case,) = result["cases"]
    rows = {(row["kind"], row["attack"], row["truth"]) for row in case["rows"]}
    assert (
        outcome.status == 0
        and {("attack", "adam-cosine", "used"), ("positive", "adam-cosine", "original")} <= rows
    )
    assert (
        len(rows) == 24
        and result["settings"]["steps"] == 3
        and case["defense"] == "3-1-7"
        and len(result["notes"]) == 11
    )
    assert all(Path(path).is_file() for path in result["pictures"]) and len(result["pictures"]) == 2
    assert (
        Path(result["out"]) / case["folder"] / "records.jsonl"
    ).is_file() and "adam-cosine" in outcome.said


@pytest.mark.usefixtures("undrawn")
def test_crop_and_flip_alone_are_audited_beside_a_policy(gradveil: Any, tmp_path: Path) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text("[most]\nfailed = 0.5")
    outcome = gradveil(f"{QUICK} --no-sham --policy 3-1-7 --thresholds {limits} --json")
    assert "added as control: policy:none beside 3-1-7 (without: --no-control)" in outcome.said
    policy, control = outcome.result["cases"]
    assert (policy["defense"], policy["control"]) == ("3-1-7", None)
    assert (control["defense"], control["control"]) == ("policy:none", "3-1-7")
    assert control["strongest"]["n"] == policy["strongest"]["n"] == 2
    verdict = json.loads((Path(outcome.result["out"]) / "verdict.json").read_text())
    assert [check["case"] for check in verdict["checks"]] == ["3-1-7"]
    again = command(AuditResult.read(outcome.result["out"])) or ""
    assert "--defense 3-1-7 --steps 3" in again and "control" not in again


@pytest.mark.usefixtures("undrawn")
def test_a_second_run_says_the_same_and_attacks_nothing(gradveil: Any) -> None:
    first, again = (gradveil(f"{QUICK} --json") for _ in range(2))
    assert first.result == again.result and first.said and not again.said


@pytest.mark.usefixtures("audited")
def test_people_get_a_table_words_and_the_files(gradveil: Any) -> None:
    outcome = gradveil(QUICK)
    for part in (
        "lenet on fashion-mnist-mini",
        "blind: class mean",
        "Positive control: adam-cosine",
        "run/none/pictures/grid-adam-cosine.png",
    ):
        assert part in outcome.shown


@pytest.mark.usefixtures("undrawn")
def test_trained_weights_are_audited(gradveil: Any) -> None:
    assert (
        gradveil(
            "train --data fashion-mnist-mini --model lenet --epochs 0 --seed 4 --out trained"
        ).status
        == 0
    )
    found = gradveil(f"{QUICK} --checkpoint trained/model.safetensors --json").result
    plain = gradveil(f"{QUICK}-2 --seed 4 --json").result
    settings = [
        json.loads((Path(one["out"]) / "none/settings.json").read_text()) for one in (found, plain)
    ]
    assert settings[0]["weights_sha256"] == settings[1]["weights_sha256"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--attack nope", "unknown attack 'nope': choose from adam-cosine"),
        ("--images 0", "images 0: it must be at least 1"),
        ("--images 501", "images 0 to 500: fashion-mnist-mini test has 500"),
        ("--first 499", "images 499 to 500: fashion-mnist-mini test has 500"),
        ("--batch-size 3", "2 images in batches of 3: choose a multiple"),
        ("--steps 0", "steps 0: it must be at least 1"),
        ("--labels none", "unknown labels 'none': choose from known, inferred"),
        ("--policy 3-99", "transformation 99 is out of range"),
        ("--split val", "unknown split 'val'"),
        ("--local-steps 0", "local steps 0: there must be at least 1"),
        ("--local-lr nan", "local learning rate nan"),
        ("--local-epochs 0", "local epochs 0: there must be at least 1"),
        ("--local-batch-size 0", "local batch size 0: there must be at least 1 image"),
        ("--local-steps 2 --local-epochs 2", "local steps 2 go over the whole batch: give either"),
        ("--client-momentum 1", "client momentum 1.0: it must be at least 0 and below 1"),
        ("--client-weight-decay -1", "client weight decay -1.0: it must be at least 0"),
        ("--model nope", "unknown model 'nope'"),
        ("--data nope", "unknown dataset 'nope'"),
        ("--checkpoint none.safetensors", "no checkpoint at none.safetensors"),
        ("--device tpu", "unknown device 'tpu'"),
        ("--attack closed-form", "linear inversion needs nn.Linear"),
        ("--images many", "Invalid value for '--images'"),
        ("--defense prune:1.5", "share 1.5"),
        ("--defense prune:0.5,then,3-1-7", "put it first"),
        (
            "--defense precode:position=nowhere",
            "unknown position of defense precode:position=nowhere: 'nowhere'",
        ),
        (
            "--defense dp:norm=1,multiplier=1 --model resnet20-4 --defense none",
            "take a model with GroupNorm",
        ),
        ("--defense prune:0.5 --policy 3", "--policy 3 and --defense prune:0.5: give one of them"),
        ("--defense none --defense none", "defense 'none' is named twice"),
        (
            "--defense none --defense prune:0.5 --checkpoint prune:0.5=none.safetensors",
            "no checkpoint at none.safetensors",
        ),
        ("--checkpoint prune:0.5=none.safetensors", "prune:0.5 is not among the defenses audited"),
        ("--clean maybe", "unknown clean 'maybe': choose from no, yes, both"),
        ("--at 0,end", "--at without --run"),
        ("--run trained", "--run without --at"),
        ("--run trained --at first", "'first' is no step"),
        ("--run trained --at 0", "it holds no weights; train with --save-at"),
        ("--certify mse=3", "unknown metric of certify 'mse'"),
        ("--certify psnr=15 --images 0", "images 0: it must be at least 1"),
        ("--delta 0.05", "--delta 0.05 without --certify"),
        ("--attack masked", "needs to know the pruned"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_folder(gradveil: Any, options: str, says: str) -> None:
    assert says in error(gradveil(f"{QUICK} {options}")) and not Path("run").exists()


def test_a_checkpoint_of_another_shape_is_refused(gradveil: Any) -> None:
    assert (
        gradveil("train --data fashion-mnist-mini --model mlp --epochs 0 --out trained").status == 0
    )
    said = error(gradveil(f"{QUICK} --checkpoint trained/model.safetensors"))
    assert "does not fit the model" in said and "saved from mlp on fashion-mnist-mini" in said


@pytest.mark.usefixtures("audited")
def test_other_settings_are_refused_and_the_first_run_stays(gradveil: Any) -> None:
    records = Path("run/none/records.jsonl").read_bytes()
    assert "holds an audit with other settings (steps 3 there, 4 here)" in error(
        gradveil(f"{QUICK} --steps 4")
    )
    assert Path("run/none/records.jsonl").read_bytes() == records


@pytest.mark.usefixtures("undrawn")
def test_ctrl_c_is_one_line_and_the_run_goes_on_later(
    gradveil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradveil.audits import case_run

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(case_run, "append", interrupted)
        outcome = gradveil(QUICK)
    assert (
        outcome.status == 130
        and outcome.said.splitlines()[-1] == "error: stopped; run the same command again to go on"
    )
    assert gradveil(f"{QUICK} --json").status == 0


@pytest.mark.usefixtures("undrawn")
def test_several_defenses_are_one_table_with_their_strongest_attackers(gradveil: Any) -> None:
    defenses = "--defense none --defense prune:0.95"
    line = f"{LENET} {defenses} --attack auto --steps 2 --images 2 --out run"
    asked = f"{line} --clean both --certify psnr=15 --delta 0.05"
    outcome = gradveil(f"{asked} --json")
    result = outcome.result
    assert [(part["defense"], part["clean"], part["folder"]) for part in result["cases"]] == [
        ("none", False, "none"),
        ("prune:0.95", True, "prune-0.95-clean"),
        ("prune:0.95", False, "prune-0.95"),
    ]
    pruned = result["cases"][2]
    assert (
        pruned["knows"]
        == dict.fromkeys(("adam-cosine", "raced"), "labels")
        | dict.fromkeys(("masked", "raced+masked"), "labels, what is pruned")
        and "Conv2d" in pruned["left_out"]["closed-form"]
    )
    assert pruned["strongest"]["attack"] in pruned["knows"] and all(
        Path(path).is_file() for path in result["pictures"]
    )
    assert result["certificates"]["prune:0.95, clean gradient"]["overall"]["n"] == 2
    shown = gradveil(asked).shown
    for part in (
        "What is left of each defense",
        "clean gradient",
        "+ what is pruned",
        "All: left out: closed-form",
        "delta 0.05 cannot be told",
        "Not tested:",
    ):
        assert part in shown


@pytest.mark.usefixtures("undrawn")
def test_checkpoints_of_training_steps_are_one_table_and_one_picture(gradveil: Any) -> None:
    train = "train --data fashion-mnist-mini --model lenet --out trained"
    assert gradveil(f"{train} --epochs 1 --lr 0.001 --save-at 0,3").status == 0
    result = gradveil(f"{QUICK} --run trained --at 0,3,end --json").result
    assert [(part["step"], part["trained"]["step"]) for part in result["cases"]] == [
        ("0", 0),
        ("3", 3),
        ("end", 16),
    ]
    assert all(part["trained"]["tested"] == 500 for part in result["cases"])
    assert (
        result["pictures"][-1] == "run/pictures/training-time.png"
        and Path(result["pictures"][-1]).is_file()
    )
    assert "it has 0, 3, end" in error(gradveil(f"{QUICK}-2 --run trained --at 4"))


@pytest.mark.usefixtures("undrawn")
def test_one_defense_is_one_audit_with_an_exact_statement(gradveil: Any) -> None:
    outcome = gradveil(f"{QUICK} --defense gaussian:1e-3 --certify ssim=0.5 --json")
    result = outcome.result
    assert (
        result["cases"][0]["defense"] == "gaussian:0.001"
        and result["certificates"]["gaussian:0.001"]["overall"]["n"] == 2
    )
    assert Path("run/gaussian-0.001/records.jsonl").is_file() and any(
        "2 images reached" in note or "n = 2" in note for note in result["notes"]
    )
    assert "delta" in gradveil(f"{QUICK} --defense gaussian:1e-3 --certify ssim=0.5").shown


@pytest.mark.usefixtures("undrawn")
def test_as_published_the_clean_gradient_is_attacked(gradveil: Any, linear: str) -> None:
    line = f"audit --data fashion-mnist-mini --model {linear} --attack closed-form --images 2"
    plain, clean, noisy = (
        gradveil(f"{line} --out run{number} {more} --json").result
        for number, more in enumerate(
            ("", "--defense gaussian:1 --clean yes", "--defense gaussian:1")
        )
    )
    scores = [
        [row["psnr"] for row in one["cases"][0]["rows"] if row["kind"] == "attack"]
        for one in (plain, clean, noisy)
    ]
    assert scores[0] == scores[1] != scores[2] and clean["cases"][0]["clean"]


def test_a_checkpoint_is_for_all_or_for_one_defense_whose_text_may_hold_an_equals_sign() -> None:
    defenses = [parse(text) for text in ("none", "precode:k=8,beta=1e-2", "gaussian:1e-2")]
    found = parse_paths(
        ["all.safetensors", "precode:k=8,beta=0.01=a=b.safetensors", "gaussian:0.01=c"],
        defenses,
        "checkpoint",
    )
    assert found == {
        "": Path("all.safetensors"),
        "precode:k=8,beta=0.01": Path("a=b.safetensors"),
        "gaussian:0.01": Path("c"),
    }


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (["a", "b"], "given twice for all defenses: a and b"),
        (["none=a", "none=b"], "given twice for none"),
        (["prune:0.5=a"], "prune:0.5 is not among the defenses audited, none"),
    ],
)
def test_checkpoints_of_nobody_are_refused(values: list[str], says: str) -> None:
    with pytest.raises(GradveilError, match=says):
        parse_paths(values, [parse("none")], "checkpoint")


def test_steps_are_put_in_order() -> None:
    assert parse_steps("10, end,0,10") == ("0", "10", "end") and parse_steps("") == ()


@pytest.mark.parametrize("text", ["1,x", "-1", "1.5", "0;1"])
def test_steps_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(GradveilError, match="is no step"):
        parse_steps(text)


@pytest.mark.usefixtures("undrawn")
def test_the_result_has_the_same_shape_for_one_case_and_for_several(
    gradveil: Any, linear: str
) -> None:
    asked = f"--attack closed-form --model {linear} --images 1 --certify psnr=15 --json"
    line = f"audit --data fashion-mnist-mini {asked}"
    one = gradveil(f"{line} --out one").result
    two = gradveil(f"{line} --out two --defense none --defense prune:0.5").result
    names = {"out", "settings", "cases", "notes", "pictures", "certificates", "page", "passed"}
    assert set(one) == set(two) == names and set(one["settings"]) == set(two["settings"])
    first, again = one["cases"][0], two["cases"][0]
    assert set(first) == set(again) and first["folder"] == again["folder"] == "none"
    for row in (*first["rows"], *again["rows"]):  # more cases are more tests
        del row["seconds"], row["verdict"]["tests"]
    rows = [case["rows"] for case in (first, again)]
    assert rows[0] == rows[1] and list(two["certificates"]) == ["none", "prune:0.5"]
    for case in (*one["cases"], *two["cases"]):
        folder = Path("one" if case is first else "two") / case["folder"]
        assert (folder / "pictures/grid-closed-form.png").is_file()
