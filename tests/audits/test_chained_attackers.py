"""Chains meet their breakers in one search, models that draw meet those of their draws."""

from dataclasses import replace
from functools import partial
from itertools import combinations as choices
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from gradveil.attacks import GradientMatching, find, likelihood, raced
from gradveil.audits import AuditJob, Case, run_audit
from gradveil.audits.attackers import STANDARD, automatic, granted, rounds
from gradveil.audits.prepare import PreparedCase, prepare
from gradveil.clients import Client
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Protocol
from gradveil.data import load
from gradveil.defenses import parse
from gradveil.models import build
from gradveil.scores import ssim

MEANS = torch.zeros(10, 1, 28, 28)
OWN = """
from torch import nn


def dropping(classes, size):
    first, last = nn.Linear(size * size, 32), nn.Linear(32, classes)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Dropout(0.3), last)
"""


@pytest.mark.parametrize(
    ("defense", "expected"),
    [
        ("none", []),
        ("3-1-7", []),
        ("prune-feedback:0.9", []),
        ("clip:1,then,prune:0.9", []),
        (
            "3-1-7,then,precode:k=8",
            ["transform-known+without-random-layers", "transform-known+joint-noise"],
        ),
        ("dropout:0.5,then,prune:0.9", ["joint-masks+masked"]),
        ("precode:k=8,then,dropout:0.5", ["without-random-layers+joint-masks"]),
        (
            "precode:k=8,then,soteria:0.5",
            [
                "without-random-layers+without-defended-layers",
                "joint-noise+without-defended-layers",
            ],
        ),
        ("gaussian:0.1,then,prune:0.9", ["masked+likelihood"]),
        ("3-1-7,then,prune-feedback:0.9", ["transform-known+masked-rounds"]),
        (
            "precode:k=8,then,prune-feedback:0.9",
            ["without-random-layers+masked", "joint-noise+masked"],
        ),  # no two rounds are alike
        (
            "3-1-7,then,prune-feedback:0.9,then,clip:1",
            ["transform-known+masked"],
        ),  # and here they cannot be added up
        ("prune:0.9,then,gaussian:0.1", []),  # the zeros are covered
        ("random:3,then,dp:norm=1,multiplier=1", ["transform-known+likelihood"]),
        (
            "3-1-7,then,precode:k=8,then,prune:0.9",
            [
                "transform-known+without-random-layers+masked",
                "without-random-layers+masked",
                "transform-known+joint-noise+masked",
                "joint-noise+masked",
            ],
        ),
    ],
)
def test_auto_adds_the_strongest_breakers_of_a_chain_in_one_search(
    defense: str, expected: list[str]
) -> None:
    plain = [name for name in automatic(parse(defense)) if "+" in name and "raced" not in name]
    assert plain == expected


@pytest.mark.parametrize(
    ("defense", "expected"),
    [
        ("none", "raced"),
        ("3-1-7", "raced+transform-known"),
        ("prune:0.9", "raced+masked"),
        ("gaussian:0.1", "raced+likelihood"),
        ("3-1-7,then,precode:k=8", "raced+joint-noise"),
    ],
)
def test_the_strongest_breakers_of_all_parts_are_raced_too(defense: str, expected: str) -> None:
    *_, last = (name for name in automatic(parse(defense)) if name.startswith("raced"))
    attack = find(last)
    assert last == expected and isinstance(attack, GradientMatching)
    assert attack.race == raced.race and attack.restarts == raced.restarts
    if defense == "gaussian:0.1":
        assert attack.prior == likelihood.prior  # its weight belongs to the likelihood


def test_no_chain_has_an_attack_that_does_not_exist_or_whose_name_an_audit_refuses() -> None:
    parts = (
        "3-1-7",
        "precode:k=8",
        "dropout:0.5",
        "soteria:0.5",
        "gaussian:0.1",
        "prune-feedback:0.9",
    )
    for count in range(1, len(parts) + 1):
        for some in choices(parts, count):
            for name in automatic(parse(",then,".join(some))):
                AuditJob("lenet", "fashion-mnist-mini", {name: find(name)})


def best(defense: str, names: list[str], count: int = 2) -> dict[str, float]:
    """The likeness to the original images, SSIM."""
    split = load("fashion-mnist-mini", "test")
    batches = [
        Batch(split.images[i : i + 1].float() / 255, split.labels[i : i + 1]) for i in range(count)
    ]
    make = partial(build, "mlp", channels=1, size=28, classes=10, mean=split.mean, std=split.std)
    model = toys.narrow(make)
    client = Client(model, 10, defense=parse(defense))
    shared = client.share_batches(
        batches,
        generator(1),
        tell_defense=True,
        tell_draws=True,
        rounds=rounds(client.defense, map(find, names)),
    )
    found = {}
    for name in names:
        attack: Any = replace(find(name), steps=80, frames=0)  # type: ignore[type-var]
        made = attack([granted(one, attack, MEANS) for one, _ in shared], generator(2))
        found[name] = float(
            ssim(
                torch.cat([one.images for one in made]), torch.cat([one.images for one in batches])
            ).mean()
        )
    return found


