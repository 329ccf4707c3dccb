"""Commands that break at one of their writes, and whether two folders hold the same result.

A command is run in a process of its own. A write has boundaries: a temporary file was made, a line
is half written, the data is there but not yet on the disk, the file is about to get its name, it
has just got it. At the boundary asked for the process dies as by SIGKILL, or the disk is full from
there on. Only functions of the standard library are replaced, and `write_all`, which appends.
"""

import csv
import errno
import gzip
import io
import json
import os
import re
import signal
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

from safetensors import safe_open
from torch import nn

SKIPPED = {"tensorboard", "study.journal"}
"""They tell the times of a run, and the events of each part of it."""


Spots = Mapping[str, Collection[int]]
"""Boundaries: kinds, such as `named records.jsonl`, and which of each in order, from 0."""


def linear(classes: int, size: int, channels: int) -> nn.Module:
    """A model whose audits take little time: `--model breaking:linear`."""
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, classes))


def run(how: str, at: int | Spots, arguments: list[str], log: Path, folder: Path) -> None:
    """Run a command in a folder that breaks at a boundary: how is kill, full or not at all.

    `at` is the boundary's number, counted from 0, or several of which the first counts. What the
    command says, its status and the kinds of the boundaries that it came to are in the folder
    `log`.
    """
    log.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(log / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    passed: list[str] = []
    broken: list[bool] = []

    def boundary(step: str, file: str) -> bool:
        """Note it; die here, or tell whether the disk is full."""
        kind = f"{step} {_pattern(file)}"
        here = len(passed) == at if isinstance(at, int) else passed.count(kind) in at.get(kind, ())
        passed.append(kind)
        if here and how == "kill":
            (log / "boundaries").write_text("\n".join(passed))
            os.kill(os.getpid(), signal.SIGKILL)
        if here and how == "full":
            broken.append(True)
        return bool(broken)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # typer's own
        from gradveil import cli

        STAND_INS.get(arguments[0], lambda: None)()
    _replace_functions(boundary)
    status = cli.run(arguments)
    sys.stdout.flush()
    (log / "boundaries").write_text("\n".join(passed))
    os._exit(status)


def _call_clients_here() -> None:
    """Let federated trainings run their clients in this process, which breaks at their writes."""
    import flower
    from gradveil.federated import run

    run.simulate = flower.here


def _add_experiment() -> None:
    """Add the experiment `small` to the papers': a training, its audit, and a cell without one."""
    from gradveil.papers import catalog
    from gradveil.papers.cells import Audited, Cell, Trained, Training, Workspace
    from gradveil.papers.experiments import Entry, Experiment, Size
    from gradveil.papers.switches import Switches

    @dataclass(frozen=True)
    class Counted(Cell):
        kind: ClassVar[str] = "counted"
        seconds: ClassVar[float] = 1.0

        def measure(self, workspace: Workspace) -> dict[str, Any]:
            return {"count": 1}

    data, model = "fashion-mnist-mini", "breaking:linear"
    trained = Training(data, model, epochs=1, lr=0.01, fraction=0.05, augment=False)
    audited = Audited(trained, attack="closed-form", images=2, controls=False, grid=True)
    cells = (Trained(trained), audited, Counted(Training(data, model, epochs=0)))

    class Small(Experiment):
        def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
            return tuple(Entry("row", cell) for cell in cells)

    catalog.EXPERIMENTS["small"] = Small("small", ("paper",), "a claim", "it agrees")


def _fix_timing() -> None:
    """Let an assessment find the same times whenever it is run: they decide how much it does.

    As if a training step took 100 seconds and an iteration of an image one: both make a few. The
    doctor would tell the seconds of its self-check.
    """
    from gradveil.assessment import run
    from gradveil.audits import timing
    from gradveil.checks import Finding, doctor

    works = Finding("note", "self-check", "attacks work on this machine", "nothing to do")
    doctor.self_check = lambda *_: works
    run.step_seconds = lambda *_: 100.0  # type: ignore[attr-defined]  # it is imported there
    timing.time_iteration = lambda *_: 1.0
    timing._tried = lambda *_: False


STAND_INS = {
    "assess": _fix_timing,
    "federate": _call_clients_here,
    "reproduce": _add_experiment,
}
"""What a command gets before it runs, so that it takes a second."""


def _pattern(file: str) -> str:
    """The name of the file, or of that which a temporary one becomes; tensors are all alike."""
    name = re.sub(r"^\.(.*)\.[^.]*\.part$", r"\1", Path(file).name)
    return "*.safetensors" if name.endswith(".safetensors") else name


def _replace_functions(boundary: Callable[[str, str], bool]) -> None:
    from gradveil.core import files

    mkstemp, fsync, replace, write_all = tempfile.mkstemp, os.fsync, os.replace, files.write_all

    def full() -> OSError:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def make(*arguments: Any, **named: Any) -> tuple[int, str]:
        made = mkstemp(*arguments, **named)
        if boundary("made", made[1]):
            os.close(made[0])
            os.unlink(made[1])  # noqa: PTH108  # it could not be made
            raise full()
        return made

    def sync(handle: int) -> None:
        if boundary("written", os.readlink(f"/proc/self/fd/{handle}")):  # noqa: PTH115  # no path
            raise full()
        fsync(handle)

    def rename(source: Any, target: Any) -> None:
        boundary("to be named", str(target))
        replace(source, target)
        boundary("named", str(target))

    def write(file: IO[bytes], data: bytes) -> None:
        half = len(data) // 2
        write_all(file, data[:half])
        if boundary("half written", os.readlink(f"/proc/self/fd/{file.fileno()}")):  # noqa: PTH115
            raise full()
        write_all(file, data[half:])

    tempfile.mkstemp, os.fsync, os.replace = make, sync, rename  # type: ignore[assignment]
    files.write_all = write


def content(folder: Path) -> dict[str, Any]:
    """Everything that a folder says, by file, without the times that things took."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and SKIPPED.isdisjoint(name.parts):
            found[str(name)] = _content(path, path.read_bytes())
    return found


def _content(path: Path, data: bytes) -> Any:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="np") as file:
            facts = {key: json.loads(text) for key, text in (file.metadata() or {}).items()}
            tensors = {key: file.get_tensor(key) for key in sorted(file.keys())}
        plain = {key: (str(t.dtype), t.shape, t.tobytes()) for key, t in tensors.items()}
        return _without_times(facts), plain
    if path.name.endswith(".tar.gz"):
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            files = {each.name: archive.extractfile(each) for each in archive if each.isfile()}
            return {
                name: _content(Path(name), file.read())
                for name, file in sorted(files.items())
                if file is not None
            }
    if path.suffix == ".gz":
        return _content(path.with_suffix(""), gzip.decompress(data))
    if path.suffix == ".json":
        return _without_times(json.loads(data))
    if path.suffix == ".jsonl":
        return [_without_times(json.loads(line)) for line in data.splitlines()]
    if path.name == "metrics.csv":
        return [_without_times(row) for row in csv.DictReader(io.StringIO(data.decode()))]
    return data


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(part) for key, part in value.items() if key not in TIMES}
    return [_without_times(part) for part in value] if isinstance(value, list) else value


TIMES = {"seconds", "attack_seconds", "training_seconds", "date", "storage"}
"""The storage names the folder itself."""
