"""The toy search of the tests, and a PostgreSQL server."""

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


class Postgres:
    """A server of PostgreSQL for the tests, in a folder of its own."""

    def __init__(self, folder: Path, initdb: Path, server: Path) -> None:
        self._folder, self._server, self._user = folder, server, None
        if os.geteuid() == 0:  # which PostgreSQL refuses to run as
            self._user = "nobody"
            shutil.chown(folder, self._user)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"postgresql://gradveil:secret-word@127.0.0.1:{self.port}/postgres"
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
        ]
        subprocess.run(
            [*made, "--locale=C", "--no-sync"],
            check=True,
            stdout=subprocess.DEVNULL,
            user=self._user,
            cwd=folder,
        )
        self.start()

    def start(self) -> None:
        settings = (
            "fsync=off",
            "listen_addresses=127.0.0.1",
            f"port={self.port}",
            "unix_socket_directories=",
        )
        options = [part for setting in settings for part in ("-c", setting)]
        self.process = subprocess.Popen(
            [self._server, "-D", self._folder / "data", *options],
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            user=self._user,
            cwd=self._folder,
        )
        wait_for(self.port, self.process)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT ends the sessions and stops; SIGQUIT stops at once, as a crash would."""
        self.process.send_signal(how)
        self.process.wait(30)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A server, where the programs of PostgreSQL are installed."""
    pytest.importorskip("psycopg2")
    initdb, server = program("initdb"), program("postgres")
    if initdb is None or server is None:
        pytest.skip("no PostgreSQL is installed")
    folder = Path(tempfile.mkdtemp(prefix="gradveil-postgres-"))
    try:
        made = Postgres(folder, initdb, server)
        yield made
        made.stop()
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
