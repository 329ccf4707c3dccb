"""A folder belongs to one job, and nothing in it leads out of it."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import Struct

from gradveil.attacks import dlg
from gradveil.audits import AuditJob, Case
from gradveil.core.errors import GradveilError
from gradveil.core.files import digest
from gradveil.core.job_folder import Kind, claim, differences
from gradveil.core.locks import LOCK, locked
from gradveil.search import SearchJob
from gradveil.training import TrainingJob
from gradveil.training.job import RUN

CHESS = Kind("a game", "game of chess")


def test_a_folder_that_is_new_empty_or_the_jobs_own_is_not_refused(tmp_path: Path) -> None:
    CHESS.refuse_other(tmp_path / "new", {"a": 1})
    (tmp_path / LOCK).touch()
    (tmp_path / ".settings.json.x.part").touch()
    CHESS.refuse_other(tmp_path, {"a": 1})
    assert claim(tmp_path, {"a": 1, "b": (2, 3)}) and not claim(tmp_path, {"a": 1, "b": (2, 3)})
    CHESS.refuse_other(tmp_path, {"a": 1, "b": (2, 3)})
    assert CHESS.read(tmp_path) == {"a": 1, "b": [2, 3]} and not [*tmp_path.glob("*.part")]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"notes": ""}, "is not empty and holds no game of chess"),
        ({"settings.json": "["}, "is no JSON object of settings"),
        ({"settings.json": "3"}, "is no JSON object of settings"),
        ({"settings.json": '{"a": 2}'}, r"holds a game with other settings \(a 2 there, 1 here\)"),
        ({"settings.json": "{}"}, r"holds a game with other settings \(a None there, 1 here\)"),
    ],
)
def test_another_folder_is_refused_in_words(
    tmp_path: Path, files: dict[str, str], says: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(GradveilError, match=says):
        CHESS.refuse_other(tmp_path, {"a": 1})


def test_settings_of_the_wrong_type_are_told_by_file_and_field(tmp_path: Path) -> None:
    settings = TrainingJob("fashion-mnist-mini", "mlp").settings()
    claim(tmp_path, settings)
    assert RUN.read(tmp_path)["epochs"] == 60
    with pytest.raises(GradveilError, match=r"holds a training, no audit$"):
        Kind("an audit", "audit").read(tmp_path)
    path = tmp_path / "settings.json"
    for change, says in (
        ({"epochs": "60"}, "epochs: expected int, got str"),
        ({"batch_size": 0}, "batch_size: expected int >= 1"),
        ({"save_at": [1, None]}, r"save_at\[1\]: expected int, got null"),
    ):
        path.write_text(json.dumps(settings | change))
        with pytest.raises(GradveilError, match=rf"^{path}: {says}; choose another folder$"):
            RUN.read(tmp_path)
    odd: dict[str, Any] = {"lr": "high", "versions": {"gradveil": "9.9"}}
    path.write_text(json.dumps(settings | odd))
    with pytest.raises(GradveilError, match=r"lr: expected float, got str; gradveil 9\.9 wrote it"):
        RUN.read(tmp_path)
    del settings["momentum"]
    path.write_text(json.dumps(settings))
    with pytest.raises(GradveilError, match="momentum: missing"):
        RUN.read(tmp_path)


class Game(Struct):
    format: str
    moves: int


def test_another_format_of_settings_is_told(tmp_path: Path) -> None:
    kind = replace(CHESS, format="gradveil chess 2", schema=Game)
    claim(tmp_path, {"format": "gradveil chess 2", "moves": 3})
    assert kind.read(tmp_path)["moves"] == 3
    (tmp_path / "settings.json").write_text('{"format": "gradveil chess 2", "moves": "3"}')
    with pytest.raises(GradveilError, match="moves: expected int, got str"):
        kind.read(tmp_path)
    for other in ('"gradveil chess 3"', "3", "null"):
        (tmp_path / "settings.json").write_text(f'{{"format": {other}, "moves": 3}}')
        with pytest.raises(GradveilError, match="expected 'gradveil chess 2'"):
            kind.read(tmp_path)


def test_a_folder_whose_settings_are_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "settings.json")
    with pytest.raises(GradveilError, match="it is a FIFO"):
        CHESS.refuse_other(tmp_path, {"a": 1})
    with pytest.raises(GradveilError, match="it is a FIFO"):
        CHESS.read(tmp_path)
    with (
        pytest.raises(GradveilError, match="it is a FIFO"),
        locked(tmp_path / "settings.json"),
    ):
        pytest.fail("a FIFO was opened")
    for name in ("x" * 10_000, "/".join("x" * 2_000)):
        with pytest.raises(GradveilError, match=r"too long|folders deep"):
            CHESS.refuse_other(tmp_path / name, {"a": 1})


def test_only_files_within_the_folder_are_swept_away(tmp_path: Path) -> None:
    (tmp_path / "out" / ".x.part").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".y.part").touch()
    (tmp_path / "out" / "link").symlink_to(tmp_path / "other")
    assert claim(tmp_path / "out", {"a": 1})
    assert (tmp_path / "other" / ".y.part").exists() and (tmp_path / "out" / ".x.part").is_dir()


@pytest.mark.parametrize("inner", ["images", "case/images", "case/records.jsonl", "resume.ckpt"])
@pytest.mark.parametrize("target", ["/elsewhere", "../other", "/dev/null", "../other/file"])
def test_a_folder_in_which_a_link_leads_out_is_refused_before_anything_is_written(
    tmp_path: Path, inner: str, target: str
) -> None:
    out = tmp_path / "out"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    claim(out, {"a": 1})
    link = out / inner
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(Path(target) if target.startswith("/") else tmp_path / target[3:])
    with pytest.raises(GradveilError) as caught:
        CHESS.refuse_other(out, {"a": 1})
    assert str(caught.value) == (
        f"{link} is a link to {os.path.realpath(link)}, and a job writes only into its own folder: "
        "remove the link, or choose another --out"
    )
    link.unlink()
    CHESS.refuse_other(out, {"a": 1})


def test_the_folder_itself_may_be_a_link_and_links_may_stay_within_it(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    out = tmp_path / "runs" / "out"
    claim(out, {"a": 1})
    (out / "first").mkdir()
    (out / "second").symlink_to("first")
    (out / "first" / "up").symlink_to("..")
    (out / "latest").symlink_to(tmp_path / "disk" / "out" / "settings.json")
    CHESS.refuse_other(out, {"a": 1})
    (tmp_path / "link").symlink_to(out)
    CHESS.refuse_other(tmp_path / "link", {"a": 1})


def test_a_fifo_a_socket_or_a_device_in_the_folder_is_refused(tmp_path: Path) -> None:
    claim(tmp_path / "out", {"a": 1})
    fifo = tmp_path / "out" / "hparams.yaml"  # which Lightning would open, and wait for ever
    os.mkfifo(fifo)
    with pytest.raises(GradveilError, match=rf"^{fifo} is a FIFO, no file of a job: remove it"):
        CHESS.refuse_other(tmp_path / "out", {"a": 1})


KINDS: dict[str, dict[str, Any]] = {
    "a training": {"epochs": 3, "policy": "none", "lr": 0.1},
    "a case of an audit": {"attacks": {"dlg": "x"}, "policy": "none"},
    "an audit": {"attacks": ["auto"], "cases": []},
    "a search": {"trials": 8, "attack": "dlg"},
}


@pytest.mark.parametrize("there", KINDS)
@pytest.mark.parametrize("here", KINDS)
def test_a_folder_of_another_kind_of_job_is_named_by_its_kind_alone(
    tmp_path: Path, there: str, here: str
) -> None:
    claim(tmp_path, KINDS[there])
    if there == here:
        CHESS.refuse_other(tmp_path, KINDS[here])
        return
    with pytest.raises(GradveilError) as caught:
        CHESS.refuse_other(tmp_path, KINDS[here])
    assert str(caught.value) == f"{tmp_path} holds {there}, not {here}: choose another --out"


def test_the_real_jobs_are_told_apart(tmp_path: Path) -> None:
    audit = AuditJob("mlp", "fashion-mnist-mini", {"dlg": dlg}, images=4)
    asked = audit.settings()
    jobs: dict[str, dict[str, Any]] = {
        "a training": TrainingJob("fashion-mnist-mini", "mlp").settings(),
        "an audit": asked | {"cases": [Case().plain()], "attacks": ["dlg"]},
        "a case of an audit": asked | {"attacks": {"dlg": repr(dlg)}},
        "a search": SearchJob(data="fashion-mnist-mini", model="mlp").settings(),
    }
    for there, settings in jobs.items():
        claim(tmp_path / there, settings)
        for here, wanted in jobs.items():
            if there != here:
                with pytest.raises(
                    GradveilError, match=f"holds {there}, not {here}: choose another --out$"
                ):
                    CHESS.refuse_other(tmp_path / there, wanted)


def test_of_many_differences_three_are_named_and_the_rest_counted() -> None:
    there: dict[str, Any] = dict.fromkeys("abcde", 1)
    assert (
        differences(there, dict.fromkeys("abcde", 2))
        == "a 1 there, 2 here, b 1 there, 2 here, c 1 there, 2 here and 2 more"
    )
    assert "more" not in differences(there, there | dict.fromkeys("abc", 2))


def test_a_long_difference_is_only_named() -> None:
    there: dict[str, Any] = {"a": 1, "b": "x" * 61, "c": [1]}
    assert differences(there, {"a": 2, "b": "y", "c": (1,)}) == "a 1 there, 2 here, other b"
    assert not differences(json.loads(json.dumps(there)), there)


def test_a_digest_is_of_names_types_shapes_and_values() -> None:
    one = torch.arange(6)
    others = [
        {"b": one},
        {"a": one.int()},
        {"a": one.view(2, 3)},
        {"a": one + 1},
        {"a": one, "b": one},
    ]
    assert (
        digest({"a": one}) == digest({"a": one.clone()})
        and len({digest(other) for other in [{"a": one}, *others]}) == 6
    )
