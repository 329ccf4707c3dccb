"""Every data set of the registry: its facts, its errors, and its real images where they are."""

import os
from pathlib import Path

import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.data import Dataset, catalog, load, verify

EVERY = pytest.mark.parametrize("dataset", catalog(), ids=lambda dataset: dataset.name)
NAMES = [dataset.name for dataset in catalog()]
OF_OTHERS = ("fashion-mnist", "fashion-mnist-mini")  # with the mean and spread of MNIST


@EVERY
def test_a_data_set_states_its_facts(dataset: Dataset) -> None:
    assert len(dataset.mean) == len(dataset.std) == dataset.channels
    assert dataset.train > dataset.test > 0
    assert dataset.title and dataset.license and dataset.citation
    assert dataset.layout and dataset.home
    assert all(file.url and len(file.md5) == 32 for file in dataset.downloads)


def test_every_name_is_there_once() -> None:
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fashion-mnist-mini"])
def test_a_data_set_that_is_not_there_says_so_in_one_line(name: str, tmp_path: Path) -> None:
    command = f"gradveil data fetch {name} --data-root {tmp_path}"
    for split in ("train", "test"):
        with pytest.raises(
            GradveilError, match=f"{name} is not in {tmp_path}: .*{command}"
        ) as error:
            load(name, split, root=tmp_path)
        assert "\n" not in str(error.value)
    state = verify(name, tmp_path)
    assert not state.ok and all("missing" in check.problem for check in state.files)


@EVERY
def test_a_data_set_that_is_there_loads_as_it_says(dataset: Dataset) -> None:
    root = Path(os.environ.get("GRADVEIL_DATA", "/nowhere"))
    if not dataset.here(root):
        pytest.skip(f"$GRADVEIL_DATA has no {dataset.name}")
    found = load(dataset.name, "test", root=root)
    assert found.images.dtype == torch.uint8 and found.labels.dtype == torch.int64
    assert found.images.shape == (len(found), dataset.channels, dataset.size, dataset.size)
    assert found.labels.shape == (len(found),)
    assert 0 <= int(found.labels.min()) <= int(found.labels.max()) < dataset.classes
    assert len(found.classes) == dataset.classes
    assert (found.name, found.split) == (dataset.name, "test")
    assert (found.mean, found.std) == (dataset.mean, dataset.std)
    if dataset.name not in OF_OTHERS:
        pixels = found.images[::8].double() / 255  # the constants are of the training split
        assert pixels.mean((0, 2, 3)).tolist() == pytest.approx(found.mean, abs=0.02)
        assert pixels.std((0, 2, 3)).tolist() == pytest.approx(found.std, abs=0.02)
