"""Every data test has a cache of its own; those that need the real files take them from $GRADVEIL_DATA."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

REAL = os.environ.get("GRADVEIL_DATA")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder and no data root from outside."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("GRADVEIL_CACHE", str(folder))
    monkeypatch.delenv("GRADVEIL_DATA", raising=False)
    return folder


@pytest.fixture
def real() -> Callable[[str], Path]:
    """The root of the real data, for a test that needs this folder of it; the test is skipped where there is none."""

    def root(folder: str) -> Path:
        if not REAL or not (Path(REAL) / folder).exists():
            pytest.skip(f"$GRADVEIL_DATA has no {folder}")
        return Path(REAL)

    return root
