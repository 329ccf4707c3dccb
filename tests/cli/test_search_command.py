"""gradveil search: one JSON object, tables for people, every kind of bad input as one line."""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from gradveil.cli import run
from gradveil.cli.search import RACE
from gradveil.stats import clopper_pearson

SOURCE = """
from torch import nn


def linear(classes, size, channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, classes))
"""
ROOT = Path(__file__).parents[2]
MODEL = "--data fashion-mnist-mini --model own_cli_nets:linear"
QUICK = (
    f"search {MODEL} --checkpoint trained/model.safetensors --attack closed-form "
    "--trials 4 --keep 3 --images 4 --threshold -1e9 --audit-images 1 --out run"
)


def error(outcome: Any) -> str:
    """The last line on the error stream; a bar may stand before it."""
    *_, last = outcome.said.splitlines()
    assert outcome.status == 2 and not outcome.shown and last.startswith("error: "), outcome
    return str(last)


def files() -> list[Path]:
    return sorted(path for path in Path().rglob("*") if "__pycache__" not in path.parts)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training of a small model, which gives its images away in closed form."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "own_cli_nets.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(f"train {MODEL} --epochs 0 --seed 7 --out trained".split()) == 0
    return folder


@pytest.fixture
def trained(
    gradveil: Any,  # noqa: ARG001  # it makes the current folder, and lets no data sets in
    training: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A copy of that folder as the current one."""
    shutil.copytree(training, tmp_path, dirs_exist_ok=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_cli_nets", raising=False)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.mark.usefixtures("trained", "undrawn")
def test_json_is_one_object_and_the_policies_it_found_defend_other_commands(gradveil: Any) -> None:
    outcome = gradveil(f"{QUICK} --json")
    result = outcome.result
    assert (
        outcome.status == 0
        and len(result["trials"]) == 4
        and len(result["kept"]) == 3
        and len(result["words"]) == 5
    )
    assert all(Path(path).is_file() for path in result["files"].values()) and "4/4" in outcome.said
    audit = f"audit {MODEL} --attack closed-form --images 1 --json"
    for number, (option, policy) in enumerate((("", "hybrid"), (":best", "best"))):
        found = gradveil(f"{audit} --defense run/policies.toml{option} --out audit-{number}").result
        assert found["cases"][0]["defense"] == result[policy]
        assert found["settings"]["scored"] == len(result["scored"]) == 300
    training = gradveil(f"train {MODEL} --epochs 0 --defense run/policies.toml:2 --out train-2")
    assert training.status == 0

    again = gradveil(QUICK)
    for part in (
        "Policies kept",
        "semi-trained own_cli_nets",
        "untrained own_cli_nets",
        "4 policies drawn: 4 scored",
        "optuna-dashboard run/study.journal",
    ):
        assert part in again.shown
    assert not again.said
    said = error(gradveil(f"{QUICK} --keep 2"))
    assert (
        "run holds a search with other settings (keep 3 there, 2 here): choose another --out"
        in said
    )
    assert "has 200 that the search of the defense has not scored; choose at most 200" in error(
        gradveil(f"{audit} --images 201 --defense run/policies.toml --out a201")
    )
    assert "no policy '9' in run/policies.toml: choose hybrid, best" in error(
        gradveil(f"{audit} --defense run/policies.toml:9 --out a9")
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--trials 0", "trials 0: it must be at least 1"),
        ("--keep 0", "keep 0: it must be at least 1"),
        ("--keep 9", "keep 9 of 4 trials"),
        ("--sampler grid", "unknown sampler 'grid': choose from random, tpe, nsga2"),
        ("--score guess", "unknown score 'guess'"),
        ("--attack nope", "unknown attack 'nope'"),
        ("--attack masked", "attack masked needs to know the pruned"),
        ("--engine slurm", "unknown engine 'slurm': choose from local, ray"),
        ("--race --sampler nsga2", "race with sampler nsga2"),
        ("--as-published --score probe", "score probe: the published search has score privacy"),
        ("--as-published --race", "race True: the published search has race False"),
        ("--images 500", "images 500: fashion-mnist-mini test has 300 from image 200 on"),
        ("--checkpoint none.safetensors", "no checkpoint at none.safetensors"),
        ("--storage postgresql://me:secret@127.0.0.1:1/db", "cannot be used"),
        ("--trials many", "Invalid value for '--trials'"),
        ("--out trained", "trained holds a training, not a search"),
        ("--out trained/model.json", "trained/model.json is a file"),
    ],
)
@pytest.mark.usefixtures("trained")
def test_bad_input_is_one_line_and_leaves_no_folder(gradveil: Any, options: str, says: str) -> None:
    before = files()
    said = error(gradveil(f"{QUICK} {options}"))
    assert says in said and "secret" not in said and files() == before


@pytest.mark.usefixtures("trained")
def test_a_threshold_that_nothing_passes_ends_and_says_what_to_do(gradveil: Any) -> None:
    said = error(gradveil(f"{QUICK} --trials 2 --keep 1 --threshold 5"))
    assert (
        "0 of 8 policies qualify, 1 are wanted: the threshold is 5, the best accuracy score -"
        in said
        and "lower --threshold" in said
    )


def test_help_says_which_images_the_audits_attack_and_what_a_race_saved(
    gradveil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = " ".join(gradveil("search --help").shown.replace("│", " ").split())
    assert "drawn over the classes by the seed, none that a score has used" in said
    assert "first of the test split" not in said
    assert "29 of 1,500 policies were dropped, 1.2% of the work" in said


def test_the_error_rate_of_a_race_is_said_wherever_it_is_offered() -> None:
    """With no error in 50 races, the exact bound of their share at 95% is 5.8%."""
    bound = clopper_pearson(0, 50, level=0.9)[1]
    assert bound == pytest.approx(0.058, abs=0.001)
    for text in (
        RACE,
        (ROOT / "README.md").read_text(),
        (ROOT / "docs/tutorials/search.md").read_text(),
    ):
        said = " ".join(text.split()).lower()
        assert "--race" in said or text == RACE
        assert re.search(r"none of 50 simulated \w+ erred", said)
        assert f"so at most {100 * bound:.0f}% do, 95% confidence" in said
        assert "with normal values" in said


def test_the_figures_of_recorded_races_in_the_help_are_those_of_the_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from results import searches

    assert all(part in RACE for part in searches.race_words())
