"""Where studies are kept: a journal file, or a database by its URL.

A storage is opened quickly or refused in one line, which never shows a password. This module
imports Optuna, so others import it only where a study is opened.
"""

import itertools
import json
import os
import re
import socket
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, get_storage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy import text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    IntegrityError,
    InterfaceError,
    OperationalError,
    ProgrammingError,
    SQLAlchemyError,
)

from gradveil.core.errors import GradveilError, GradveilWarning, one_line
from gradveil.core.files import append_lines, regular_file, shown
from gradveil.core.formats import JournalLine, OwnerEntry
from gradveil.core.locks import locked
from gradveil.core.reading import MalformedError, WrongTypeError, convert, parse_loose_json

T = TypeVar("T")

BEAT = 10.0  # seconds between heartbeats
SILENCE = 60.0  # seconds without one after which a process counts as dead
PROCESSES = Path("/proc")
PATIENCE = 5  # seconds for a database to answer
AWAY = 120.0  # seconds that a database may be away during a search
TRIES = 10  # to make the tables, when several processes begin at once
LONGEST = 200  # letters of a driver's message
ALIVE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}
"""Seconds of PostgreSQL's drivers, by which a connection that broke without a word is noticed."""
LONGEST_ENTRY = 64 << 20  # bytes of a line of a journal: a result has a number for each image
SECRETS = (re.compile(r"(://[^:/?@]*:)(.*)(?=@)"), re.compile(r"([?&]password=)([^&]*)"))


@dataclass(frozen=True)
class Owner:
    """A process that works at a study.

    `host` tells machines, their restarts and their containers apart; `start` tells processes with
    the same number apart.
    """

    id: str
    host: str
    pid: int
    start: str | None

    def entry(self, beat: float | None) -> OwnerEntry:
        """What the study keeps: `beat` is the time of the last heartbeat, None once it has left."""
        return OwnerEntry(self.host, self.pid, self.start, beat)


def this_process() -> Owner:
    return Owner(uuid.uuid4().hex[:12], _host(), os.getpid(), _started(os.getpid()))


def lives(entry: OwnerEntry) -> bool:
    """Tell whether the owner of this entry still works.

    The clocks of two machines may differ by less than `SILENCE`.
    """
    if entry.beat is None or time.time() - entry.beat > SILENCE:
        return False
    if entry.host != _host():
        return True
    start = _started(entry.pid)
    return start is not None and start == str(entry.start)


