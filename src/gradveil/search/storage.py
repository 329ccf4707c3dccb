"""Where studies are kept: a journal file, or a database by its URL. Opened quickly or refused in one line, never with a password in it."""

import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import unquote

from optuna.storages.journal import JournalFileBackend

from gradveil.core.errors import GradveilError, one_line
from gradveil.core.job_folder import locked

if TYPE_CHECKING:
    from optuna.storages import BaseStorage, RDBStorage


BEAT = 10.0  # seconds between heartbeats
SILENCE = 60.0  # seconds without one after which a process counts as dead
PROCESSES = Path("/proc")


@dataclass(frozen=True)
class Owner:
    """`host` tells machines, their restarts and their containers apart; `start` tells processes with the same number apart."""

    id: str
    host: str
    pid: int
    start: str | None

    def entry(self, beat: float | None) -> dict[str, Any]:
        """For the study: None once it has left."""
        return {"host": self.host, "pid": self.pid, "start": self.start, "beat": beat}


def this_process() -> Owner:
    return Owner(uuid.uuid4().hex[:12], _host(), os.getpid(), started(os.getpid()))


def lives(entry: Mapping[str, Any] | None) -> bool:
    """Of what the study knows of an owner. Another machine's clock may differ from this one's by less than `SILENCE`."""
    if entry is None or entry["beat"] is None or time.time() - entry["beat"] > SILENCE:
        return False
    start = started(entry["pid"])
    return entry["host"] != _host() or (start is not None and start == str(entry["start"]))


