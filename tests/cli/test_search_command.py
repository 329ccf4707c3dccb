"""gradveil search: one JSON object, tables for people, every kind of bad input as one line, and a kill that loses nothing."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SOURCE = """
from torch import nn


def linear(classes, size, channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, classes))
"""
QUICK = (
    "search --data fashion-mnist-mini --model own_cli_nets:linear --checkpoint trained/model.safetensors --attack closed-form "
    "--trials 8 --keep 4 --images 6 --threshold -1e9 --audit-images 1 --out run"
)


def error(outcome: Any) -> str:
    """The last line on the error stream; a bar may stand before it."""
    *_, last = outcome.said.splitlines()
    assert outcome.status == 2 and not outcome.shown and last.startswith("error: "), outcome
    return str(last)


def files() -> list[Path]:
    return sorted(path for path in Path().rglob("*") if "__pycache__" not in path.parts)


@pytest.fixture
def trained(gradveil: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Weights of a small model, which gives its images away in closed form."""
    (tmp_path / "own_cli_nets.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_cli_nets", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("gradveil.audits.pools.CANDIDATES", 20)  # quicker
    assert (
        gradveil(
            "train --data fashion-mnist-mini --model own_cli_nets:linear --epochs 0 --seed 7 --out trained"
        ).status
        == 0
    )


@pytest.mark.usefixtures("trained")
def test_json_is_one_object_and_the_policies_it_found_defend_other_commands(gradveil: Any) -> None:
    outcome = gradveil(f"{QUICK} --json")
    result = outcome.result
    assert (
        outcome.status == 0
        and len(result["trials"]) == 8
        and len(result["kept"]) == 4
        and len(result["words"]) == 2
    )
    assert all(Path(path).is_file() for path in result["files"].values()) and "8/8" in outcome.said
    audit = "audit --data fashion-mnist-mini --model own_cli_nets:linear --attack closed-form --images 1 --json"
    for number, (option, policy) in enumerate((("", "hybrid"), (":best", "best"))):
        found = gradveil(f"{audit} --defense run/policies.toml{option} --out audit-{number}").result
        assert found["settings"]["policy"] == result[policy]
    training = gradveil(
        "train --data fashion-mnist-mini --model own_cli_nets:linear --epochs 0 --defense run/policies.toml:2 --out train-2"
    )
    assert training.status == 0

    again = gradveil(QUICK)
    for part in (
        "Policies kept",
        "semi-trained own_cli_nets",
        "untrained own_cli_nets",
        "8 policies drawn: 8 scored",
        "optuna-dashboard run/study.journal",
    ):
        assert part in again.shown
    assert not again.said
    said = error(gradveil(f"{QUICK} --keep 2"))
    assert (
        "run holds a search with other settings (keep 4 there, 2 here): choose another --out"
        in said
    )
    assert "no policy '9' in run/policies.toml: choose hybrid, best" in error(
        gradveil(f"{audit} --defense run/policies.toml:9 --out a9")
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--trials 0", "trials 0: it must be at least 1"),
        ("--keep 0", "keep 0: it must be at least 1"),
        ("--keep 9", "keep 9 of 8 trials"),
        ("--sampler grid", "unknown sampler 'grid': choose from random, tpe, nsga2"),
        ("--score guess", "unknown score 'guess'"),
        ("--attack nope", "unknown attack 'nope'"),
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


def start(arguments: str) -> subprocess.Popen[bytes]:
    quick = "import torch; torch.set_num_threads(1); from gradveil.audits import pools; pools.CANDIDATES = 20"
    code = f"{quick}; from gradveil.cli import main; main()"
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments.split()]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.usefixtures("trained")
def test_killed_twice_it_ends_with_the_policies_of_an_unbroken_search(gradveil: Any) -> None:
    """Once among the trials, once among the audits."""
    command = QUICK.replace("--trials 8", "--trials 20").replace("--out run", "--out killed")
    moments = (
        (Path("killed/study.journal"), 5_000),
        (Path("killed/confirm/semi-trained-random/records.jsonl"), 0),
    )
    for path, size in moments:
        process = start(command)
        until = time.monotonic() + 60
        while (
            not (path.is_file() and path.stat().st_size > size)
            and process.poll() is None
            and time.monotonic() < until
        ):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
        assert not Path("killed/search.json").exists()
    finished = gradveil(f"{command} --json").result
    unbroken = gradveil(f"{command.replace('--out killed', '--out unbroken')} --json").result
    assert Path("killed/policies.toml").read_bytes() == Path("unbroken/policies.toml").read_bytes()
    assert finished["trials"] == unbroken["trials"] and finished["words"] == unbroken["words"]
