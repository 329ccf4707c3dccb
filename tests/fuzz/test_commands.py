"""Every command with hostile arguments, files, folders and streams: done, or refused in one line.

No run may end in a traceback, hang, take gigabytes, or send a terminal codes; one that refuses a
folder leaves it as it is. Runs are forks of a process that has imported everything (`server.py`).
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fuzz.changes import broken, json_text
from fuzz.hostile import COMMANDS, Command, make_files, values
from gradveil.models import build
from gradveil.models.checkpoints import save_checkpoint

QUICK, LONG = 10, 1_000  # runs with hostile arguments
FOLDERS = (6, 150)  # runs on folders with a changed file
SECONDS = 300.0  # after which a run is ended: the machine may do other work too
REFUSED_IN = 10.0  # seconds of processor time
MEGABYTES = 1_500
LONGEST = 3_000
CODES = {
    "utf-8": ("utf-8", "strict"),
    "ascii": ("ascii", "strict"),
    "C": ("ascii", "surrogateescape"),
}
STREAMS = ("kept", "closed", "full", "gone")


@dataclass(frozen=True)
class Ended:
    """How a run ended, and what it wrote."""

    status: int
    shown: str
    said: str
    seconds: float
    megabytes: float


@dataclass
class Program:
    """The command line, in a folder of its own."""

    server: Connection
    folder: Path
    runs: int = 0
    seen: dict[int, int] = field(default_factory=dict)

    def run(
        self,
        words: Sequence[str],
        out: str = "kept",
        err: str = "kept",
        code: str = "utf-8",
        job: bool = False,
    ) -> Ended:
        """Run it; a `job` gets the stand-ins that make it quick."""
        asked = {
            "arguments": [os.fsencode(word).decode("latin1") for word in words],
            "folder": str(self.folder),
            "out": out,
            "err": err,
            "encoding": CODES[code],
            "seconds": SECONDS,
            "job": job,
            "environment": {"GRADVEIL_CACHE": str(self.folder.parent / "cache")},
        }
        self.server.send(asked)
        found = self.server.recv()
        for stream in ("shown", "said"):
            found[stream] = found[stream].encode("latin1").decode(errors="replace")
        ended = Ended(**found)
        self.runs += 1
        self.seen[ended.status] = self.seen.get(ended.status, 0) + 1
        return ended

    def tidy(self, kept: frozenset[str]) -> None:
        """Remove what a run wrote beside the hostile files."""
        for path in self.folder.iterdir():
            if path.name not in kept:
                remove(path)
        for path in self.folder.glob("folder*/*"):
            remove(path)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.fixture(scope="module")
def program(
    tmp_path_factory: pytest.TempPathFactory, start_process: Callable[..., BaseProcess]
) -> Iterator[Program]:
    folder = tmp_path_factory.mktemp("fuzz") / "work"
    folder.mkdir()
    ours, theirs = multiprocessing.Pipe()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("COLUMNS", "100"), ("TERM", "xterm")):
            patch.setenv(name, value)
        patch.setenv("XDG_DATA_HOME", str(folder / "no-data"))
        patch.delenv("GRADVEIL_DATA", raising=False)
        code = "from fuzz import server\nserver.serve(*arguments)"
        process = start_process(code, theirs, warned="ignore")
    theirs.close()  # a server that ends is an error here, and not waited for
    yield Program(ours, folder)
    ours.close()
    process.join(60)
    assert process.exitcode == 0


@pytest.fixture(scope="module")
def files(program: Program) -> list[str]:
    return make_files(program.folder)


def fault(ended: Ended) -> str | None:
    """What is wrong with how a run ended; None where it did its work or refused it in one line."""
    if ended.status not in (0, 1, 2):
        return f"status {ended.status}: {ended.said[-300:]}"
    if "Traceback" in ended.said or "Exception ignored" in ended.said:
        return f"a traceback: {ended.said[-500:]}"
    text = ended.shown + ended.said
    if not all(letter.isprintable() or letter == "\n" for letter in text):
        return f"letters that a terminal obeys: {text[:300]!r}"
    if ended.megabytes > MEGABYTES:
        return f"{ended.megabytes:.0f} MB"
    if ended.status == 2:
        lines = [line for line in ended.said.splitlines() if line.startswith("error: ")]
        if len(lines) != 1 or len(lines[0]) > LONGEST:
            return f"not one line: {ended.said[:300]}"
        if ended.seconds > REFUSED_IN:
            return f"{ended.seconds:.1f} s: {lines[0][:300]}"
    return None


def explored(examples: int, quick: bool, explore: Callable[[Callable[[int], int]], None]) -> None:
    """Call it so often, with a way to choose a number below another."""

    @settings(
        max_examples=examples,
        derandomize=quick,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        explore(lambda below: data.draw(st.integers(0, below - 1)))

    run()


def changed(command: Command, files: list[str], choose: Callable[[int], int]) -> dict[str, str]:
    """One or two options with hostile values."""
    options = list(command.arguments)
    found = {}
    for _ in range(1 + (choose(4) == 0)):
        option = options[choose(len(options))]
        choices = values(command.arguments[option][0], files)
        found[option] = choices[choose(len(choices))]
    return found


@pytest.mark.parametrize(
    "examples", [QUICK, pytest.param(LONG, marks=pytest.mark.slow)], ids=["quick", "long"]
)
def test_hostile_arguments_are_refused_in_one_line(
    program: Program, files: list[str], examples: int
) -> None:
    kept = frozenset(path.name for path in program.folder.iterdir())
    names = list(COMMANDS)

    def explore(choose: Callable[[int], int]) -> None:
        command = COMMANDS[names[choose(len(names))]]
        line = command.line(changed(command, files, choose))
        ended = program.run(line)
        program.tidy(kept)
        assert fault(ended) is None, [word[:80] for word in line]

    explored(examples, examples == QUICK, explore)


CLEAR = {
    "policy show": [
        ["3-1-7", "--image", name, "--out", "x.png"]
        for name in ("fifo", "socket", "link", "folder", "huge.png", "huge.bmp", "/dev/full")
    ],
    "audit": [
        ["--defense", text]
        for text in (
            *("precode:k=1000000000", "random:count=100000000", "long.toml", "dots.toml"),
            *("fifo.toml", "link.toml", ",then,".join(["clip:1"] * 2_000)),
        )
    ],
    "reconstruct": [
        ["--before", name, "--after", name]
        for name in ("huge.npz", "fifo.npz", "shape.safetensors", "lies.safetensors", "link.pt")
    ],
    "doctor": [["--checkpoint", name] for name in ("fifo.safetensors", "lies.safetensors")],
}


@pytest.mark.parametrize("name", CLEAR)
def test_what_never_ends_or_fills_the_memory_is_refused(program: Program, name: str) -> None:
    program.tidy(frozenset())  # a line before may have written a picture over one of the files
    assert make_files(program.folder)
    for words in CLEAR[name]:
        command = COMMANDS[name]
        line = [*command.words, *words] if name == "policy show" else [*command.line({}), *words]
        ended = program.run(line)
        assert fault(ended) is None and ended.status == 2, (words, ended)


def streams() -> list[tuple[str, str, str]]:
    found = [(out, err, "utf-8") for out in STREAMS for err in STREAMS]
    return [*found, ("kept", "kept", "ascii"), ("kept", "kept", "C"), ("closed", "gone", "ascii")]


@pytest.mark.parametrize(
    "name",
    [
        name if name == "policy show" else pytest.param(name, marks=pytest.mark.slow)
        for name in COMMANDS
    ],
)
def test_a_stream_that_is_closed_full_or_ascii_ends_no_run(
    program: Program, files: list[str], name: str
) -> None:
    assert files
    kept = frozenset(path.name for path in program.folder.iterdir())
    plain = program.run(COMMANDS[name].line({}))
    assert fault(plain) is None
    for out, err, code in streams():
        program.tidy(kept)
        ended = program.run(COMMANDS[name].line({}), out, err, code)
        wrote = plain.status == 0 or plain.shown
        wanted = {"full": 2, "gone": 1}.get(out, plain.status) if wrote else plain.status
        assert ended.status == wanted, (out, err, code, ended)
        assert err != "kept" or ended.status == 0 or fault(ended) is None, (out, err, code, ended)
    program.tidy(kept)


def test_names_of_files_and_classes_send_no_codes(program: Program, files: list[str]) -> None:
    assert files
    odd = "a\x1b[31m\x9b\u202e\r\nerror: b"
    folder = program.folder / "odd"
    shutil.copytree(program.folder / "photos", folder / odd)
    for part in ("train", "test"):
        (folder / odd / part / "a").rename(folder / odd / part / odd)
        (folder / odd / part / "b").rename(folder / odd / part / os.fsdecode(b"b\xff"))
    (folder / odd / "test" / odd / "0.png").write_bytes(b"broken")
    data = f"folder:odd/{odd}"
    for words in (["data", "verify", data], COMMANDS["audit"].line({"--data": data})):
        ended = program.run(words)
        assert fault(ended) is None and ended.status in (1, 2), ended
    shutil.copy(program.folder / "photos/test/a/0.png", folder / odd / "test" / odd / "0.png")
    for code in CODES:
        line = COMMANDS["audit"].line({"--data": data, "--out": f"odd/{code}{odd}"})
        ended = program.run(line, code=code)
        assert fault(ended) is None and ended.status == 0, ended
        heading = next(line for line in ended.shown.splitlines() if line.startswith("mlp on "))
        assert r"\nerror" in ended.shown and "\nerror" not in ended.shown and heading
    shutil.rmtree(folder)


def tree(folder: Path) -> dict[str, str]:
    """Every file below the folder, with a digest."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


