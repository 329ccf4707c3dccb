"""Flower, imported before any test: what it imports warns of names to be removed. And its log."""

import logging
import os
import warnings
from collections.abc import Iterator

import pytest

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1")

with warnings.catch_warnings():
    # typer 0.20 imports names that click 8.5 means to remove
    warnings.simplefilter("ignore", DeprecationWarning)
    import flwr.serverapp.strategy  # noqa: F401


class Log(logging.Handler):
    """Keeps the messages that a logger is given."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += f"{record.getMessage()}\n"


@pytest.fixture
def log() -> Iterator[Log]:
    """What Flower and our clients and servers log; pytest's own way is off, see pyproject.toml."""
    logger, kept = logging.getLogger("flwr"), Log()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(kept)
    yield kept
    logger.removeHandler(kept)
    logger.setLevel(level)
