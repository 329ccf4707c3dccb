"""To a Ray cluster: quickly, quietly, or refused in one line."""

import gc
import logging
import os
import re
import signal
import socket
import threading
import warnings
from importlib.util import find_spec
from typing import Any

from gradveil.core.errors import GradveilError, one_line

GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # how HTTP/2 begins, which Ray speaks
SETTINGS = b"\x04"  # the kind of frame that answers it
PATIENCE = 5.0  # seconds for a cluster to answer
LONGEST = 200  # letters of Ray's own words

_handlers: list[Any] = []  # of SIGTERM, as they were before Ray


def check(address: str | None) -> str | None:
    """The address, or what $RAY_ADDRESS says without one: Ray is installed, and a cluster answers where one is named."""
    address = address or os.environ.get("RAY_ADDRESS")
    if find_spec("ray") is None:
        raise GradveilError("engine ray needs Ray: pip install gradveil[cluster]")
    if address not in (None, "local", "auto"):
        _knock(str(address))
    return address


def connect(address: str | None) -> bool:
    """To a Ray cluster, or to a new one of this machine's own where none is named. False where this process had one already."""
    address = check(address)
    import ray

    if ray.is_initialized():
        return False
    _handlers.append(signal.getsignal(signal.SIGTERM))
    quiet: dict[str, Any] = {"logging_level": logging.CRITICAL, "log_to_driver": False}
    if address in (None, "local"):
        quiet |= {"include_dashboard": False}
    with warnings.catch_warnings():  # of what later versions will do, and of files that Ray leaves open
        warnings.simplefilter("ignore")
        try:
            ray.init(address=address or "local", **quiet)
            gc.collect()
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            _restore_handler()
            raise GradveilError(f"ray address {address or 'local'!r}: no cluster to work on ({one_line(error, LONGEST)})") from None
    return True


def disconnect() -> None:
    """From the cluster; one that `connect` started ends."""
    import ray

    with warnings.catch_warnings():  # Ray ends its processes, but does not ask after them
        warnings.simplefilter("ignore", ResourceWarning)
        ray.shutdown()
        gc.collect()
    _restore_handler()


def _restore_handler() -> None:
    """Ray takes SIGTERM over, to end its processes, and keeps it when they have ended."""
    if _handlers and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _handlers.pop())


def _knock(address: str) -> None:
    """Ray itself would try for long."""
    parts = re.fullmatch(r"(?:ray://)?\[?([^/\[\]]+?)\]?:(\d{1,5})", address)
    if not parts or int(parts[2]) > 65535:
        raise GradveilError(f"ray address {address!r}: write host:6379, ray://host:10001, or auto for a cluster on this machine")
    try:
        with socket.create_connection((parts[1], int(parts[2])), timeout=PATIENCE) as connection:
            if "RAY_USE_TLS" not in os.environ:
                connection.settimeout(PATIENCE)
                connection.sendall(GREETING)
                if connection.recv(9)[3:4] != SETTINGS:
                    raise ConnectionError("what answers there is no Ray")
    except OSError as error:
        raise GradveilError(
            f"ray address {address!r}: no cluster answers ({error}); start a cluster with `ray start --head`, or give no address"
        ) from None
