"""Attacks by name: constants, combinations, and attacks of the caller's own."""

from dataclasses import replace
from pathlib import Path

import pytest

import toys
from gradveil import attacks
from gradveil.attacks import PRESETS, GradientMatching, adam_cosine, dlg, find, names
from gradveil.attacks.distances import Cosine, Likelihood
from gradveil.attacks.hidden_draws import JointMasks
from gradveil.attacks.policy_views import KnownTransform
from gradveil.attacks.presets import ABOUT, NATS
from gradveil.core.errors import GradveilError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "masked+without-random-layers",
            replace(adam_cosine, distance=Cosine(nonzero=True, leave_out="random")),
        ),
        (
            "without-random-layers+without-defended-layers",
            replace(adam_cosine, distance=Cosine(leave_out="both")),
        ),
        (
            "transform-known+joint-masks",
            replace(adam_cosine, view=KnownTransform(), hidden=JointMasks()),
        ),
        (
            "masked-rounds+likelihood",
            replace(adam_cosine, distance=Likelihood(free=True, rounds=True), prior=NATS),
        ),
    ],
)
def test_a_combination_is_the_standard_attack_with_what_sets_each_apart(
    name: str, expected: GradientMatching
) -> None:
    assert find(name) == expected
    assert find("+".join(reversed(name.split("+")))) == expected
    assert name not in names()


def test_every_preset_says_what_it_does_when_to_use_it_and_what_it_costs() -> None:
    assert list(ABOUT) == list(PRESETS) and all(all(about) for about in ABOUT.values())


def test_a_published_attack_can_be_given_a_breaker() -> None:
    assert find("dlg+masked") == replace(dlg, distance=replace(dlg.distance, nonzero=True))


@pytest.mark.parametrize("name", names())
def test_the_standard_attack_adds_nothing(name: str) -> None:
    if isinstance(find(name), GradientMatching) and name != "adam-cosine":
        assert find(f"adam-cosine+{name}") == find(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("masked+nope", "unknown attack 'masked+nope': choose from adam-cosine, "),
        ("masked+", "unknown attack 'masked+'"),
        ("masked+masked", "names a part twice"),
        ("masked+closed-form", "closed-form matches no gradients"),
        (
            "transform-known+transform-drawn",
            "transform-known and transform-drawn cannot be combined, each has a view of its own",
        ),
        ("joint-noise+joint-masks", "each has a hidden of its own"),
        ("likelihood+adam-l2", "each has a distance of its own"),
        ("likelihood+early-step", "each has a prior of its own"),
    ],
)
def test_what_cannot_be_combined_is_refused_in_one_line(name: str, says: str) -> None:
    assert says in toys.refused(find, name)


@pytest.mark.parametrize("name", names())
def test_every_preset_is_a_constant_of_the_package_that_dir_lists(name: str) -> None:
    constant = name.replace("-", "_")
    assert getattr(attacks, constant) is PRESETS[name] is find(name)
    assert constant in dir(attacks) and constant in attacks.__all__


def test_a_constant_with_other_settings_is_typed() -> None:
    """Mypy checks this file strictly: `replace` would not pass on a bare `Attack`."""
    shorter: GradientMatching = replace(attacks.dlg, steps=300)
    assert shorter == replace(dlg, steps=300)


def test_an_unknown_attack_names_the_choices() -> None:
    with pytest.raises(GradveilError, match=r"choose from adam-cosine, .*averaged$"):
        find("magic")
    with pytest.raises(GradveilError, match=r"averaged, auto$"):
        find("magic", also=("auto",))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the current folder with attacks of the user's, and values that are none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_attacks.py").write_text(
        "from dataclasses import replace\n"
        "from gradveil.attacks import Attack, adam_cosine\n"
        "from gradveil.attacks.linear import LinearInversion\n"
        "from gradveil.attacks.priors import TotalVariation\n"
        "SMOOTH = replace(adam_cosine, prior=TotalVariation(0.5))\n"
        "LINEAR = LinearInversion()\n"
        "NUMBER = 3\n"
    )


@pytest.mark.usefixtures("own")
def test_an_attack_of_the_users_is_found_by_its_module_and_combined_if_it_matches_gradients() -> (
    None
):
    smooth = find("own_attacks:SMOOTH")
    assert isinstance(smooth, GradientMatching) and smooth != adam_cosine
    assert find("own_attacks:SMOOTH+masked") == replace(smooth, distance=Cosine(nonzero=True))
    assert find("own_attacks:LINEAR") == attacks.closed_form
    with pytest.raises(GradveilError, match="own_attacks:LINEAR matches no gradients"):
        find("masked+own_attacks:LINEAR")


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own_attacks:NUMBER", "is a whole number: expected a value of a subclass of"),
        ("own_attacks:LinearInversion", "is a class: name a value of it, such as NAME = Linear"),
        ("own_attacks:NONE", "'own_attacks' has no 'NONE'"),
        ("no_such_module:NAME", "there is no module 'no_such_module'"),
        ("own_attacks:", "cannot be read: write package.module:NAME"),
        ("own_attacks:__import__('os')", "cannot be read"),
        ("own_attacks:SMOOTH+nope", "unknown attack 'own_attacks:SMOOTH+nope'"),
    ],
)
def test_a_name_that_leads_to_no_attack_is_refused_in_one_line(name: str, says: str) -> None:
    assert says in toys.refused(find, name)
