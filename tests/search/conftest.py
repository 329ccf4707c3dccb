"""The toy search that other processes run, as a module; and a PostgreSQL server on loopback, where its programs are installed."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("searching.py")
DEBIAN = "/usr/lib/postgresql"


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
    """The URL of a database of the tests' own."""
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