FEDERATED = {"--clients": "2", "--rounds": "1", "--batch-size": "1", "--defense": "prune:0.5"}
JOBS = {
    "train": COMMANDS["train"].line({"--epochs": "1", "--save-at": "0", "--out": "job"}),
    "audit": COMMANDS["audit"].line(
        {"--checkpoint": "trained.safetensors", "--certify": "psnr=15", "--out": "job"}
    ),
    "federate": COMMANDS["federate"].line(
        FEDERATED | {"--spy-rounds": "1", "--attack": "closed-form", "--out": "job"}
    ),
    "reproduce": [
        "reproduce",
        "small",
        "--device",
        "cpu",
        "--records",
        "job/records",
        "--out",
        "job",
    ],
}


def hurt(path: Path, choose: Callable[[int], int]) -> bytes:
    """The file with a change that suits its kind."""
    data = path.read_bytes()
    if path.suffix == ".json":
        return json_text(json.loads(data), choose)
    lines = data.splitlines()
    if path.suffix == ".jsonl" and choose(4):
        spot = choose(len(lines))
        lines[spot] = json_text(json.loads(lines[spot]), choose)
        return b"\n".join(lines) + b"\n"
    return broken(data, choose)


@pytest.mark.parametrize(
    ("name", "examples"),
    [
        ("audit", FOLDERS[0]),
        pytest.param("audit", FOLDERS[1], marks=pytest.mark.slow),
        *(
            pytest.param(name, FOLDERS[1], marks=pytest.mark.slow)
            for name in ("train", "federate", "reproduce")
        ),
    ],
    ids=["audit", "audit, long", "train, long", "federate, long", "reproduce, long"],
)
def test_a_job_goes_on_in_a_changed_folder_or_leaves_it_alone(
    program: Program, files: list[str], name: str, examples: int
) -> None:
    assert files
    kept = frozenset(path.name for path in program.folder.iterdir())
    trained = program.folder / "trained.safetensors"
    facts = {"data": "folder:photos", "model": "mlp", "defense": "none", "test_accuracy": 0.5}
    save_checkpoint(trained, build("mlp", channels=3, size=8, classes=2), facts)
    line = JOBS[name]
    done = program.run(line, job=True)
    assert done.status == 0, done
    whole, job = program.folder / "whole", program.folder / "job"
    job.rename(whole)
    paths = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    paths = [path for path in paths if path.suffix not in (".png", ".csv", ".claims")]

    def explore(choose: Callable[[int], int]) -> None:
        path = paths[choose(len(paths))]
        data = hurt(whole / path, choose)  # hypothesis may give up an example at any choice
        shutil.copytree(whole, job)
        (job / path).write_bytes(data)
        before = tree(job)
        ended = program.run(line, job=True)
        after = tree(job)
        shutil.rmtree(job)
        assert fault(ended) is None, (path, ended)
        assert ended.status != 2 or before == after, (path, ended)

    explored(examples, examples == FOLDERS[0], explore)
    program.tidy(kept)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["--help", "policy show 3-1-7", "defenses list"])
def test_the_real_program_survives_its_streams(name: str, tmp_path: Path) -> None:
    """Without the stand-ins of the server: the shell closes and fills the streams."""
    program = f"{sys.executable} -m gradveil {name}"
    ascii_only: dict[str, Any] = {"PYTHONIOENCODING": "ascii"}
    bare = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for command, more, statuses in (
        (program, ascii_only, (0,)),
        (program, bare, (0,)),
        (f"{program} >&-", {}, (0,)),
        (f"{program} 2>&-", {}, (0,)),
        (f"{program} <&- >&- 2>&-", {}, (0,)),
        (f"{program} >/dev/full", {}, (2,)),
        (f"{program} 2>/dev/full", {}, (0,)),
        (f"{{ {program}; echo $? >status; }} | head -c 1", {}, (0,)),
    ):
        done = subprocess.run(
            ["bash", "-c", command],
            env=os.environ | more,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        assert done.returncode in statuses and "Traceback" not in done.stderr, (command, done)
        assert done.stderr.count("error: ") == (done.returncode == 2), (command, done)
    assert (tmp_path / "status").read_text().strip() in ("0", "1")
