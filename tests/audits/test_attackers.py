"""Which attacks a defense meets, and that each of them is told what it needs and no more."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import pytest
import torch

from gradveil.attacks import PRESETS, Attack, GradientMatching, adam_cosine, find, raced
from gradveil.attacks.priors import TotalVariation
from gradveil.audits.attackers import (
    PUBLIC,
    ROUNDS,
    automatic,
    check_told,
    granted,
    in_words,
    rounds,
    without_name,
)
from gradveil.audits.job import AuditJob, Case
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.types import MEANINGS, Batch, Gradients, Knowledge, Observation
from gradveil.defenses import REGISTRY, Defense, Moment, State, chain, parse
from gradveil.models import build

MEANS = torch.zeros(10, 1, 28, 28)
TOLD = (
    "transform",
    "policy",
    "means",
    "random_layers",
    "defended_layers",
    "pruned",
    "noise",
    "train_masks",
    "earlier",
)


def seen(defense: str, rounds: int = 1) -> Observation:
    batch = Batch(
        torch.rand(1, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.tensor([3])
    )
    client = Client(
        build("lenet", channels=1, size=28, classes=10), classes=10, defense=parse(defense)
    )
    ((one, _),) = client.share_batches(
        [batch], torch.Generator().manual_seed(1), tell_defense=True, tell_draws=True, rounds=rounds
    )
    return one


def test_every_breaker_is_declared_by_a_defense_and_every_declared_attack_exists() -> None:
    declared = {name for kind in REGISTRY.values() for name in kind.breakers}
    of_clients = {"labels", "statistics"}  # that no defense gives away
    knowing = {name for name, attack in PRESETS.items() if {*attack.needs} - of_clients}
    assert knowing <= declared <= set(PRESETS)
    for kind in REGISTRY.values():
        assert {*kind.strongest, *kind.instead} - {None} <= {*kind.breakers}


def test_only_what_changes_nothing_is_listed_without_a_breaker() -> None:
    assert [kind for kind in REGISTRY.values() if not kind.breakers] == [Defense]


@dataclass(frozen=True)
class Halved(Defense):
    """A user's own, of which no breaker is known."""

    def protect_gradients(
        self, gradients: Gradients, moment: Moment, state: State, rng: torch.Generator
    ) -> tuple[Gradients, State]:
        return {name: value / 2 for name, value in gradients.items()}, state


@dataclass(frozen=True)
class Broken(Halved):
    breakers = ("masked",)
    strongest = ("masked",)

    def tell(self, knowledge: Knowledge, model: torch.nn.Module) -> Knowledge:
        return replace(knowledge, pruned=bool(model.head))  # none without a model


@dataclass(frozen=True)
class Misspelled(Halved):
    breakers = ("maskd",)


def test_a_user_s_own_defense_meets_what_it_declares_alone_and_in_a_chain() -> None:
    assert automatic(Halved()) == ("adam-cosine", "raced", "closed-form")
    assert automatic(Broken()) == ("adam-cosine", "raced", "masked", "raced+masked", "closed-form")
    names = automatic(chain([parse("3-1-7"), Broken(), Halved()]))
    assert "transform-known+masked" in names and len(names) == 12
    with pytest.raises(
        GradveilError, match=r"Misspelled declares a breaker: unknown attack 'maskd'"
    ):
        automatic(Misspelled())


def test_a_stronger_breaker_stands_for_a_weaker_one_of_another_part() -> None:
    names = automatic(parse("3-1-7,then,prune:0.9,then,prune-feedback:0.9"))
    assert [name for name in names if "+" in name] == [
        "transform-known+masked-rounds",
        "raced+transform-known+masked-rounds",
        "raced+masked-rounds",
    ]


def test_auto_on_batches_matches_what_dense_layers_tell_and_peels() -> None:
    names = automatic(parse("none"), batch_size=4)
    matching = "adam-cosine", "raced", "features", "raced+features"
    first, second, *more = matching
    assert names == (first, second, "dense-matching", *more, "dense-inversion", "peeling")
    larger = automatic(parse("none"), batch_size=32)
    assert larger == ("adam-cosine", "raced", "dense-matching", "peeling")


def test_auto_is_the_standard_attack_all_breakers_alone_and_together_and_the_closed_form() -> None:
    assert automatic(parse("none")) == ("adam-cosine", "raced", "closed-form")
    both = automatic(parse("precode:k=8,then,prune:0.9"))
    single = "without-random-layers", "joint-noise", "masked"
    assert both == (
        "adam-cosine",
        "raced",
        *single,
        "without-random-layers+masked",
        "joint-noise+masked",
        "raced+without-random-layers+masked",
        "raced+joint-noise+masked",
        "closed-form",
    )


