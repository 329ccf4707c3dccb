"""Where studies are kept: a journal file, or a database by its URL. Opened quickly or refused in one line, never with a password in it."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from gradveil.core.errors import GradveilError, one_line
from gradveil.core.folders import locked

if TYPE_CHECKING:
    from optuna.storages import BaseStorage, RDBStorage

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

    from gradveil.search.journals import Journal

    with _explained(str(path), ()):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            storage = JournalStorage(Journal(path))
        except (ValueError, KeyError, TypeError, AssertionError):
            raise GradveilError(f"{path} is no journal of a study: choose another file") from None
    return Place(storage, str(path), lambda: locked(path.with_name(f".{path.name}.claims"), lambda: None))


def _open_database(url: str) -> Place:
    from optuna.storages import get_storage
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import SQLAlchemyError

    url = _with_driver(url)
    name = without_password(url)
    secrets = tuple(text for secret in SECRETS for _, found in secret.findall(url) for text in (found, unquote(found)) if text)
    try:
        parts = make_url(url)
        parts.get_dialect()
    except (SQLAlchemyError, ValueError):
        raise GradveilError(f"storage {name!r}: give a database such as sqlite:///study.db or postgresql://user@host/name") from None
    sqlite = parts.get_backend_name() == "sqlite"
    if sqlite and parts.database in (None, "", ":memory:"):
        raise GradveilError(f"storage {name!r} ends with the process, and nobody can share it: give a file such as sqlite:///study.db")
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
    options: dict[str, Any] = {"connect_args": {"timeout": 60} if kind == "sqlite" else arguments, "pool_pre_ping": True}
    for left in reversed(range(TRIES)):
        try:
            return RDBStorage(url, engine_kwargs=options)
        except (IntegrityError, OperationalError, ProgrammingError) as error:
            told = str(error.orig)
            if not left or not ("already exists" in told or "duplicate" in told or "UNIQUE" in told):
                raise
            time.sleep(0.2)  # another process is making the tables
        except RuntimeError as error:  # tables of another version of Optuna
            raise GradveilError(f"storage {without_password(url)!r} cannot be used: {one_line(error, LONGEST)}") from None
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
        cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
        words = " ".join(str(getattr(cause, "orig", None) or cause).split())
        for secret in secrets:
            words = words.replace(secret, "***")
        raise GradveilError(f"storage {name!r} cannot be used: {words[:LONGEST]}") from None


def _no_driver(name: str, error: ImportError) -> GradveilError:
    return GradveilError(f"storage {name!r}: the driver of this database is missing ({error.__cause__ or error}); pip install it")
