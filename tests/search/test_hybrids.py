"""Which policies are the same, and which can stand together."""

import pytest

from gradveil.search.run import hybrid_note, idle_note
from gradveil.search.space import distinct, functions, make_hybrid
from gradveil.transforms import Policy


def policies(*texts: str) -> list[Policy]:
    return [Policy.parse(text) for text in texts]


@pytest.mark.parametrize(
    ("ranked", "members", "hybrid"),
    [
        (("3-1-7", "43-18-18", "15"), 2, "3-1-7+43-18-18"),
        (("3-1-7", "43-18-18", "15"), 3, "3-1-7+43-18-18+15"),
        (("3-1-7", "7-15", "15"), 2, "3-1-7+15"),  # 7-15 shares 7
        (("24", "42-3", "48", "15"), 2, "24+15"),  # the same shift under three numbers
        (("9", "22-3", "15"), 2, "9+15"),  # equalize has no magnitude
        (("none", "3", "15"), 2, "3+15"),
        (
            ("3-1", "28", "39-28", "0-29", "1-7", "15"),
            2,
            "3-1+15",
        ),  # these change nothing: solarize(0), color(0), inverted twice
        (("3-28", "28-15"), 2, "3-28+28-15"),
    ],
)
def test_members_come_best_first_and_share_no_function(
    ranked: tuple[str, ...], members: int, hybrid: str
) -> None:
    found, why = make_hybrid(policies(*ranked), members)
    assert str(found) == hybrid and not why
    assert found is not None
    own = [set(member) for member in functions(found)]
    assert all(not own[i] & own[j] for i in range(len(own)) for j in range(i))


@pytest.mark.parametrize(
    ("ranked", "why"),
    [
        (("3",), "only one policy qualifies"),
        (("3-1", "1-7", "3"), "every other policy that qualifies shares a function with 3-1"),
        (("none",), "the policies that qualify change nothing"),
        (("none", "3"), "every other policy that qualifies shares a function with 3"),
        (("28", "39", "47-0"), "the policies that qualify change nothing"),
    ],
)
def test_where_two_cannot_stand_together_it_says_why(ranked: tuple[str, ...], why: str) -> None:
    assert make_hybrid(policies(*ranked), 2) == (None, why)


def test_of_equal_policies_the_first_counts() -> None:
    assert distinct(policies("3", "24", "42", "3", "3-24", "24-3", "none", "none")) == [
        0,
        1,
        4,
        5,
        6,
    ]
    assert distinct(policies("47-46-39", "29-9", "28-47-46", "47-39-9", "29-28-0", "28")) == [0, 4]


def test_color_does_nothing_to_gray_images() -> None:
    ranked = policies("3", "27", "15-12", "12-1")
    assert str(make_hybrid(ranked, 3, channels=3)[0]) == "3+27+15-12"
    assert str(make_hybrid(ranked, 3, channels=1)[0]) == "3+15-12+12-1"


def test_a_member_that_was_not_kept_is_named_with_its_rank() -> None:
    ranked = policies("48-3", "3-1", "3-7", "21-15", "9")
    hybrid, _ = make_hybrid(ranked, 2)
    assert str(hybrid) == "48-3+21-15"
    (note,) = hybrid_note(ranked, 2, hybrid)
    assert note == (
        "member 21-15 of the hybrid ranks 4 of 5: others before it share a function with a member "
        "or change nothing"
    )
    assert hybrid_note(ranked, 2, hybrid, race=True) == (
        note + "; one that the race dropped might have stood before it",
    )
    assert not hybrid_note(ranked, 4, hybrid) and not hybrid_note(ranked, 2, None)


def test_kept_policies_that_change_nothing_are_named() -> None:
    kept = policies("3", "0-0-28", "27")
    assert idle_note(kept) == ("kept, but no defense, since it changes no image: 0-0-28",)
    assert idle_note(kept, channels=1) == (
        "kept, but no defense, since it changes no image: 0-0-28, 27",
    )
    assert idle_note(policies("3-28", "3")) == ()


def test_a_member_right_behind_the_others_needs_no_reason() -> None:
    ranked = policies("3", "15", "1")
    assert hybrid_note(ranked, 1, make_hybrid(ranked, 2)[0]) == (
        "member 15 of the hybrid ranks 2 of 3",
    )
