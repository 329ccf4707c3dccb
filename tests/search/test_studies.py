"""A study hands out trials in order, keeps their results exactly, and can be resumed."""

import json
import math
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

import toys
from gradveil.core.errors import GradveilError
from gradveil.search.owners import Heartbeat
from gradveil.search.space import POLICIES, FinishedTrial, Trial, draw, policy_of
from gradveil.search.storage import without_password
from gradveil.search.study import Study
from gradveil.transforms import Policy


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deeper" / "study.log"


def numbers(trials: list[Trial[Policy]]) -> list[int]:
    return [trial.number for trial in trials]


def test_trials_come_in_order_in_groups_up_to_the_target(path: Path, searching: ModuleType) -> None:
    study = searching.join(path)
    groups = [study.claim(4, 10) for _ in range(4)]
    assert list(map(numbers, groups)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []]
    assert [trial.tried for trial in groups[1]] == [
        policy_of(draw(searching.SEED, number)) for number in (4, 5, 6, 7)
    ]
    assert study.busy(10) == 0  # they are its own
    assert list(map(numbers, [study.claim(4, 14) for _ in range(3)])) == [[10, 11], [12, 13], []]
    study.close()


def test_a_study_that_was_left_hands_out_the_same_groups_again(
    path: Path, searching: ModuleType
) -> None:
    study = searching.join(path)
    first, second = study.claim(4, 7), study.claim(4, 7)
    study.finish(first[1], "scored", searching.toy(first[1].tried))
    study.close()
    again = searching.join(path)
    assert again.claim(4, 12) == [first[0], first[2], first[3]]
    group = again.claim(4, 12)
    assert group[:3] == second and numbers(group) == [4, 5, 6, 7]
    again.close()


def test_what_one_holds_is_busy_for_the_other_until_it_leaves(
    path: Path, searching: ModuleType
) -> None:
    one, other = searching.join(path), searching.join(path)
    assert numbers(one.claim(3, 6)) == [0, 1, 2] and numbers(other.claim(3, 6)) == [3, 4, 5]
    assert one.claim(3, 6) == [] and one.busy(6) == 3 and one.busy(4) == 1 and one.busy(3) == 0
    other.close()
    assert numbers(one.claim(3, 6)) == [3, 4, 5] and one.busy(6) == 0
    one.close()


@pytest.mark.parametrize("kind", ["journal", "sqlite"])
def test_results_are_read_back_exactly_and_optuna_sees_their_states(
    kind: str, tmp_path: Path, searching: ModuleType
) -> None:
    storage = tmp_path / "study.log" if kind == "journal" else f"sqlite:///{tmp_path / 'study.db'}"
    study = searching.join(storage)
    trials = study.claim(5, 5)
    values = {"privacy": [0.1 + 0.2, 1e-310, -1 / 3], "accuracy": [-85.00000000000001]}
    for trial, state in zip(trials, ("scored", "inaccurate", "dropped", "scored"), strict=False):
        study.finish(trial, state, {"privacy": [1.0, math.inf]} if trial.number == 3 else values)
    study.close()
    again = searching.join(storage)
    kept = {name: tuple(found) for name, found in values.items()}
    expected: list[tuple[str, dict[str, tuple[float, ...]]]]
    expected = [
        ("scored", kept),
        ("inaccurate", kept),
        ("dropped", kept),
        ("scored", {"privacy": (1.0, math.inf)}),
    ]
    assert again.finished(9) == [
        FinishedTrial(n, trials[n].tried, state, found) for n, (state, found) in enumerate(expected)
    ]
    assert (
        again.finished(2) == again.finished(9)[:2]
        and again.finished(9)[0].values["privacy"][0] == 0.1 + 0.2
    )
    seen = again._study.trials
    assert [trial.state for trial in seen[:4]] == [
        TrialState.COMPLETE,
        TrialState.PRUNED,
        TrialState.PRUNED,
        TrialState.PRUNED,
    ]
    assert (
        seen[0].value == again.finished(1)[0].mean("privacy")
        and seen[1].user_attrs["result"]["state"] == "inaccurate"
    )
    assert seen[2].user_attrs["policy"] == str(trials[2].tried) and set(seen[2].params) == {
        "slot 1",
        "slot 2",
        "slot 3",
    }
    again.close()


def test_with_two_objectives_optuna_is_told_both_means(path: Path, searching: ModuleType) -> None:
    study = searching.join(path, "nsga2")
    (trial,) = study.claim(1, 1)
    study.finish(trial, "scored", {"privacy": [1.0, 2.0], "accuracy": [-3.0]})
    assert study._study.trials[0].values == [1.5, -3.0]
    assert [direction.name for direction in study._study.directions] == ["MINIMIZE", "MAXIMIZE"]
    study.close()