def _started(pid: int) -> str | None:
    """When a process of this machine started, in ticks since the machine did; None when it is gone.

    A killed process stays a zombie until its parent asks after it, and a signal still reaches a
    zombie: only the process table tells. So the trials of a killed search are free at once, not
    after a minute of silence. Without a process table, answer `running` or None.
    """
    if not (PROCESSES / "self" / "stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass  # it is another user's
        return "running"
    try:
        fields = (PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


@cache
def _host() -> str:
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append((PROCESSES / "sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink(PROCESSES / "self/ns/pid"))  # noqa: PTH115  # it points to no path
    return " ".join(parts)


class Heartbeat:
    """Call `beat` every few seconds, in a thread, until stopped.

    A call that fails is made up for by the next.
    """

    def __init__(self, beat: Callable[[], None], every: float = BEAT) -> None:
        self._beat = beat
        self._every = every
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._every):
            with suppress(Exception):  # a storage may be away; after SILENCE others take over
                self._beat()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


class Journal(JournalFileBackend):
    """A journal file that survives killed processes. It differs from Optuna's in two ways.

    The lock is the kernel's and goes with its holder, however that ends; Optuna's is a file, which
    a killed holder leaves behind for half a minute. And a line that a killed process did not finish
    is cut off before the next is written; otherwise the two would run together, and nobody could
    read the journal again.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        self._ends = {0: 0}  # the position after so many lines

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """Give the entries from this number on, each checked against its type.

        A last line that is no JSON, as a killed process leaves it, is left out; such damage before
        the end is an error, and so is an entry of another type anywhere.
        """
        regular_file(self._path)
        size = self._path.stat().st_size  # other processes may add lines meanwhile
        with self._path.open("rb") as file:
            known = max(number for number in self._ends if number <= log_number_from)
            file.seek(self._ends[known])
            torn: GradveilError | None = None
            for number in itertools.count(known):
                line = file.readline(LONGEST_ENTRY + 1)
                if not line or file.tell() > size:
                    return
                if torn is not None:
                    raise torn
                where = f"{self._path}, line {number + 1}"
                if len(line) > LONGEST_ENTRY:
                    raise GradveilError(f"{where}: longer than {LONGEST_ENTRY:,} bytes")
                if not line.endswith(b"\n"):
                    return
                try:
                    entry = parse_loose_json(line, where)
                except MalformedError as error:
                    is_none = "" if number else ", and it is no journal of a study"
                    torn = GradveilError(
                        f"{where} is damaged ({error.problem}){is_none}: restore it, or choose "
                        "another --out"
                    )
                    continue
                convert(entry, JournalLine, where)
                self._ends[number + 1] = file.tell()
                if number >= log_number_from:
                    yield entry

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with locked(self._path):
            append_lines(self._path, lines.encode())


@dataclass(frozen=True)
class OpenStorage:
    """A storage that was reached. `name` can be shown: it has no password.

    `lock` makes a context in which no other process holds the lock of the same storage; `close`
    ends the connections.
    """

    storage: BaseStorage
    name: str
    lock: Callable[[], AbstractContextManager[object]]
    secrets: tuple[str, ...] = ()
    close: Callable[[], None] = lambda: None
    on_server: bool = False

    def patiently(self, act: Callable[[], T]) -> T:
        """Call `act`, which may be called twice; again for a while where the server went away."""
        until, wait = time.monotonic() + AWAY, 0.5
        while True:
            try:
                return act()
            except (SQLAlchemyError, StorageInternalError) as error:
                if not (self.on_server and _is_loss(error)) or time.monotonic() + wait > until:
                    raise
                lost = error
            warnings.warn(
                f"storage {self.name!r} does not answer ({_message(lost, self.secrets)}): trying "
                f"again for {AWAY:.0f} s",
                GradveilWarning,
                stacklevel=2,
            )
            time.sleep(wait)
            wait = min(2 * wait, 8.0)

    def explained(self) -> AbstractContextManager[None]:
        """A context that turns errors of the storage into one line without its secrets."""
        return _explained(self.name, self.secrets)


def open_storage(where: str | Path) -> OpenStorage:
    """Open a journal file (a `Path`), made if need be, or a database (a `str`, its URL)."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return _open_journal(where) if isinstance(where, Path) else _open_database(where)


def without_password(url: str) -> str:
    for secret in SECRETS:
        url = secret.sub(r"\1***", url)
    return url


def storage_name(url: str) -> str:
    """The database as it is shown: with the driver that is used, without a password."""
    return without_password(_with_driver(url))


def _open_journal(path: Path) -> OpenStorage:
    with _explained(str(path), ()):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if path.exists():
                regular_file(path)
            storage = JournalStorage(Journal(path))
        except WrongTypeError as error:
            raise GradveilError(
                f"{error}: it is no journal of a study; choose another file"
            ) from None
        except (GradveilError, OSError):
            raise
        except Exception as error:  # Optuna has many for entries that do not belong together
            raise GradveilError(
                f"{path} is no journal of a study ({shown(one_line(error, LONGEST))}): choose "
                "another file"
            ) from None
    return OpenStorage(storage, str(path), _file_lock(path.with_name(f".{path.name}.claims")))


def _open_database(url: str) -> OpenStorage:
    url = _with_driver(url)
    name = without_password(url)
    secrets = tuple(
        part
        for secret in SECRETS
        for _, found in secret.findall(url)
        for part in (found, unquote(found))
        if part
    )
    try:
        parts = make_url(url)
        parts.get_dialect()
    except (SQLAlchemyError, ValueError):
        raise GradveilError(
            f"storage {name!r}: give a database such as sqlite:///study.db or "
            "postgresql://user@host/name"
        ) from None
    sqlite = parts.get_backend_name() == "sqlite"
    if sqlite and parts.database in (None, "", ":memory:"):
        raise GradveilError(
            f"storage {name!r} ends with the process, and nobody can share it: give a file such "
            "as sqlite:///study.db"
        )
    if sqlite and parts.database and Path(parts.database).exists():
        regular_file(Path(parts.database))  # a FIFO would not open before somebody writes to it
    with _explained(name, secrets):
        database = _connect(url, parts)
    lock = _file_lock(Path(f"{parts.database}.claims")) if sqlite else partial(_row_lock, database)
    close = database.engine.dispose
    return OpenStorage(get_storage(database), name, lock, secrets, close, not sqlite)


def _file_lock(path: Path) -> Callable[[], AbstractContextManager[object]]:
    return lambda: locked(path)


def _with_driver(url: str) -> str:
    """Name the installed driver of PostgreSQL: SQLAlchemy's default depends on its version."""
    scheme, rest = url.partition("://")[::2]
    drivers = [driver for driver in ("psycopg", "psycopg2") if find_spec(driver)]
    return f"postgresql+{drivers[0]}://{rest}" if scheme == "postgresql" and drivers else url


def _connect(url: str, parts: URL) -> RDBStorage:
    arguments: dict[str, Any] = {} if "connect_timeout=" in url else {"connect_timeout": PATIENCE}
    if parts.get_backend_name() == "sqlite":
        arguments = {"timeout": 60}
    elif parts.get_driver_name().startswith("psycopg"):
        arguments = ALIVE | arguments
    options: dict[str, Any] = {"connect_args": arguments, "pool_pre_ping": True}
    for left in reversed(range(TRIES)):
        try:
            return RDBStorage(url, engine_kwargs=options)
        except (IntegrityError, OperationalError, ProgrammingError) as error:
            message = str(error.orig)
            clash = any(word in message for word in ("already exists", "duplicate", "UNIQUE"))
            if not left or not clash:
                raise
            time.sleep(0.2)  # another process is making the tables
        except RuntimeError as error:  # tables of another version of Optuna
            raise GradveilError(
                f"storage {without_password(url)!r} cannot be used: {one_line(error, LONGEST)}"
            ) from None
    raise AssertionError


@contextmanager
def _row_lock(database: RDBStorage) -> Iterator[None]:
    """Lock a row that Optuna reads when it opens a storage, and never writes.

    The lock goes with the connection, so with the process.
    """
    with database.engine.begin() as connection:
        connection.execute(text("SELECT version_info_id FROM version_info FOR UPDATE"))
        yield


@contextmanager
def _explained(name: str, secrets: tuple[str, ...]) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise GradveilError(
            f"storage {name!r}: the driver of this database is missing "
            f"({error.__cause__ or error}); pip install it"
        ) from None
    except (OSError, SQLAlchemyError, StorageInternalError) as error:
        message = _message(error, secrets)
        raise GradveilError(f"storage {name!r} cannot be used: {message}") from None


def _cause(error: Exception) -> BaseException:
    """The error of SQLAlchemy that Optuna made its own of."""
    inner = error.__cause__ if isinstance(error, StorageInternalError) else None
    return inner or error


def _is_loss(error: Exception) -> bool:
    """Whether the server went away, rather than refused what it was asked."""
    return isinstance(_cause(error), OperationalError | InterfaceError)


def _message(error: Exception, secrets: tuple[str, ...]) -> str:
    cause = _cause(error)
    message = " ".join(str(getattr(cause, "orig", None) or cause).split())
    for secret in secrets:
        message = message.replace(secret, "***")
    return message[:LONGEST]
