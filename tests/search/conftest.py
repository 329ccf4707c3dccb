"""Processes that start quickly, the toy search that they run, and a PostgreSQL server."""

import importlib.util
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("searching.py")
DEBIAN = "/usr/lib/postgresql"
PRELOADED = ["gradveil.search.run", "gradveil.search.study", "gradveil.training.run"]
PRELUDE = """
import os, sys, warnings
import torch
os.environ.update(environment)
torch.set_num_threads(1)
warnings.simplefilter(warned)
"""
Start = Callable[..., BaseProcess]


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


@pytest.fixture(scope="session")
def searching() -> ModuleType:
    spec = importlib.util.spec_from_file_location("searching", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(name: str) -> Path | None:
    found = sorted(Path(DEBIAN).glob(f"*/bin/{name}"))
    return found[-1] if found else Path(there) if (there := shutil.which(name)) else None


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a database for the tests, where the programs of PostgreSQL are installed."""
    pytest.importorskip("psycopg2")
    initdb, server = program("initdb"), program("postgres")
    if initdb is None or server is None:
        pytest.skip("no PostgreSQL is installed")
    folder = Path(tempfile.mkdtemp(prefix="gradveil-postgres-"))
    user = None
    if os.geteuid() == 0:  # which PostgreSQL refuses to run as
        user = "nobody"
        shutil.chown(folder, user)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        made: list[str | Path] = [
            initdb,
            "-D",
            folder / "data",
            "-U",
            "gradveil",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
            "--no-sync",
        ]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL, user=user, cwd=folder)
        quick = [
            "-c",
            "fsync=off",
            "-c",
            "listen_addresses=127.0.0.1",
            "-c",
            f"port={port}",
            "-c",
            "unix_socket_directories=",
        ]
        process = subprocess.Popen(
            [server, "-D", folder / "data", *quick],
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            user=user,
            cwd=folder,
        )
        try:
            wait_for(port, process)
            yield f"postgresql://gradveil:secret-word@127.0.0.1:{port}/postgres"
        finally:
            process.send_signal(signal.SIGINT)  # ends the sessions and stops
            process.wait(30)
    finally:
        shutil.rmtree(folder)


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    import psycopg2

    until = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < until:
        try:
            psycopg2.connect(
                host="127.0.0.1", port=port, user="gradveil", dbname="postgres", connect_timeout=2
            ).close()
            return
        except psycopg2.OperationalError:
            time.sleep(0.1)
    raise RuntimeError("PostgreSQL did not start")