def test_a_chain_that_holds_against_the_breaker_of_each_part_falls_to_all_in_one() -> None:
    defense = "3-1-7,then,precode:k=64"
    *single, both = [
        "transform-known",
        "without-random-layers",
        "transform-known+without-random-layers",
    ]
    found = best(defense, [*single, both])
    assert both in automatic(parse(defense))
    assert found[both] > 0.3 + max(found[name] for name in single)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_dropping_nets.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_dropping_nets:dropping"


def prepared(
    model: str, defense: str = "none", train: bool = True, steps: int = 1, **changes: Any
) -> PreparedCase:
    protocol = Protocol(steps, train_mode=train)
    case = Case(parse(defense))
    job = AuditJob(
        model, "fashion-mnist-mini", auto=True, cases=(case,), images=2, protocol=protocol, steps=2
    )
    (made,) = prepare(replace(job, **changes), Path("nowhere"), None, torch.device("cpu")).cases
    return made


def test_dropout_of_the_model_s_own_meets_its_breakers_in_train_mode(own: str) -> None:
    proper = prepared(own).stage
    assert {"without-random-layers", "joint-masks"} < {*proper.attacks}
    assert {getattr(attack, "steps", 2) for attack in proper.attacks.values()} == {2}
    assert proper.knows()["joint-masks"] == "labels, dropout is on"
    assert not {"without-random-layers", "joint-masks"} & {
        *prepared(own, train=False).stage.attacks
    }
    assert "joint-masks+masked" in prepared(own, "prune:0.5").stage.attacks


def test_an_audit_with_own_dropout_is_made_and_read_back(own: str, tmp_path: Path) -> None:
    job = AuditJob(
        own,
        "fashion-mnist-mini",
        auto=True,
        images=2,
        protocol=Protocol(train_mode=True),
        steps=2,
        positive=False,
    )
    with pytest.warns(GradveilWarning):  # that the model draws
        first = run_audit(job, tmp_path / "run", progress=False).cases[0]
    assert "joint-masks" in {record.attack for record in first.records}
    again = run_audit(job, tmp_path / "run", progress=False)
    assert again.cases[0].records == first.records


def test_what_auto_adds_for_a_model_is_left_out_where_it_does_not_suit(own: str) -> None:
    made = prepared(own, steps=2)
    assert "draws can be given for 1 step alone" in made.settings["left_out"]["joint-masks"]
    assert "without-random-layers" in made.stage.attacks and "joint-masks" not in made.stage.attacks


@pytest.mark.parametrize(
    ("model", "defense", "steps"),
    [
        ("lenet", "precode:position=nope", 1),
        ("lenet", "precode:modules=9", 1),
        ("convnet", "dp:norm=1,multiplier=1.1", 1),
        ("lenet", "dp:norm=1,multiplier=1.1", 2),
    ],
)
def test_why_a_defense_is_impossible_is_said_once(model: str, defense: str, steps: int) -> None:
    with pytest.raises(GradveilError) as caught:
        prepared(model, defense, False, steps)
    said = str(caught.value)
    assert "no attack suits" not in said and STANDARD not in said and "\n" not in said
    assert said.count("defense") <= 2 and len(said) < 300


def test_rounds_that_cannot_be_added_up_are_left_out_with_the_reason() -> None:
    made = prepared("lenet", "prune-feedback:0.9,then,clip:1", False)
    assert "masked" in made.stage.attacks and "masked-rounds" not in made.stage.attacks
    assert (
        "prune-feedback, where nothing after it clips, prunes or adds noise"
        in made.settings["left_out"]["masked-rounds"]
    )
    assert rounds(parse("prune-feedback:0.9,then,clip:1"), [find("masked-rounds")]) == 1


def test_layers_that_are_all_random_are_a_short_reason() -> None:
    reason = prepared("mlp", "precode:k=8,position=0", False).settings["left_out"][
        "without-random-layers"
    ]
    assert (
        reason
        == "every layer with a gradient is random: to leave them out would leave no parameter to "
        "match"
    )


@pytest.mark.parametrize(
    ("attack", "says"),
    [
        (
            "masked",
            "attack masked needs to know the pruned (whether zeros were cut off), which is known "
            "only under prune or prune-feedback, where no noise is added after it",
        ),
        ("masked+likelihood", "attack masked+likelihood needs to know the pruned"),
        ("masked-rounds", "attack masked-rounds needs to know the earlier"),
    ],
)
def test_an_attack_that_is_not_told_enough_is_named_as_the_user_did(attack: str, says: str) -> None:
    with pytest.raises(GradveilError) as caught:
        prepared("lenet", "none", False, auto=False, attacks={attack: find(attack)})
    assert says in str(caught.value)