def started(pid: int) -> str | None:
    """When a process of this machine started, in the system's own count; None when it is gone. Where that is not told: `running`."""
    if not (PROCESSES / "self" / "stat").exists():
        return _answers(pid)
    try:
        fields = (PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (
        None if fields[0] in "ZX" else fields[19]
    )  # a killed process stays a zombie until its parent asks


def _answers(pid: int) -> str | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # another user's
    return "running"


@cache
def _host() -> str:
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append((PROCESSES / "sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink(PROCESSES / "self/ns/pid"))  # noqa: PTH115  # it points to no path
    return " ".join(parts)


class Heart:
    """Beats in a thread of its own until it is stopped. A beat that fails is made up for by the next."""

    def __init__(self, beat: Callable[[], None], every: float = BEAT) -> None:
        self._beat = beat
        self._every = every
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._go, name="heartbeat", daemon=True)
        self._thread.start()

    def _go(self) -> None:
        while not self._stopped.wait(self._every):
            with suppress(
                Exception
            ):  # a storage that is away for a while: after SILENCE others take over
                self._beat()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


BLOCK = 1 << 16


class Journal(JournalFileBackend):
    """Differs from Optuna's own in two ways.

    The lock is the kernel's and goes with its holder, however that ends; Optuna's is a file, which a killed holder leaves behind
    for half a minute. And a line that a killed process did not finish is cut off before the next is written; otherwise the two
    would run together, and nobody could read the journal again.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with locked(self._path, lambda: None), self._path.open("rb+") as file:
            cut_unfinished_line(file)
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())


def cut_unfinished_line(file: IO[bytes]) -> None:
    """Leaves the file at its end, which is the end of a line."""
    size = end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - BLOCK)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        end = start + newline + 1
        if newline >= 0:
            break
    if end < size:
        file.truncate(end)
    file.seek(end)


PATIENCE = 5  # seconds for a database to answer
TRIES = 10  # to make the tables, when several processes begin at once
SECRETS = (re.compile(r"(://[^:/?@]*:)(.*)(?=@)"), re.compile(r"([?&]password=)([^&]*)"))
LONGEST = 200  # letters of a driver's own words


@dataclass(frozen=True)
class Place:
    """A storage, open. `name` can be shown. While `alone` lasts, no other process is in its own `alone` with the same storage."""

    storage: "BaseStorage"
    name: str
    alone: Callable[[], AbstractContextManager[None]]
    secrets: tuple[str, ...] = ()
    leave: Callable[[], None] = lambda: None  # closes its connections

    def explained(self) -> AbstractContextManager[None]:
        return _explained(self.name, self.secrets)


def open_place(where: str | Path) -> Place:
    """A `Path` is a journal file, made if need be; a `str` is the URL of a database."""
    try:
        import optuna
    except ImportError:
        raise GradveilError("a search needs Optuna: pip install gradveil[search]") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return _open_journal(where) if isinstance(where, Path) else _open_database(where)


def without_password(url: str) -> str:
    for secret in SECRETS:
        url = secret.sub(r"\1***", url)
    return url


def storage_name(url: str) -> str:
    """A database as it is shown: with the driver that is used, without a password."""
    return without_password(_with_driver(url))


def _open_journal(path: Path) -> Place:
    from optuna.storages import JournalStorage

    with _explained(str(path), ()):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            storage = JournalStorage(Journal(path))
        except (ValueError, KeyError, TypeError, AssertionError):
            raise GradveilError(f"{path} is no journal of a study: choose another file") from None
    return Place(
        storage, str(path), lambda: locked(path.with_name(f".{path.name}.claims"), lambda: None)
    )


def _open_database(url: str) -> Place:
    from optuna.storages import get_storage
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import SQLAlchemyError

    url = _with_driver(url)
    name = without_password(url)
    secrets = tuple(
        text
        for secret in SECRETS
        for _, found in secret.findall(url)
        for text in (found, unquote(found))
        if text
    )
    try:
        parts = make_url(url)
        parts.get_dialect()
    except (SQLAlchemyError, ValueError):
        raise GradveilError(
            f"storage {name!r}: give a database such as sqlite:///study.db or postgresql://user@host/name"
        ) from None
    sqlite = parts.get_backend_name() == "sqlite"
    if sqlite and parts.database in (None, "", ":memory:"):
        raise GradveilError(
            f"storage {name!r} ends with the process, and nobody can share it: give a file such as sqlite:///study.db"
        )
    with _explained(name, secrets):
        database = _connect(url, parts.get_backend_name())
    lock: Callable[[], AbstractContextManager[None]] = lambda: _row_locked(database)  # noqa: E731
    if sqlite:
        lock = lambda: locked(Path(f"{parts.database}.claims"), lambda: None)  # noqa: E731
    return Place(get_storage(database), name, lock, secrets, database.engine.dispose)


def _with_driver(url: str) -> str:
    """SQLAlchemy takes one driver of PostgreSQL for granted, which one depends on its version; take the one that is installed."""
    scheme, rest = url.partition("://")[::2]
    drivers = [driver for driver in ("psycopg", "psycopg2") if find_spec(driver)]
    return f"postgresql+{drivers[0]}://{rest}" if scheme == "postgresql" and drivers else url


def _connect(url: str, kind: str) -> "RDBStorage":
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

    arguments = {} if "connect_timeout=" in url else {"connect_timeout": PATIENCE}
    options: dict[str, Any] = {
        "connect_args": {"timeout": 60} if kind == "sqlite" else arguments,
        "pool_pre_ping": True,
    }
    for left in reversed(range(TRIES)):
        try:
            return RDBStorage(url, engine_kwargs=options)
        except (IntegrityError, OperationalError, ProgrammingError) as error:
            told = str(error.orig)
            if not left or not (
                "already exists" in told or "duplicate" in told or "UNIQUE" in told
            ):
                raise
            time.sleep(0.2)  # another process is making the tables
        except RuntimeError as error:  # tables of another version of Optuna
            raise GradveilError(
                f"storage {without_password(url)!r} cannot be used: {one_line(error, LONGEST)}"
            ) from None
    raise AssertionError


@contextmanager
def _row_locked(database: "RDBStorage") -> Iterator[None]:
    """A row that Optuna reads when it opens a storage, and never writes. The lock goes with the connection, so with the process."""
    from sqlalchemy import text

    with database.engine.begin() as connection:
        connection.execute(text("SELECT version_info_id FROM version_info FOR UPDATE"))
        yield


@contextmanager
def _explained(name: str, secrets: tuple[str, ...]) -> Iterator[None]:
    """An error of the storage as one line, without its secrets."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except ImportError as error:
        raise _no_driver(name, error) from None
    except json.JSONDecodeError as error:
        raise GradveilError(
            f"{name} is damaged ({error.doc.strip()[:40]!r} is no entry of it): restore it, or choose another --out"
        ) from None
    except (OSError, SQLAlchemyError, StorageInternalError) as error:
        cause = (
            error.__cause__
            if isinstance(error, StorageInternalError) and error.__cause__
            else error
        )
        words = " ".join(str(getattr(cause, "orig", None) or cause).split())
        for secret in secrets:
            words = words.replace(secret, "***")
        raise GradveilError(f"storage {name!r} cannot be used: {words[:LONGEST]}") from None


def _no_driver(name: str, error: ImportError) -> GradveilError:
    return GradveilError(
        f"storage {name!r}: the driver of this database is missing ({error.__cause__ or error}); pip install it"
    )
