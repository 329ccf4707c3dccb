"""policies.toml is read back by name and by rank, and any other file is refused in one line."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import toys
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.formats import Quantity
from gradveil.search.results import SearchResult, TriedPolicy, policies_text, trials_text
from gradveil.transforms import Policy

QUANTITIES = ("over_blind", "accuracy")


def found(number: int, policy: str, mean: float, state: str = "scored", n: int = 8) -> TriedPolicy:
    quantities = {"over_blind": Quantity(mean, 0.25, n), "accuracy": Quantity(-63.0, None, 1)}
    return TriedPolicy(number, Policy.parse(policy), state, quantities)


def result(hybrid: str | None = "3-1-7+43-18-18", data: str = "fashion-mnist-mini") -> SearchResult:
    kept = (found(4, "3-1-7", -1.23456789), found(0, "43-18-18", 0.5), found(9, "none", 1.0))
    return SearchResult(
        Path("run"),
        {"data": data, "race": True, "checkpoint": None, "threshold": -85.0, "trials": 10},
        (*kept, found(5, "9", 7.0, "dropped", 2)),
        kept,
        (),
        None if hybrid is None else Policy.parse(hybrid),
        "" if hybrid else "only one policy was kept",
        None,
        (),
        "gradveil",
        "run/study.journal",
        {},
        (),
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "policies.toml").write_text(policies_text(result()))
    return tmp_path / "policies.toml"


@pytest.mark.parametrize(
    ("which", "policy"),
    [
        ("hybrid", "3-1-7+43-18-18"),
        ("best", "3-1-7"),
        ("1", "3-1-7"),
        ("2", "43-18-18"),
        ("3", "none"),
    ],
)
def test_a_policy_is_found_by_its_name_or_rank(path: Path, which: str, policy: str) -> None:
    assert Policy.load(path, which) == Policy.find(f"{path}:{which}") == Policy.parse(policy)


def test_without_a_name_it_is_the_hybrid(path: Path) -> None:
    assert (
        str(Policy.load(path))
        == str(Policy.load(str(path)))
        == str(Policy.find(str(path)))
        == "3-1-7+43-18-18"
    )


def test_what_is_no_path_is_a_policy() -> None:
    assert Policy.find("3-1-7+translate_x(9)") == Policy.parse("3-1-7+translate_x(9)")


def test_without_a_hybrid_the_best_is_used_and_said(tmp_path: Path) -> None:
    path = tmp_path / "policies.toml"
    path.write_text(policies_text(result(hybrid=None)))
    with pytest.warns(
        GradveilWarning,
        match=r"holds no hybrid \(only one policy was kept\): the best policy, 3-1-7, is used",
    ):
        assert str(Policy.load(path)) == "3-1-7"


def test_the_file_holds_settings_and_figures_with_n_and_error(path: Path) -> None:
    read = tomllib.loads(path.read_text())
    assert read["search"] == {
        "data": "fashion-mnist-mini",
        "race": True,
        "threshold": -85.0,
        "trials": 10,
    }
    first = read["policy"][0]
    assert first == {
        "rank": 1,
        "policy": "3-1-7",
        "trial": 4,
        "over_blind": {"mean": -1.23457, "error": 0.25, "n": 8},
        "accuracy": {"mean": -63.0, "n": 1},
    }


DIGESTS = tuple(f"{number:016x}" for number in range(3))


def test_a_policy_of_the_file_tells_the_images_that_scores_used(tmp_path: Path) -> None:
    path = tmp_path / "policies.toml"
    path.write_text(policies_text(replace(result(), scored=DIGESTS)))
    for which in ("hybrid", "best", "2"):
        assert Policy.load(path, which).scored_on == DIGESTS
        assert Policy.find(f"{path}:{which}").scored_on == DIGESTS


def test_a_file_of_an_older_version_is_read_and_tells_no_images(path: Path) -> None:
    assert "[images]" not in path.read_text()
    assert Policy.load(path).scored_on == () and str(Policy.load(path, "2")) == "43-18-18"


def test_a_file_stays_small_and_can_be_read_whatever_number_of_images_was_scored(
    tmp_path: Path,
) -> None:
    path = tmp_path / "policies.toml"
    for count, most in ((1_100, 25_000), (60_000, 1_300_000)):
        many = tuple(f"{number * 7919:016x}" for number in range(count))
        path.write_text(policies_text(replace(result(), scored=many)))
        assert path.stat().st_size < most and Policy.load(path).scored_on == many


@pytest.mark.parametrize(
    ("images", "says"),
    [
        ('scored = ["0123456789abcdeX"]', "images.scored[0]: expected str matching regex"),
        ('scored = ["0123456789abcdef", "0123"]', "images.scored[1]: expected str matching regex"),
        ("scored = [7]", "images.scored[0]: expected str, got int"),
        ('scored = "0123456789abcdef"', "images.scored: expected array, got str"),
        ("", "images.scored: missing"),
        ('scored = ["0123456789abcdef', "is damaged, or no TOML"),
    ],
)
def test_damaged_digests_are_one_line_and_never_taken_for_none(
    path: Path, images: str, says: str
) -> None:
    path.write_text(f"{path.read_text()}\n[images]\n{images}\n")
    said = toys.refused(Policy.load, path)
    assert says in said and str(path) in said and "damaged" in said


@pytest.mark.parametrize("name", ['folder:a "b" \\ c', "folder:\x7f\t\n", "folder:ä😀"])
def test_any_name_survives_the_way_through_the_file(name: str) -> None:
    assert tomllib.loads(policies_text(result(data=name)))["search"]["data"] == name


def test_every_trial_is_a_line_of_the_table() -> None:
    lines = trials_text(result()).splitlines()
    measures = (f"{name}_{part}" for name in QUANTITIES for part in ("mean", "error", "n"))
    assert lines[0] == ",".join(["trial", "policy", "state", *measures])
    assert (
        lines[1] == "4,3-1-7,scored,-1.23456789,0.25,8,-63.0,,1"
        and lines[4].startswith("5,9,dropped,7.0")
        and len(lines) == 5
    )


def broken(text: str) -> str:
    return policies_text(result()).replace('policy = "43-18-18"', text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("best = ", "is damaged, or no TOML"),
        ("", "is no file of `gradveil search`: its format is None"),
        ('format = "other"', "its format is 'other', expected 'gradveil policies 1'"),
        ('format = "gradveil policies 1"\nbest = "3"', "policy: missing"),
        (
            'format = "gradveil policies 1"\nbest = 3\n[[policy]]\npolicy = "3"',
            "best: expected str, got int",
        ),
        (broken('policy = "99"'), "is damaged: policy '99'"),
        (broken("policy = 3"), "policy[1].policy: expected str, got int"),
    ],
)
def test_a_damaged_or_foreign_file_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "policies.toml"
    path.write_text(text)
    said = toys.refused(Policy.load, path, "2")
    assert says in said and str(path) in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("none.toml", "no file of policies at none.toml: `gradveil search` writes one"),
        ("none.toml:best", "no file of policies at none.toml"),
        (".", "policy '.'"),
    ],
)
def test_a_file_that_is_not_there_is_one_line(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GradveilError, match=says):
        Policy.find(text)


@pytest.mark.parametrize("which", ["0", "4", "-1", "worst", "", "²"])
def test_an_unknown_name_or_rank_is_refused_with_the_choices(path: Path, which: str) -> None:
    with pytest.raises(GradveilError, match=r"choose hybrid, best, or a rank from 1 to 3"):
        Policy.load(path, which)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_folder_and_bytes_are_no_file_of_policies(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "policies.toml"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(GradveilError, match=r"cannot read|is damaged"):
        Policy.load(path)