@pytest.mark.parametrize(
    "defense",
    [
        *(
            "none",
            "3-1-7",
            "prune:0.9",
            "prune-feedback:0.9",
            "gaussian:1e-3",
            "dp:norm=1,multiplier=0.1",
            "soteria:0.5",
            "precode:k=8",
        ),
        *(
            "3-1-7,then,precode:k=8,then,soteria:0.5",
            "dropout:0.5,then,prune-feedback:0.9",
            "gaussian:1e-3,then,prune-feedback:0.9",
        ),
    ],
)
def test_each_attack_of_auto_is_told_all_it_needs_and_nothing_else(defense: str) -> None:
    protection = parse(defense)
    attacks = {name: find(name) for name in automatic(protection)}
    one = seen(defense, rounds(protection, attacks.values()))
    for name, attack in attacks.items():
        told = granted(one, attack, MEANS).knowledge
        told.need(*attack.needs, by=name)
        assert {field for field in TOLD if getattr(told, field) is not None} == set(
            attack.needs
        ) - {"labels"}
        assert told.labels is not None


def test_only_an_attack_that_looks_at_several_rounds_sees_more_than_the_first() -> None:
    first, last = seen("prune-feedback:0.9"), seen("prune-feedback:0.9", ROUNDS)
    plain, several = (granted(last, find(name), MEANS) for name in ("masked", "masked-rounds"))
    assert all(torch.equal(plain.gradients[name], value) for name, value in first.gradients.items())
    assert plain.knowledge.earlier is None and several.knowledge.momentum == 0.9
    assert several.knowledge.earlier is not None and len(several.knowledge.earlier) == ROUNDS - 1


def test_rounds_are_shared_only_where_residuals_are_fed_back_and_looked_at() -> None:
    looking, not_looking = [find("masked-rounds")], [find("masked")]
    assert rounds(parse("prune-feedback:0.9"), looking) == ROUNDS
    assert (
        rounds(parse("prune-feedback:0.9"), not_looking) == rounds(parse("prune:0.9"), looking) == 1
    )


@pytest.mark.parametrize(
    ("defense", "attack", "says"),
    [
        ("none", "adam-cosine", "labels"),
        ("gaussian:1e-2", "likelihood", "labels, gaussian noise 0.01"),
        (
            "dp:norm=2,multiplier=1",
            "averaged",
            "labels, gaussian noise 0.5",
        ),  # of the mean of four images
        ("prune-feedback:0.9", "masked-rounds", f"labels, {ROUNDS} rounds"),
        ("3-1-7", "transform-known", "labels, policy and its draws"),
    ],
)
def test_what_is_told_is_put_in_words(defense: str, attack: str, says: str) -> None:
    model = build("lenet", channels=1, size=28, classes=10)
    assert in_words(find(attack), parse(defense), model, 4, "known") == says
    assert in_words(find(attack), parse(defense), model, 4, "inferred") == says.replace(
        "labels", "labels it inferred"
    )


def test_every_need_of_a_preset_has_words_and_is_a_field() -> None:
    needed = {need for attack in PRESETS.values() for need in attack.needs}
    assert needed - {"labels"} <= set(MEANINGS) < {field.name for field in fields(Knowledge)}


def test_an_error_names_the_defenses_under_which_a_need_is_known() -> None:
    found = {}
    for need in {need for attack in PRESETS.values() for need in attack.needs} - {*PUBLIC}:
        attack = next(attack for attack in PRESETS.values() if need in attack.needs)
        with pytest.raises(GradveilError, match="is known only ") as caught:
            check_told("any", attack, [seen("none")])
        found[need] = str(caught.value).partition(" known only ")[2].partition(",")[0]
    assert found == {
        "transform": "under policy or random",
        "policy": "under policy or random",
        "random_layers": "under precode or dropout",
        "train_masks": "under dropout",
        "defended_layers": "under soteria",
        "pruned": "under prune or prune-feedback",
        "earlier": "under prune-feedback",
        "statistics": "in train mode with layers that keep running statistics",
        "noise": "under gaussian or laplacian or dp",
    }


TERMS = ("none", 1), ("3-1-7+43-18-18", 4), ("gaussian:0.1", 4), ("prune:0.9", 1)


def terms(attacks: Mapping[str, Attack], races: bool = False) -> dict[str, tuple[int, int]]:
    """Return the restarts and steps of the searches with or without a race."""
    return {
        name: (attack.restarts, attack.steps)
        for name, attack in attacks.items()
        if isinstance(attack, GradientMatching) and bool(attack.race.heats) == races
    }


