"""Real data where it lies, caches in a temporary folder, and processes that start quickly.

Tests that need real data skip when $GRADVEIL_DATA names no folder.
"""

import builtins
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

PRELOADED = [
    *("gradveil.search.run", "gradveil.search.study", "gradveil.training.lightning"),
    *("gradveil.papers.catalog", "gradveil.federated.run"),  # where Flower is installed
]
PRELUDE = """
import os, sys, warnings
import torch
os.environ.clear()  # the server keeps the variables of the test that started it
os.environ.update(environment)
torch.set_num_threads(1)
warnings.simplefilter(warned)
"""
Start = Callable[..., BaseProcess]

if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):  # as shells leave it for what they run in the background: tests interrupt programs
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compute with one thread: the same results on every machine, and no fight for two cores."""
    if getattr(session.config.option, "dist", "no") == "no":  # else it only hands out tests
        import torch  # slow to import: workers would start later

        torch.set_num_threads(1)


class Scheduler(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Modules go to the workers whole; those that start processes go to one worker, together.

    So the server that starts their processes imports the package once, and not in every worker.
    """

    def _split_scope(self, nodeid: str) -> str:  # what pytest-xdist tells schedulers to override
        module = nodeid.partition("::")[0]
        return "processes" if starts_processes(self.config.rootpath / module) else module


@cache
def starts_processes(module: Path) -> bool:
    return "start_process" in module.read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return Scheduler(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache for this run of the tests, shared by its workers: real data is decoded once."""
    folder = tmp_path_factory.getbasetemp()
    run = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    patch = pytest.MonkeyPatch()
    patch.setenv("GRADVEIL_CACHE", str(run / "cache"))
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def unsynced() -> Iterator[None]:
    """No waiting for the disk, which takes milliseconds for each file: no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def data_root() -> Path:
    root = os.environ.get("GRADVEIL_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("$GRADVEIL_DATA names no folder with the real data sets")
    return Path(root)


@pytest.fixture
def without_opacus(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("opacus"):
            raise ModuleNotFoundError("No module named 'opacus'")
        return plain(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)


@pytest.fixture(scope="session")
def start_process() -> Start:
    """Start a process that runs a code with `arguments`, and has imported the package already.

    Each is a fork of a server that imported it once: that takes seconds, and tests start many.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def start(code: str, *arguments: object, warned: str = "error") -> BaseProcess:
        names = {
            "__name__": "__main__",
            "arguments": arguments,
            "environment": dict(os.environ),
            "warned": warned,
        }
        process = context.Process(target=exec, args=(PRELUDE + code, names))
        process.start()
        return process

    return start