def test_the_first_result_of_a_trial_stays(path: Path, searching: ModuleType) -> None:
    study = searching.join(path)
    (trial,) = study.claim(1, 1)
    study.finish(trial, "scored", {"privacy": [1.0]})
    study.finish(trial, "inaccurate", {"privacy": [2.0]})
    study.close()
    again = searching.join(path)
    assert again.finished(1) == [FinishedTrial(0, trial.tried, "scored", {"privacy": (1.0,)})]
    again.close()


@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_a_study_left_while_it_claimed_asks_for_the_same_policies(
    sampler: str, tmp_path: Path, searching: ModuleType
) -> None:
    found = []
    for name, stop in (("whole", None), ("stopped", 75)):
        study = searching.join(tmp_path / name, sampler)
        while trials := study.claim(20, stop or 100):
            if stop and trials[0].number == 60:
                break
            for trial in trials:
                study.finish(trial, searching.state(trial), searching.toy(trial.tried))
        study.close()
        study = searching.join(tmp_path / name, sampler)
        searching.search(study, 20, 100, tmp_path / "log", 0.0)
        found.append([trial.tried for trial in study.finished(100)])
        study.close()
    assert found[0] == found[1] and found[0] != [
        policy_of(draw(searching.SEED, number)) for number in range(100)
    ]


def test_an_unfinished_line_of_a_journal_is_cut_off(path: Path, searching: ModuleType) -> None:
    study = searching.join(path)
    (trial,) = study.claim(1, 2)
    study.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code":8,"worker' + b"x" * 100_000)
    again = searching.join(path)
    assert again.claim(1, 2) == [trial]
    again.close()
    assert b"xxx" not in path.read_bytes() and path.read_bytes().startswith(whole)
    searching.join(path).close()


def test_a_damaged_line_of_a_journal_is_named_in_one_line(
    path: Path, searching: ModuleType
) -> None:
    searching.join(path).close()
    with path.open("a") as file:
        file.write("garbage\n")
    for _ in range(2):
        with pytest.raises(GradveilError, match=r"is damaged|is no journal") as caught:
            searching.join(path).claim(1, 2)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [300, pytest.param(1500, marks=pytest.mark.slow)])
def test_trials_cost_little_and_are_read_quickly(
    count: int, path: Path, searching: ModuleType
) -> None:
    study = searching.join(path)
    values = {
        "privacy": [index / 7 for index in range(100)],
        "accuracy": [index / 3 for index in range(10)],
    }
    began = time.process_time()
    while trials := study.claim(50, count):
        for trial in trials:
            study.finish(trial, "scored", values)
    study.close()
    assert time.process_time() - began < count * 0.012
    began = time.process_time()
    again = searching.join(path)
    assert len(again.finished(count)) == count
    assert time.process_time() - began < 2
    began = time.process_time()
    for _ in range(50):
        again.claim(50, count)
        again.busy(count)
        again.finished(count)
    assert time.process_time() - began < 1
    again.close()


def test_a_heart_beats_on_after_a_beat_that_failed() -> None:
    beats = []

    def beat() -> None:
        beats.append(1)
        raise OSError("away")

    heart = Heartbeat(beat, every=0.01)
    until = time.monotonic() + 5
    while len(beats) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    heart.stop()
    count = len(beats)
    assert count >= 3
    time.sleep(0.05)
    assert len(beats) == count


@pytest.mark.parametrize(
    ("storage", "words"),
    [
        ("nonsense", "give a database such as"),
        ("nosuch://host/name", "give a database such as"),
        ("postgresql://me:hush-hush@127.0.0.1:1/name", "Connection refused"),
        ("postgresql://127.0.0.1:1/name?user=me&password=hush-hush", "Connection refused"),
        ("postgresql://me:hush-hush@host:port/name", "give a database such as"),
        ("sqlite:////no/such/folder/study.db", "unable to open"),
        ("sqlite:///:memory:", "ends with the process"),
        ("mysql://me:hush-hush@127.0.0.1/name", "the driver of this database is missing"),
    ],
)
def test_a_storage_that_cannot_be_used_is_named_in_one_line_without_its_password(
    storage: str, words: str, searching: ModuleType
) -> None:
    began = time.monotonic()
    said = toys.refused(searching.join, storage)
    assert words in said and "hush" not in said and time.monotonic() - began < 10


def test_passwords_are_hidden() -> None:
    assert without_password("postgresql://me:a@b:c/d@host:1/x") == "postgresql://me:***@host:1/x"
    assert (
        without_password("postgresql://host/x?password=secret&user=me")
        == "postgresql://host/x?password=***&user=me"
    )
    assert without_password("sqlite:///a@b.db") == "sqlite:///a@b.db"


