"""A Ray cluster is refused in one line where there is none, and leaves this process as it was."""

import os
import re
import signal
import socket
import threading
import time

import pytest

from gradveil.core.errors import GradveilError
from gradveil.core.stopping import Stopped, stop_on_signals
from gradveil.search.ray import (
    ORPHANED,
    SEARCH,
    RayEngine,
    check_cluster,
    connect,
    disconnect,
)

ray = pytest.importorskip("ray")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nonsense", "write host:6379"),
        ("127.0.0.1:{port}", "no cluster answers"),
        ("ray://127.0.0.1:{port}", "no cluster answers"),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(address: str, words: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        began = time.monotonic()
        with pytest.raises(GradveilError, match=re.escape(words)) as caught:
            RayEngine({}, address.format(port=taken.getsockname()[1]))
    assert time.monotonic() - began < 6 and "\n" not in str(caught.value)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_an_address_where_something_else_answers_is_refused_at_once(answer: bytes) -> None:
    """Ray itself would go on trying."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reply() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answer)

        other = threading.Thread(target=reply)
        other.start()
        began = time.monotonic()
        with pytest.raises(GradveilError, match="what answers there is no Ray"):
            check_cluster(f"127.0.0.1:{server.getsockname()[1]}")
        other.join()
    assert time.monotonic() - began < 6


@pytest.mark.parametrize("given", [None, "30"])
def test_what_is_started_here_ends_soon_after_a_kill_unless_the_user_wants_it_otherwise(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainings that are killed, in `tests/federated/test_stops.py`, show that it does."""
    told = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: told.append(os.environ[SEARCH]))
    monkeypatch.delenv(SEARCH, raising=False)
    if given:
        monkeypatch.setenv(SEARCH, given)
    assert connect("local") and told == [given or str(ORPHANED)]
    assert os.environ.get(SEARCH) == given


def test_what_ray_does_to_sigterm_is_undone_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*_: object) -> None:
        """In place of Ray's own, which ends the program with status 15."""

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: signal.signal(signal.SIGTERM, taken))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    assert connect(None) and signal.getsignal(signal.SIGTERM) is before
    disconnect()

    def stopped(**_: object) -> None:
        signal.signal(signal.SIGTERM, taken)
        raise SystemExit(signal.SIGTERM.value)  # as Ray's handler does

    monkeypatch.setattr(ray, "init", stopped)
    with stop_on_signals(), pytest.raises(Stopped):
        connect(None)
    assert signal.getsignal(signal.SIGTERM) is before
