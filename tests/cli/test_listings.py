"""The lists of what there is: every defense, for people and for programs."""

from typing import Any

from gradveil.defenses import REGISTRY, parse


def test_every_defense_is_listed_with_a_line_its_breakers_and_its_paper(gradveil: Any) -> None:
    listed = gradveil("defenses list --json").result["defenses"]
    assert [one["name"] for one in listed] == list(REGISTRY)
    for one in listed:
        assert one["line"] and (one["paper"] or one["name"] == "none")
        assert one["breakers"] == list(REGISTRY[one["name"]].breakers)
        assert type(parse(one["example"])) is REGISTRY[one["name"]]


def test_people_get_a_table_with_what_to_type(gradveil: Any) -> None:
    outcome = gradveil("defenses list")
    assert (
        outcome.status == 0
        and "prune:0.95" in outcome.shown
        and "precode:k=256,beta=1e-3" in outcome.shown
    )
    assert ",then," in outcome.shown and "package.module:Class(4)" in outcome.shown
    assert "none known" in outcome.shown.replace("\n", " ")


def test_another_word_than_list_is_refused(gradveil: Any) -> None:
    assert "show" in gradveil("defenses show").error