def test_a_path_that_is_no_journal_is_refused(tmp_path: Path, searching: ModuleType) -> None:
    (tmp_path / "text").write_text("hello\nworld\n")
    (tmp_path / "json").write_text("{}\n[]\n")
    for name, words in (
        ("text", "no journal"),
        ("json", "no journal"),
        ("", "it is a folder"),
        ("text/log", "cannot be used"),
    ):
        with pytest.raises(GradveilError, match=words) as caught:
            searching.join(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_a_database_that_is_no_regular_file_is_refused_and_not_opened(
    tmp_path: Path, searching: ModuleType
) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, kind in ((tmp_path / "fifo", "FIFO"), (tmp_path, "folder"), ("/dev/zero", "device")):
        with pytest.raises(GradveilError, match=f"it is a {kind}, no regular file"):
            searching.join(f"sqlite:///{path}")


def change(path: Path, number: int, **values: Any) -> None:
    """Change fields of the user attribute in a line of a journal that sets `result` or an owner."""
    lines = path.read_text().splitlines()
    entry = json.loads(lines[number])
    (found,) = entry["user_attr"].values()
    found.update(values)
    lines[number] = json.dumps(entry)
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("of", "values", "says"),
    [
        ("result", {"state": "good"}, r"trial 0: result\.state: invalid enum value 'good'"),
        ("result", {"values": {"privacy": "x"}}, r"trial 0: result\.values\[...\]: expected array"),
        ("result", {"values": {}}, r"trial 0: result\.values\.privacy: missing"),
        ("owner", {"pid": "x"}, r"owner:\w+: pid: expected int, got str"),
        ("owner", {"beat": "now"}, r"owner:\w+: beat: expected float \| null, got str"),
    ],
)
def test_an_attribute_of_another_type_is_named(
    path: Path, searching: ModuleType, of: str, values: dict[str, Any], says: str
) -> None:
    study = searching.join(path)
    (trial,) = study.claim(1, 2)
    study.finish(trial, "scored", searching.toy(trial.tried))
    study.close()
    lines = path.read_text().splitlines()
    number = max(at for at, line in enumerate(lines) if f'"user_attr":{{"{of}' in line)
    change(path, number, **values)
    again = searching.join(path)
    before = path.read_bytes()
    with pytest.raises(GradveilError, match=rf"^{path}: {says}"):
        again.finished(2) if of == "result" else again.claim(1, 2)
    assert path.read_bytes() == before
    again.close()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"op_code": 99}', "invalid value 99"),
        ('{"op_code": 8, "worker_id": "a", "trial_id": -1, "user_attr": {"a": 1}}', "trial_id"),
        ('{"op_code": 8, "worker_id": "a", "trial_id": 0}', "user_attr: missing"),
        ('{"op_code": 4, "worker_id": "a", "study_id": 0, "datetime_start": "then"}', "isoformat"),
        ("[" * 100_000, "brackets nested"),
        ("9" * 5_000, "4300 digits"),
    ],
)
def test_an_entry_of_another_type_is_named_by_its_line(
    path: Path, searching: ModuleType, line: str, says: str
) -> None:
    searching.join(path).close()
    whole = path.read_text()
    path.write_text(f"{whole}{line}\n{whole}")
    with pytest.raises(GradveilError, match=says) as caught:
        searching.join(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_other_settings_are_refused_by_name(path: Path, searching: ModuleType) -> None:
    searching.join(path).close()
    with pytest.raises(GradveilError, match="images 5 there, 6 here"):
        searching.join(path, settings={"score": "toy", "images": 6})
    with pytest.raises(GradveilError, match="seed 11 there, 12 here"):
        searching.join(path, seed=12)
    with pytest.raises(GradveilError, match="sampler random there, tpe here"):
        searching.join(path, "tpe")


def test_a_study_of_somebody_else_is_refused(tmp_path: Path, searching: ModuleType) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    optuna.create_study(storage=url, study_name="toy").add_trial(
        optuna.trial.create_trial(value=1.0)
    )
    with pytest.raises(GradveilError, match="is no search of gradveil"):
        searching.join(url)


def test_unknown_names_and_counts_are_refused(path: Path, searching: ModuleType) -> None:
    with pytest.raises(
        GradveilError, match="unknown sampler 'grid': choose from random, tpe, nsga2"
    ):
        searching.join(path, "grid")
    with pytest.raises(GradveilError, match="nsga2 takes two"):
        Study.open(path, "toy", {}, "random", 0, ("privacy", "accuracy"), POLICIES)
    assert not path.exists()
    study = searching.join(path)
    with pytest.raises(GradveilError, match="0 trials at once"):
        study.claim(0, 5)
    (trial,) = study.claim(1, 1)
    with pytest.raises(
        GradveilError, match="unknown state 'good': choose from scored, inaccurate, dropped"
    ):
        study.finish(trial, "good", {})
    study.close()


def test_the_dashboard_gets_a_path_or_a_url_without_the_password(
    path: Path, searching: ModuleType, postgres: Any
) -> None:
    for storage, shown in (
        (path, str(path)),
        (
            postgres.url,
            postgres.url.replace("secret-word", "***").replace("sql://", "sql+psycopg2://"),
        ),
    ):
        study = searching.join(storage)
        assert study.url == shown
        study.close()
