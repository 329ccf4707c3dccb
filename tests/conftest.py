"""Real data where it lies: tests that need it skip when $GRADVEIL_DATA names no folder. Caches go to a temporary folder."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # the same results on every machine, and no fight for two cores


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setenv("GRADVEIL_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def data_root() -> Path:
    root = os.environ.get("GRADVEIL_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("$GRADVEIL_DATA names no folder with the real data sets")
    return Path(root)
