"""The cache of decoded images: reused, rebuilt, and never half there."""

import errno
import io
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gradveil.core.errors import GradveilError
from gradveil.data import load
from gradveil.data.cache import cache_folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for place in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / "photos" / place).mkdir(parents=True)
        for number in range(4):
            path = tmp_path / "photos" / place / f"{number}.png"
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(path)
            os.utime(path, (1e9, 1e9))  # some file systems settle a new file's time a moment later
    return tmp_path / "photos"


def stamps(cache: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}


def test_a_second_load_reads_the_cache_and_writes_nothing(
    photos: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(str(photos))
    before = stamps(cache)
    monkeypatch.setattr(
        "gradveil.data.folder.decode_image", lambda path: pytest.fail(f"{path} was decoded again")
    )
    second = load(str(photos))
    assert len(before) == 3 and stamps(cache) == before
    assert torch.equal(first.images, second.images) and torch.equal(first.labels, second.labels)
    assert (first.classes, first.mean, first.std) == (second.classes, second.mean, second.std)


def test_a_changed_source_is_read_again(photos: Path, cache: Path) -> None:
    load(str(photos))
    Image.new("RGB", (8, 8), (1, 2, 3)).save(photos / "train/a/0.png")
    assert load(str(photos)).images[0, :, 0, 0].tolist() == [1, 2, 3]
    assert len(stamps(cache)) == 6


def test_a_source_touched_is_read_again(photos: Path, cache: Path) -> None:
    load(str(photos))
    os.utime(photos / "train/b/1.png", ns=(1, 1))
    load(str(photos))
    assert len(stamps(cache)) == 6


def test_splits_and_sizes_have_entries_of_their_own(photos: Path, cache: Path) -> None:
    assert (
        load(str(photos)).size == 8
        and load(str(photos), image_size=4).size == 4
        and len(load(str(photos), "test")) == 8
    )
    assert len(stamps(cache)) == 9


def test_writing_to_loaded_images_does_not_change_the_cache(photos: Path) -> None:
    load(str(photos)).images.zero_()
    assert load(str(photos)).images.any()


@pytest.mark.parametrize("suffix", ["images.npy", "labels.npy", "json"])
def test_a_damaged_entry_is_built_again(photos: Path, cache: Path, suffix: str) -> None:
    whole = load(str(photos)).images.clone()
    (path,) = cache.glob(f"*.{suffix}")
    path.write_bytes(path.read_bytes()[:20])
    assert torch.equal(load(str(photos)).images, whole)
    assert path.stat().st_size > 20


@pytest.mark.parametrize(
    "facts",
    [
        "[]",
        '{"classes": ["a", "b"]}',
        '{"classes": ["a"], "mean": [0, 0, 0], "std": [1, 1, 1]}',  # fewer than the labels
        '{"classes": "ab", "mean": [0, 0, 0], "std": [1, 1, 1]}',
        '{"classes": ["a", "b"], "mean": [0, 0], "std": [1, 1]}',
        '{"classes": ["a", "b"], "mean": [0, 0, 0], "std": [1, 1, "1"]}',
        '{"classes": ["a", "b"], "mean": [0, 0, 0], "std": [1, 1, 0]}',
        "[" * 100_000,
    ],
)
def test_an_entry_whose_manifest_lies_is_built_again(photos: Path, cache: Path, facts: str) -> None:
    whole = load(str(photos))
    (path,) = cache.glob("*.json")
    path.write_text(facts)
    again = load(str(photos))
    assert (again.classes, again.mean, again.std) == (whole.classes, whole.mean, whole.std)
    assert path.read_text() != facts


@pytest.mark.parametrize("shape", [b"(8000000000,), }", b"(8000000000,),  ", b"((((((((((((((((("])
def test_an_entry_whose_array_lies_is_built_again(photos: Path, cache: Path, shape: bytes) -> None:
    whole = load(str(photos)).labels
    (path,) = cache.glob("*.labels.npy")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"(8,), }".ljust(len(shape)), shape))
    assert path.read_bytes() != data and torch.equal(load(str(photos)).labels, whole)


def test_an_image_that_is_a_fifo_is_refused(photos: Path) -> None:
    os.mkfifo(photos / "train/a/0b.png")
    with pytest.raises(GradveilError, match=r"0b\.png: it is a FIFO"):
        load(str(photos))


class FullDisk(io.FileIO):
    def write(self, _: Any, /) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_one_line_and_leaves_no_file(
    photos: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., Any] = Path.open

    def opened(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        return (
            FullDisk(path, "w")
            if mode == "wb" and cache in path.parents
            else real(path, mode, *rest, **named)
        )

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(GradveilError, match=r"no space left on the disk .*GRADVEIL_CACHE") as error:
        load(str(photos))
    assert "\n" not in str(error.value) and not list(cache.iterdir())


def test_a_cache_that_is_a_file_is_one_line(photos: Path, cache: Path) -> None:
    cache.write_text("in the way")
    with pytest.raises(GradveilError, match=r"cannot write .*GRADVEIL_CACHE"):
        load(str(photos))


BUILD = """
from gradveil.data import load

photos, gate, sums = arguments
gate.wait(60)
sums.put(load(photos).images.sum().item())
"""


def test_two_processes_that_build_at_once_are_both_right(
    photos: Path, cache: Path, start_process: Callable[..., BaseProcess]
) -> None:
    context = multiprocessing.get_context("forkserver")
    gate, sums = context.Barrier(2), context.Queue()
    workers = [start_process(BUILD, str(photos), gate, sums) for _ in range(2)]
    found = {sums.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert found == {load(str(photos)).images.sum().item()} and len(stamps(cache)) == 3


def test_the_cache_folder_follows_the_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("GRADVEIL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/gradveil"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/gradveil"
