"""Defenses as text: what is read, what is written back, and what is refused in one line."""

import sys
from pathlib import Path

import pytest

import toys
from gradveil.core.errors import GradveilError
from gradveil.defenses import (
    DPSGD,
    REGISTRY,
    Chain,
    Clipping,
    Defense,
    DropoutDefense,
    FeedbackPruning,
    GaussianNoise,
    LaplacianNoise,
    PolicyDefense,
    Precode,
    Pruning,
    RandomPolicies,
    Soteria,
    as_defense,
    chain,
    parse,
)
from gradveil.transforms import Policy

HYBRID = PolicyDefense(Policy.parse("3-1-7+43-18-18"))
TEXTS: dict[str, Defense] = {
    "none": Defense(),
    "3-1-7+43-18-18": HYBRID,
    "translate_x(9)-contrast(6)": PolicyDefense(Policy.parse("translate_x(9)-contrast(6)")),
    "policy:none": PolicyDefense(Policy()),
    "policy:3-1,augment=no": PolicyDefense(Policy.parse("3-1"), augment=False),
    "random": RandomPolicies(),
    "random:3,seed=2": RandomPolicies(3, 2),
    "prune:0.95": Pruning(0.95),
    "prune:share=0.95": Pruning(0.95),
    "prune-feedback:0.99,momentum=0.9": FeedbackPruning(0.99, 0.9),
    "gaussian:1e-2": GaussianNoise(0.01),
    "laplacian:1e-2": LaplacianNoise(0.01),
    "clip:1": Clipping(1.0),
    "dp:norm=1,multiplier=1.1": DPSGD(1.0, 1.1),
    "dp:norm=1,multiplier=1.1,sample_rate=0.02": DPSGD(1.0, 1.1, 0.02),
    "soteria:0.8": Soteria(0.8),
    "soteria:0.8,layer=head": Soteria(0.8, "head"),
    "precode:k=256,beta=1e-3,position=features": Precode(),
    "precode:k=64,position=features.1|features,bits=yes": Precode(
        64, position="features.1|features", bits=True
    ),
    "dropout:0.5": DropoutDefense(0.5),
    "3-1-7+43-18-18,then,clip:1,then,gaussian:0.1": Chain(
        (HYBRID, Clipping(1.0), GaussianNoise(0.1))
    ),
    "precode:position=features.1,then,precode": Chain((Precode(position="features.1"), Precode())),
    "none,then,prune:0.5": Pruning(0.5),
}

SOURCE = """
from dataclasses import dataclass
from gradveil.core.errors import GradveilError
from gradveil.defenses import Defense


@dataclass(frozen=True)
class Level(Defense):
    bits: int
    label: str = "plain"

    def __post_init__(self):
        if self.bits < 1:
            raise GradveilError(f"bits {self.bits}: at least 1")


class Failing(Defense):
    def __init__(self):
        raise SystemExit(3)


class Plain:
    pass


def make():
    return Level(3)
"""


@pytest.fixture
def own_defenses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of a user's own in the current folder."""
    (tmp_path / "own_defenses.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_defenses", raising=False)
    return "own_defenses"


@pytest.mark.parametrize(
    ("call", "written"),
    [
        ("Level(4)", "Level(bits=4)"),
        ("Level( bits = -4 + 0 )", ""),
        ("Level(4, label='a,b')", "Level(bits=4, label='a,b')"),
        ("Level(bits=(4), label='plain')", "Level(bits=4)"),
    ],
)
def test_a_class_in_the_current_folder_is_made_of_literals_and_written_back(
    own_defenses: str, call: str, written: str
) -> None:
    if not written:
        with pytest.raises(GradveilError, match="is no literal"):
            parse(f"{own_defenses}:{call}")
        return
    defense = parse(f"3-1-7,then,{own_defenses}:{call}")
    assert str(defense) == f"3-1-7,then,{own_defenses}:{written}"
    assert parse(str(defense)) == defense


def test_a_defense_a_policy_and_a_text_are_taken_and_others_named_by_the_argument() -> None:
    assert as_defense("prune:0.5") == as_defense(Pruning(0.5)) == Pruning(0.5)
    assert as_defense(Policy.parse("3-1")) == parse("3-1")
    wrong = ((3, "mine: a whole number; expected"), (Pruning, "mine: the class Pruning;"))
    for given, says in wrong:
        with pytest.raises(GradveilError, match=says):
            as_defense(given, "mine")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_read_and_written_back(text: str) -> None:
    assert parse(text) == TEXTS[text]
    assert parse(str(TEXTS[text])) == TEXTS[text]


@pytest.mark.parametrize("name", REGISTRY)
def test_the_example_of_every_defense_can_be_read_and_is_its_own(name: str) -> None:
    kind = REGISTRY[name]
    assert type(parse(kind.example)) is kind and kind.line and (kind.paper or kind is Defense)


def test_policies_of_a_search_are_read_from_its_file(tmp_path: Path) -> None:
    with pytest.raises(GradveilError, match="no file of policies at"):
        parse(str(tmp_path / "policies.toml"))


def test_a_list_in_python_is_a_chain_and_chains_in_it_are_opened() -> None:
    assert chain([]) == Defense() and chain([Pruning(0.5)]) == Pruning(0.5)
    assert chain([parse("3-1-7,then,clip:1"), Pruning(0.5)]) == parse(
        "3-1-7,then,clip:1,then,prune:0.5"
    )


