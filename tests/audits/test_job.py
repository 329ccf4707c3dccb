"""The job of an audit: its attacks, its cases, and what is refused before anything runs."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from gradveil.attacks import Attack, GradientMatching, find
from gradveil.audits import AuditJob, Case, make_cases, name_attacks
from gradveil.audits.job import controls_in_words, shortened, with_controls
from gradveil.core.errors import GradveilError
from gradveil.data import load
from gradveil.defenses import Defense, parse


def job(*attacks: Any, defense: str = "none", **changes: Any) -> AuditJob:
    auto, named = name_attacks(attacks or ("adam-cosine",))
    settings: dict[str, Any] = {
        "data": "fashion-mnist-mini",
        "model": "lenet",
        "images": 4,
        "cases": (Case(parse(defense)),),
    }
    return AuditJob(attacks=named, auto=auto, **(settings | changes))


def cases(*defenses: str, **changes: Any) -> tuple[Case, ...]:
    return make_cases([parse(text) for text in defenses or ("none",)], **changes)


def test_the_settings_name_the_split_of_the_images_that_are_given() -> None:
    train = load("fashion-mnist-mini", "train")
    assert job(data=train).settings()["split"] == "train"
    assert job(split="train").settings()["split"] == "train"
    assert job().settings()["split"] == "test"


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
        ({"cases": ()}, "no defense was named: choose at least one, such as none"),
    ],
)
def test_bad_settings_are_named_in_one_line(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(GradveilError) as caught:
        job(**changes)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_an_audit_without_an_attack_is_refused() -> None:
    with pytest.raises(GradveilError, match="no attack was named"):
        AuditJob("lenet", "fashion-mnist-mini")


@pytest.mark.parametrize(
    ("attacks", "steps", "says"),
    [
        (("nope",), None, "unknown attack 'nope': choose from adam-cosine"),
        (("dlg", "dlg"), None, "attack 'dlg' is named twice"),
        (("dlg", find("dlg")), None, "attack 'dlg' is named twice"),
        (((("../x"), find("dlg")),), None, "attack name '../x': files are named after it"),
        (("closed-form",), 3, "steps 3: none of closed-form has such a setting"),
        ((3,), None, "attacks: a whole number; expected an Attack, such as gradveil.attacks.dlg"),
        ((("dlg", 3),), None, "attacks: a tuple; expected an Attack"),
        (
            (GradientMatching,),
            None,
            "attacks: the class GradientMatching; expected an Attack, such as Grad",
        ),
    ],
)
def test_what_is_no_attack_is_named_in_one_line(
    attacks: tuple[Any, ...], steps: int | None, says: str
) -> None:
    with pytest.raises(GradveilError) as caught:
        job(*attacks, steps=steps)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_two_attack_files_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    attack = find("adam-cosine")
    assert isinstance(attack, GradientMatching)
    paths = [str(tmp_path / folder / "attack.toml") for folder in "ab"]
    for path in paths:
        Path(path).parent.mkdir()
        Path(path).write_text(toys.attack_file(attack))
    with pytest.raises(GradveilError) as caught:
        name_attacks(paths)
    assert f"attacks {paths[0]} and {paths[1]} would both be called tuned: rename" in str(
        caught.value
    )
    with pytest.raises(GradveilError, match="attack 'tuned' is named twice"):
        name_attacks([paths[0], paths[0]])
    Path(paths[1]).rename(tmp_path / "second.toml")
    _, named = name_attacks([paths[0], str(tmp_path / "second.toml")])
    assert [*named] == ["tuned", "second"]


def test_attacks_have_the_name_given_or_that_of_their_preset_or_of_their_class(guess: Any) -> None:
    quick = replace(find("dlg"), steps=7)  # type: ignore[type-var]
    other = replace(find("dlg"), signed=True)  # type: ignore[type-var]
    auto, named = name_attacks(["auto", "masked", quick, ("mine", other), guess(), other])
    assert auto and list(named) == ["masked", "dlg", "mine", "guess", "gradient-matching"]
    assert named["dlg"] is quick and named["mine"] is other and named["masked"] is find("masked")
    assert name_attacks(["dlg"]) == (False, {"dlg": find("dlg")})


def test_an_attack_of_a_user_s_module_has_the_last_part_of_its_reference(
    monkeypatch: pytest.MonkeyPatch, guess: Any
) -> None:
    brought = {"brought.attacks:QUICK": guess()}
    monkeypatch.setattr("gradveil.audits.job.find", lambda name, **_: brought[name])
    assert name_attacks(["brought.attacks:QUICK"]) == (False, {"QUICK": guess()})


def test_steps_and_restarts_reach_the_attacks_that_have_them() -> None:
    asked = job("adam-cosine", "closed-form", steps=7, restarts=2)
    found = asked.attacks_on(asked.cases[0])
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


@pytest.mark.parametrize(
    ("defense", "changed"),
    [
        ("none", False),
        ("prune:0.9", False),
        ("3-1-7", True),
        ("random", True),
        ("3-1-7,then,prune:0.5", True),
        ("precode:k=8,then,prune:0.5", False),
    ],
)
def test_a_policy_changes_images_and_nothing_else_does(defense: str, changed: bool) -> None:
    for clean in (False, True):
        assert Case(parse(defense), clean=clean).changes_images is changed


def test_auto_names_the_standard_attack_the_breakers_and_what_was_named_beside_it() -> None:
    both = job("auto", "dlg", defense="prune:0.9")
    expected = ["adam-cosine", "raced", "masked", "raced+masked", "closed-form", "dlg"]
    assert list(both.attacks_on(both.cases[0])) == expected
    clean = job("auto", cases=(Case(parse("prune:0.9"), clean=True),))
    assert list(clean.attacks_on(clean.cases[0])) == ["adam-cosine", "raced", "closed-form"]


def test_an_attack_that_is_named_replaces_that_of_auto(guess: Any) -> None:
    changed = job("auto", ("masked", guess()), defense="prune:0.9")
    found = changed.attacks_on(changed.cases[0])
    assert sorted(found) == ["adam-cosine", "closed-form", "masked", "raced", "raced+masked"]
    assert found["masked"] == guess()


def test_naming_auto_changes_which_attacks_run_and_nothing_else() -> None:
    plain, auto = (job(*names, defense="prune:0.9") for names in (("dlg",), ("auto", "dlg")))
    assert plain.settings() == auto.settings()
    case = plain.cases[0]
    assert plain.attacks_on(case)["dlg"] is auto.attacks_on(case)["dlg"]
    assert set(auto.attacks_on(case)) - set(plain.attacks_on(case)) == {
        "adam-cosine",
        "raced",
        "masked",
        "raced+masked",
        "closed-form",
    }


def test_values_that_a_user_brings_are_settings_by_their_names() -> None:
    images = load("fashion-mnist-mini", "test")
    given = job(model=torch.nn.Linear(2, 3), data=images).settings()
    assert (given["model"], given["data"]) == ("Linear", "fashion-mnist-mini")
    assert set(given) == set(job().settings())


# Cases


def test_clean_rows_stand_beside_those_of_defenses_that_act_on_gradients_alone() -> None:
    found = cases("none", "prune:0.9", "3-1-7", "precode:k=8,then,prune:0.9", clean="both")
    assert [(str(case.defense), case.clean) for case in found] == [
        ("none", False),
        ("prune:0.9", True),
        ("prune:0.9", False),
        ("3-1-7", False),
        ("precode:k=8,then,prune:0.9", True),
        ("precode:k=8,then,prune:0.9", False),
    ]
    assert [case.clean for case in cases("none", "prune:0.9", clean="yes")] == [False, True]


def test_folders_are_named_after_the_defense_and_never_too_long() -> None:
    long = "+".join(["3-1-7"] * 40)
    found = cases("precode:k=8,beta=0.01", "prune:0.9", long, clean="both")
    names = [case.folder for case in found]
    assert (
        names[:3] == ["precode-k-8-beta-0.01", "prune-0.9-clean", "prune-0.9"]
        and len(set(names)) == 4
    )
    assert all(len(name) <= 90 and "/" not in name for name in names)


def test_a_label_names_the_folder_in_place_of_the_defense() -> None:
    assert Case(parse("prune:0.9"), label="seed 1/2", clean=True).folder == "seed-1-2-clean"


def test_a_checkpoint_is_for_all_or_for_one_defense() -> None:
    paths = {"": Path("all.safetensors"), "gaussian:0.01": Path("c")}
    found = cases("none", "precode:k=8,beta=1e-2", "gaussian:1e-2", checkpoints=paths)
    assert [case.weights for case in found] == [paths[""], paths[""], Path("c")]


def trained(folder: Path, *steps: int) -> Path:
    (folder / "steps").mkdir(parents=True)
    for step in steps:
        (folder / "steps" / f"step-{step:06d}.safetensors").touch()
    (folder / "model.safetensors").touch()
    return folder


def test_steps_are_those_of_the_training_of_each_defense(tmp_path: Path) -> None:
    runs = {"": trained(tmp_path / "a", 0, 10), "prune:0.9": trained(tmp_path / "b", 0)}
    found = cases("none", "prune:0.9", runs=runs, at=("0", "end"))
    assert [case.weights for case in found] == [
        tmp_path / "a/steps/step-000000.safetensors",
        tmp_path / "a/model.safetensors",
        tmp_path / "b/steps/step-000000.safetensors",
        tmp_path / "b/model.safetensors",
    ]
    assert [case.folder for case in found] == [
        "none-at-0",
        "none-at-end",
        "prune-0.9-at-0",
        "prune-0.9-at-end",
    ]
    assert [case.step for case in found] == ["0", "end", "0", "end"]


def test_a_step_that_was_not_saved_is_refused_with_those_that_were(tmp_path: Path) -> None:
    run = trained(tmp_path / "a", 0, 10)
    with pytest.raises(
        GradveilError,
        match=r"step 5: .*a has not saved it: it has 0, 10, end; train with --save-at",
    ):
        cases(runs={"": run}, at=("5",))
    with pytest.raises(GradveilError, match="it holds no weights"):
        cases(runs={"": tmp_path / "empty"}, at=("5",))
    with pytest.raises(GradveilError, match="defense none: no --run was given for it"):
        cases(runs={"prune:0.9": run}, at=("0",))


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
    ],
)
def test_what_cannot_be_the_cases_of_an_audit_is_refused_in_one_line(
    defenses: tuple[str, ...], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(GradveilError) as caught:
        job(cases=cases(*defenses, **changes))
    assert says in str(caught.value) and "\n" not in str(caught.value)


@dataclass(frozen=True)
class Rounding(Defense):
    """A defense that no registry knows."""

    acts_on = "gradients"


def test_two_defenses_that_would_share_a_folder_are_refused() -> None:
    with pytest.raises(
        GradveilError,
        match=r"defenses prune:0\.9 and gaussian:1 would share the folder prune-0\.9; audit them",
    ):
        job(cases=(Case(parse("prune:0.9")), Case(parse("gaussian:1"), label="prune-0.9")))


def test_auto_of_a_defense_that_no_registry_knows_is_standard_raced_and_closed_form() -> None:
    asked = job("auto", cases=(Case(Rounding()),))
    found: dict[str, Attack] = asked.attacks_on(asked.cases[0])
    assert list(found) == ["adam-cosine", "raced", "closed-form"]


@pytest.mark.parametrize(
    ("defenses", "added"),
    [
        (("3-1-7",), {"policy:none": "3-1-7"}),
        (("none", "3-1-7", "43-18-18"), {"policy:none": "3-1-7"}),
        (("random:count=2", "prune:0.9"), {"policy:none": "random:2"}),
        (("policy:none", "3-1-7"), {}),
        (("policy:none",), {}),
        (("none", "policy:3-1-7,augment=no"), {}),
        (("none", "prune:0.9"), {}),
        (("3-1-7,then,prune:0.9",), {"policy:none,then,prune:0.9": "3-1-7,then,prune:0.9"}),
        (("policy:none,then,prune:0.9",), {}),
    ],
)
def test_crop_and_flip_alone_are_added_beside_a_policy_that_comes_with_them(
    defenses: tuple[str, ...], added: dict[str, str]
) -> None:
    asked = cases(*defenses)
    found = with_controls(asked)
    assert found[: len(asked)] == asked
    assert {str(case.defense): case.control for case in found[len(asked) :]} == added
    assert bool(controls_in_words(found, "--no-control")) == bool(added)
    assert with_controls(found) == found


def test_a_control_has_the_weights_and_the_step_of_the_case_it_stands_beside() -> None:
    policies = [parse("3-1-7"), parse("43-18-18")]
    shared = with_controls(make_cases(policies, checkpoints={"": Path("a")}))
    assert [(case.weights, case.folder) for case in shared[2:]] == [(Path("a"), "policy-none")]
    checkpoints = {"3-1-7": Path("a"), "43-18-18": Path("b")}
    apart = with_controls(make_cases(policies, checkpoints=checkpoints))
    assert [(case.weights, case.folder) for case in apart[2:]] == [
        (Path("a"), "policy-none-beside-3-1-7"),
        (Path("b"), "policy-none-beside-43-18-18"),
    ]
    at = [Case(policies[0], Path(step), step=step) for step in ("0", "end")]
    assert [(case.weights, case.step) for case in with_controls(at)[2:]] == [
        (Path("0"), "0"),
        (Path("end"), "end"),
    ]
    assert controls_in_words(apart, "--no-control") == (
        "added as control: policy:none beside 3-1-7, policy:none beside 43-18-18 "
        "(without: --no-control)"
    )


def test_the_clean_gradient_of_a_chain_has_a_control_with_the_clean_gradient() -> None:
    both = with_controls(cases("3-1-7,then,prune:0.9", clean="both"))
    assert [(str(case.defense), case.clean) for case in both[2:]] == [
        ("policy:none,then,prune:0.9", True),
        ("policy:none,then,prune:0.9", False),
    ]
    AuditJob("lenet", "fashion-mnist-mini", auto=True, cases=both)


def test_a_case_that_is_no_control_is_written_as_before() -> None:
    (policy, control) = with_controls(cases("3-1-7"))
    assert "control" not in policy.plain() and control.plain()["control"] == "3-1-7"
