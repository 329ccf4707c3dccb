"""Where studies are kept: a journal file, or a database by its URL.

A storage is opened quickly or refused in one line, which never shows a password. This module
imports Optuna, so others import it only where a study is opened.
"""

import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, get_storage
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
from gradveil.core.files import regular_file, shown
from gradveil.core.locks import locked
from gradveil.core.reading import WrongTypeError
from gradveil.search.journal import Journal

T = TypeVar("T")

PATIENCE = 5  # seconds for a database to answer
AWAY = 120.0  # seconds that a database may be away during a search
TRIES = 10  # to make the tables, when several processes begin at once
LONGEST = 200  # letters of a driver's message
ALIVE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}
"""Seconds of PostgreSQL's drivers, by which a connection that broke without a word is noticed."""
SECRETS = (re.compile(r"(://[^:/?@]*:)(.*)(?=@)"), re.compile(r"([?&]password=)([^&]*)"))


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
        """Turn errors of the storage into one line without its secrets."""
        return _explained(self.name, self.secrets)


def open_storage(where: str | Path) -> OpenStorage:
    """Open a journal file (a `Path`), made if need be, or a database (a `str`, its URL)."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return _open_journal(where) if isinstance(where, Path) else _open_database(where)


def without_password(url: str) -> str:
    """Return the URL with asterisks for its password."""
    for secret in SECRETS:
        url = secret.sub(r"\1***", url)
    return url


def storage_name(url: str) -> str:
    """Return the database's URL as it is shown: with the driver used, without a password."""
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
    """Return the error of SQLAlchemy behind one of Optuna's; any other error as it is."""
    inner = error.__cause__ if isinstance(error, StorageInternalError) else None
    return inner or error


def _is_loss(error: Exception) -> bool:
    """Tell whether the server went away, rather than refused what it was asked."""
    return isinstance(_cause(error), OperationalError | InterfaceError)


def _message(error: Exception, secrets: tuple[str, ...]) -> str:
    cause = _cause(error)
    message = " ".join(str(getattr(cause, "orig", None) or cause).split())
    for secret in secrets:
        message = message.replace(secret, "***")
    return message[:LONGEST]