def test_a_position_may_be_a_number() -> None:
    assert Precode(position=3) == parse("precode:position=3")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "prune:1.5",
            "defense prune: share 1.5; it must be from 0 (nothing is cut) to below 1 "
            "(in 'prune:1.5'; prune has share)",
        ),
        ("prune:1", "share 1; it must be"),
        ("prune:nan", "share nan; it must be"),
        ("prune:-0.1", "share -0.1"),
        ("prune", "defense 'prune': share must be given, as in prune:0.95"),
        ("prune:much", "defense 'prune:much': share is 'much'; expected a number"),
        ("prune:0.5,size=2", "there is no setting 'size=2'; prune has share"),
        ("prune:0.5,0.6", "there is no setting '0.6'; prune has share"),
        ("prune:0.5,share=0.6", "share is set twice"),
        ("prune-feedback:0.9,momentum=1", "momentum 1; it must be from 0 to below 1"),
        ("gaussian:-1", "scale -1; it must be 0 or more"),
        ("laplacian:inf", "scale inf"),
        ("clip:0", "norm 0; it must be above 0"),
        ("dp:norm=1", "multiplier must be given, as in dp:norm=1,multiplier=1.1"),
        ("dp:norm=1,multiplier=0", "multiplier 0"),
        ("dp:norm=1,multiplier=1,sample_rate=2", "sample_rate 2"),
        ("soteria:80", "share 80"),
        ("dropout:1", "p 1; it must be from 0 to below 1"),
        ("precode:k=0", "k 0; the bottleneck needs at least 1"),
        ("precode:k=2.5", "k is '2.5'; expected a whole number"),
        ("precode:beta=-1", "beta -1"),
        ("precode:bits=maybe", "bits is 'maybe'; expected yes or no"),
        (
            "precode:256",
            "there is no setting '256'; precode has k, beta, position, modules, bits, seed",
        ),
        ("precode:position=a|a", "position 'a|a'; each bottleneck needs a position of its own"),
        ("precode:modules=2,position=a|b", "modules 2 at 'a|b'"),
        ("random:0", "count 0; there must be at least 1"),
        ("random:x", "count is 'x'; expected a whole number"),
        ("none:3", "none has no settings"),
        ("policy", "policy must be given"),
        ("3-99", "transformation 99 is out of range"),
        ("foo", "unknown defense 'foo': choose from none, policy, random, prune"),
        ("Prune:0.5", "unknown defense 'Prune'"),
        ("", "unknown defense ''"),
        ("prune:0.5,then,", "unknown defense ''"),
        (
            "prune:0.9,then,3-1-7",
            "3-1-7 changes the images, which come before the gradients that prune:0.9 changes; "
            "put it first",
        ),
        (
            "clip:1,then,dropout:0.5",
            "dropout:0.5 changes the model, which comes before the gradients",
        ),
        ("gaussian:0.1,then,clip:1", "clip:1 would clip the noise of gaussian:0.1 too; clip first"),
        (
            "dp:norm=1,multiplier=1,then,clip:1",
            "clip:1 would clip the noise of dp:norm=1,multiplier=1 too",
        ),
        ("prune:0.5,then,dp:norm=1,multiplier=1", "it must come before prune:0.5"),
        ("precode,then,precode:k=3", "two PRECODE modules at position 'features'"),
        ("3-1-7,then,random", "would crop and flip twice"),
        ("\uff13-1-7", "defense '\uff13-1-7': write its digits as 0 to 9"),
        ("prune:0.\u0669", "write its digits as 0 to 9"),
        ("3-\u00b2", "write its digits as 0 to 9"),
        (",then,".join(["prune:0.5"] * 21), "a chain of 21 defenses: at most 20 can be joined"),
        (",then,".join(["none"] * 10**5), "a chain of 100000 defenses: at most 20 can be joined"),
        ("precode:k=1048577", "k 1048577; it may be at most 1,048,576"),
        ("random:10001", "count 10001; there may be at most 10,000"),
        ("foo:3", "unknown defense 'foo': choose from none"),
        ("nowhere.to:Class(4)", "there is no module 'nowhere'"),
        ("own_defenses:Absent", "'own_defenses' has no 'Absent'; it has Level, Failing"),
        ("own_defenses:Level(1, 2, 3)", "takes from 2 to 3 positional arguments but 4 were given"),
        ("own_defenses:Level(size=3)", "unexpected keyword argument 'size'; it takes (bits: int"),
        ("own_defenses:Level", "missing 1 required positional argument: 'bits'"),
        ("own_defenses:Level(0)", "bits 0: at least 1"),
        ("own_defenses:Level(bits)", "the argument bits is no literal; write numbers"),
        ("own_defenses:Level(__import__('os'))", "the argument __import__('os') is no literal"),
        ("own_defenses:Level(*[4])", "the argument *[4] is no literal"),
        ("own_defenses:Level(**{'bits': 4})", "write each argument by itself, without **"),
        ("own_defenses:Level(4", "cannot be read: write package.module:Class(...)"),
        ("own_defenses:Level(4)(5)", "cannot be read: write package.module:Class(...)"),
        ("own_defenses:Level(4) + 1", "cannot be read: write package.module:Class(...)"),
        (f"own_defenses:Level({'(' * 3_000})", "a text of more than 2,000 letters"),
        (f"own_defenses:Level({'-' * 900}1)", "1 is no literal; write numbers"),
        ("own_defenses:Plain(3)", "own_defenses:Plain is a class, but no subclass of gradveil's"),
        ("own_defenses:make", "own_defenses:make is a function, but no subclass of gradveil's"),
        ("own_defenses:Failing", "could not be made: SystemExit: 3; it takes ()"),
    ],
)
@pytest.mark.usefixtures("own_defenses")
def test_what_cannot_be_is_refused_in_one_line(text: str, says: str) -> None:
    assert says in toys.refused(parse, text)