@pytest.mark.parametrize("named", [(), ("adam-cosine",), ("transform-known", "likelihood")])
@pytest.mark.parametrize(("defense", "restarts"), TERMS)
def test_all_searches_of_auto_have_equal_restarts_and_steps_also_those_that_are_named_too(
    defense: str, restarts: int, named: tuple[str, ...]
) -> None:
    given = {name: find(name) for name in named if name in automatic(parse(defense))}
    job = AuditJob("lenet", "fashion-mnist-mini", given, auto=True)
    attacks = job.attacks_on(Case(parse(defense)))
    assert {*terms(attacks)} | {*terms(attacks, races=True)} >= {"adam-cosine", "raced"}
    assert {*terms(attacks).values()} == {(restarts, 4_800)}
    assert {*terms(attacks, races=True).values()} == {(2, 2_400)}
    races = {a.race for a in attacks.values() if isinstance(a, GradientMatching) and a.race.heats}
    assert races == {raced.race}
    assert {*attacks} == {*automatic(parse(defense))}
    shorter = replace(job, share=0.1).attacks_on(Case(parse(defense)))
    assert {*terms(shorter).values()} == {(restarts, 480)}


def test_a_named_attack_keeps_settings_of_its_own_and_the_others_have_the_most_of_all() -> None:
    policy, longer = Case(parse("3-1-7")), replace(adam_cosine, steps=6_000, restarts=5)
    job = AuditJob("lenet", "fashion-mnist-mini", {"adam-cosine": longer}, auto=True)
    assert {*terms(job.attacks_on(policy)).values()} == {(5, 6_000)}
    assert job.attacks_on(policy)["adam-cosine"] is longer
    short = replace(adam_cosine, steps=300, prior=TotalVariation(1e-2))
    attacks = replace(job, attacks={"adam-cosine": short}).attacks_on(policy)
    assert attacks["adam-cosine"] is short
    assert attacks["adam-cosine-equal"] == replace(short, steps=4_800, restarts=4)
    others = {name: found for name, found in terms(attacks).items() if name != "adam-cosine"}
    assert {*others.values()} == {(4, 4_800)} and "transform-known" in others
    same = replace(job, attacks={"adam-cosine": short}, steps=9, restarts=6).attacks_on(policy)
    assert {*terms(same).values()} == {(6, 9)} and "adam-cosine-equal" not in same


def test_autos_own_attack_stays_beside_a_shorter_one_of_its_name() -> None:
    short = replace(adam_cosine, steps=5)
    job = AuditJob("lenet", "fashion-mnist-mini", {"adam-cosine": short}, auto=True)
    attacks = job.attacks_on(Case())
    assert attacks["adam-cosine"] is short
    assert attacks["adam-cosine-equal"] == adam_cosine
    taken = {"adam-cosine": short, "adam-cosine-equal": short}
    with pytest.raises(GradveilError, match="attack adam-cosine-equal: auto gives adam-cosine"):
        replace(job, attacks=taken).attacks_on(Case())


def test_a_race_of_a_user_s_own_is_the_race_of_all_where_it_has_more_work() -> None:
    more = replace(raced, restarts=3)
    job = AuditJob("lenet", "fashion-mnist-mini", {"raced": more}, auto=True)
    attacks = job.attacks_on(Case(parse("prune:0.9")))
    assert terms(attacks, races=True) == {"raced": (3, 2_400), "raced+masked": (3, 2_400)}
    less = replace(job, attacks={"raced": replace(raced, restarts=1)})
    assert terms(less.attacks_on(Case(parse("prune:0.9"))), races=True) == {
        "raced": (1, 2_400),
        "raced+masked": (2, 2_400),
        "raced-equal": (2, 2_400),
    }


def test_attacks_that_auto_does_not_have_take_no_part_in_its_terms() -> None:
    named = {"lbfgs-cosine": find("lbfgs-cosine"), "dlg": find("dlg")}
    job = AuditJob("lenet", "fashion-mnist-mini", named, auto=True)
    attacks = job.attacks_on(Case())
    assert terms(attacks)["adam-cosine"] == (1, 4_800)
    assert {name: attacks[name] for name in named} == named


def test_an_audit_s_steps_and_restarts_are_those_of_all_attacks_of_auto() -> None:
    job = AuditJob("lenet", "fashion-mnist-mini", {}, auto=True)
    few = replace(job, restarts=2, steps=5).attacks_on(Case(parse("3-1-7")))
    assert {getattr(a, "steps", 5) for a in few.values()} == {5}
    assert {getattr(a, "restarts", 2) for a in few.values()} == {2}


@pytest.mark.parametrize("name", ["masked", "features"])
def test_a_reason_without_the_name_says_the_rest_and_any_other_reason_stays(name: str) -> None:
    assert without_name(name, f"attack {name} needs the labels") == "it needs the labels"
    for reason in ("features need the labels", "the first layer is no attack masked features"):
        assert without_name(name, reason) == reason
