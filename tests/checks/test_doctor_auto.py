"""gradveil doctor with `auto` tries the standard attack and names those of an audit."""

import json
import warnings

import pytest

from gradveil.checks import Finding
from gradveil.models import zoo

with warnings.catch_warnings():
    # typer 0.20 imports names that click 8.5 means to remove
    warnings.simplefilter("ignore", DeprecationWarning)
    from gradveil.cli import run


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the self-check, which is tested elsewhere, and with a narrow perceptron."""
    monkeypatch.setattr(zoo, "MLP_WIDTH", zoo.MLP_WIDTH // 8)
    monkeypatch.setattr(
        "gradveil.checks.doctor.self_check",
        lambda _: Finding("note", "self-check", "left out", "nothing"),
    )


def found(capsys: pytest.CaptureFixture[str], more: str) -> list[dict[str, str]]:
    """The findings named attack."""
    assert (
        run(f"doctor --data fashion-mnist-mini --model mlp --device cpu --json {more}".split()) == 0
    )
    return [
        one for one in json.loads(capsys.readouterr().out)["findings"] if one["name"] == "attack"
    ]


@pytest.mark.parametrize(
    ("more", "means", "breakers"),
    [
        (
            "--steps 2 --defense prune:0.95",
            "adam-cosine was tried",
            "adam-cosine, raced, masked, raced+masked and closed-form",
        ),
        ("--steps 0", "nothing was tried", "adam-cosine, raced and closed-form"),
    ],
)
def test_auto_tries_the_standard_attack_and_names_those_of_an_audit(
    capsys: pytest.CaptureFixture[str], more: str, means: str, breakers: str
) -> None:
    (note,) = found(capsys, f"--attack auto {more}")
    assert note["level"] == "note" and note["means"] == f"of attack auto, {means} here"
    assert note["do"] == f"an audit with it runs {breakers}, as far as they suit the model"


def test_an_attack_by_its_name_needs_no_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert not found(capsys, "--attack closed-form")
