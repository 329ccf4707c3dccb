"""What a grid can be asked for: its cases, whose checkpoint each gets, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from gradveil.audits import AuditJob, GridJob
from gradveil.audits.cases import parse_paths, parse_steps
from gradveil.core import GradveilError

BASE = AuditJob("fashion-mnist-mini", "lenet", ("auto",), 2)


def job(*defenses: str, **changes: Any) -> GridJob:
    settings: dict[str, Any] = {
        "base": BASE,
        "defenses": defenses or ("none",),
        "checkpoints": {},
        "runs": {},
    }
    return GridJob(**(settings | changes))


def test_clean_rows_stand_beside_those_of_defenses_that_act_on_gradients_alone() -> None:
    cases = job("none", "prune:0.9", "3-1-7", "precode:k=8,then,prune:0.9", clean="both").cases()
    assert [(case.defense, case.clean) for case in cases] == [
        ("none", False),
        ("prune:0.9", True),
        ("prune:0.9", False),
        ("3-1-7", False),
        ("precode:k=8,then,prune:0.9", True),
        ("precode:k=8,then,prune:0.9", False),
    ]
    assert [case.clean for case in job("none", "prune:0.9", clean="yes").cases()] == [False, True]


def test_folders_are_named_after_the_defense_and_never_too_long() -> None:
    long = "+".join(["3-1-7"] * 40)
    names = [
        case.folder
        for case in job("precode:k=8,beta=0.01", "prune:0.9", long, clean="both").cases()
    ]
    assert (
        names[:3] == ["precode-k-8-beta-0.01", "prune-0.9-clean", "prune-0.9"]
        and len(set(names)) == 4
    )
    assert all(len(name) <= 90 and "/" not in name for name in names)


def test_a_checkpoint_is_for_all_or_for_one_defense_whose_text_may_hold_an_equals_sign() -> None:
    defenses = ("none", "precode:k=8,beta=1e-2", "gaussian:1e-2")
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
    cases = job(*defenses, checkpoints=found).cases()
    assert [case.checkpoint for case in cases] == [
        Path("all.safetensors"),
        Path("a=b.safetensors"),
        Path("c"),
    ]


def test_steps_are_put_in_order() -> None:
    assert parse_steps("10, end,0,10") == ("0", "10", "end") and parse_steps("") == ()


def trained(folder: Path, *steps: int) -> Path:
    (folder / "steps").mkdir(parents=True)
    for step in steps:
        (folder / "steps" / f"step-{step:06d}.safetensors").touch()
    (folder / "model.safetensors").touch()
    return folder


def test_steps_are_those_of_the_training_of_each_defense(tmp_path: Path) -> None:
    runs = {"": trained(tmp_path / "a", 0, 10), "prune:0.9": trained(tmp_path / "b", 0)}
    cases = job("none", "prune:0.9", runs=runs, at=("0", "end")).cases()
    assert [case.checkpoint for case in cases] == [
        tmp_path / "a/steps/step-000000.safetensors",
        tmp_path / "a/model.safetensors",
        tmp_path / "b/steps/step-000000.safetensors",
        tmp_path / "b/model.safetensors",
    ]
    assert [case.folder for case in cases] == [
        "none-at-0",
        "none-at-end",
        "prune-0.9-at-0",
        "prune-0.9-at-end",
    ]


def test_a_step_that_was_not_saved_is_refused_with_those_that_were(tmp_path: Path) -> None:
    run = trained(tmp_path / "a", 0, 10)
    with pytest.raises(
        GradveilError,
        match=r"step 5: .*a has not saved it: it has 0, 10, end; train with --save-at",
    ):
        job(runs={"": run}, at=("5",)).cases()
    with pytest.raises(GradveilError, match="it holds no weights"):
        job(runs={"": tmp_path / "empty"}, at=("5",)).cases()
    with pytest.raises(GradveilError, match="defense none: no --run was given for it"):
        job(runs={"prune:0.9": run}, at=("0",)).cases()


@pytest.mark.parametrize(
    ("defenses", "changes", "says"),
    [
        (("prune:1.5",), {}, "share 1.5"),
        (("nope",), {}, "unknown defense 'nope'"),
        (("prune:0.9,then,3-1-7",), {}, "put it first"),
        (("gaussian:0.1,then,clip:1",), {}, "clip first"),
        (("prune:0.9", "prune:0.90"), {}, "'prune:0.9' is named twice"),
        (("none",), {"clean": "maybe"}, "unknown clean 'maybe': choose from no, yes, both"),
        (("none",), {"at": ("0",)}, "--at without --run"),
        (("none",), {"runs": {"": Path("x")}}, "--run without --at"),
        (
            ("none",),
            {"runs": {"": Path("x")}, "at": ("0",), "checkpoints": {"": Path("y")}},
            "--checkpoint and --at",
        ),
        (
            ("none",),
            {"base": AuditJob("fashion-mnist-mini", "lenet", ("dlg",), 2, defense="prune:0.5")},
            "a defense or checkpoint of its own",
        ),
    ],
)
def test_what_cannot_be_a_grid_is_refused_in_one_line(
    defenses: tuple[str, ...], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(GradveilError) as caught:
        job(*defenses, **changes).cases()
    assert says in str(caught.value) and "\n" not in str(caught.value)


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
        parse_paths(values, ["none"], "checkpoint")


@pytest.mark.parametrize("text", ["1,x", "-1", "1.5", "0;1"])
def test_steps_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(GradveilError, match="is no step"):
        parse_steps(text)
