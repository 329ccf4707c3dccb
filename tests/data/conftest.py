"""A fresh cache for every data test; those that need real files take them from $GRADVEIL_DATA."""

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
    """Return the root of the real data; skip the test where this folder of it is absent."""

    def root(folder: str) -> Path:
        if not REAL or not (Path(REAL) / folder).exists():
            pytest.skip(f"$GRADVEIL_DATA has no {folder}")
        return Path(REAL)

    return root
