"""Fashion-MNIST and the small part of it inside the package."""

import gzip
import hashlib
import importlib.util
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gradveil.core.errors import GradveilError
from gradveil.data import load, mini, verify
from gradveil.data.fashion_mnist import FASHION_MNIST, idx

Root = Callable[[str], Path]


def test_real_fashion_mnist_has_6000_training_and_1000_test_images_of_each_class(
    real: Root,
) -> None:
    for split, each in (("train", 6000), ("test", 1000)):
        found = load("fashion-mnist", split, root=real("FashionMNIST"))
        assert (
            found.images.shape == (10 * each, 1, 28, 28)
            and found.labels.bincount().tolist() == [each] * 10
        )
    assert found.labels[:5].tolist() == [9, 2, 1, 1, 6] and found.classes[9] == "Ankle boot"


def test_real_fashion_mnist_resized_is_pillows_bilinear(real: Root) -> None:
    root = real("FashionMNIST")
    small, large = (load("fashion-mnist", "test", root=root, image_size=size) for size in (28, 32))
    assert large.images.shape == (10_000, 1, 32, 32)
    expected = Image.fromarray(small.images[7, 0].numpy()).resize(
        (32, 32), Image.Resampling.BILINEAR
    )
    assert (large.images[7, 0].numpy() == np.asarray(expected)).all()


def test_one_byte_changed_in_the_real_files_is_found(real: Root, tmp_path: Path) -> None:
    shutil.copytree(real("FashionMNIST") / "FashionMNIST", tmp_path / "FashionMNIST")
    assert verify("fashion-mnist", tmp_path).ok
    path = tmp_path / "FashionMNIST/raw/t10k-labels-idx1-ubyte.gz"
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    state = verify("fashion-mnist", tmp_path)
    assert not state.ok and [check.path for check in state.files if not check.ok] == [path]
    path.unlink()
    assert [check.problem for check in verify("fashion-mnist", tmp_path).files if not check.ok] == [
        "missing"
    ]


def test_idx_reads_its_shape_and_values() -> None:
    raw = struct.pack(">4BII", 0, 0, 8, 2, 2, 3) + bytes(range(6))
    assert idx(gzip.compress(raw), "here").tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0\0\x08",
        struct.pack(">4BI", 0, 0, 8, 1, 9) + b"12",
        struct.pack(">4BI", 0, 0, 13, 1, 1) + b"1234",
    ],
)
def test_idx_refuses_what_is_none(raw: bytes) -> None:
    with pytest.raises(GradveilError, match=r"here: not an? "):
        idx(gzip.compress(raw), "here")


def test_idx_refuses_what_is_not_gzipped() -> None:
    with pytest.raises(GradveilError, match="here: not a gzipped idx file"):
        idx(b"plain", "here")


def test_mini_is_balanced_and_needs_no_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    train, test = load("fashion-mnist-mini"), load("fashion-mnist-mini", "test")
    assert (
        train.images.shape == (2000, 1, 28, 28) and train.labels.bincount().tolist() == [200] * 10
    )
    assert test.images.shape == (500, 1, 28, 28) and test.labels.bincount().tolist() == [50] * 10
    assert len({image.numpy().tobytes() for image in train.images}) == 2000
    assert verify("fashion-mnist-mini").ok and not cache.exists()
    assert load("fashion-mnist-mini", image_size=32).size == 32


def test_mini_holds_real_images_with_their_real_labels(real: Root) -> None:
    root = real("FashionMNIST")
    for split in ("train", "test"):
        official, part = load("fashion-mnist", split, root=root), load("fashion-mnist-mini", split)
        known = {
            image.numpy().tobytes(): int(label)
            for image, label in zip(official.images, official.labels, strict=True)
        }
        assert [known[image.numpy().tobytes()] for image in part.images] == part.labels.tolist()


def test_mini_can_be_made_again(real: Root, tmp_path: Path) -> None:
    root = real("FashionMNIST")
    spec = importlib.util.spec_from_file_location(
        "make_mini", Path(__file__).parents[2] / "tools" / "make_mini.py"
    )
    assert spec is not None and spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    maker.make(root, tmp_path)
    for split in ("train", "test"):
        with Image.open(tmp_path / f"{split}.png") as picture:
            assert (
                mini.cut(np.array(picture))
                == load("fashion-mnist-mini", split).images[:, 0].numpy()
            ).all()


def test_mini_is_small_and_carries_its_license() -> None:
    folder = Path(mini.__file__).parent
    assert sum(path.stat().st_size for path in folder.glob("*.png")) < 2_000_000
    assert "Copyright (c) 2017 Zalando SE" in (folder / "LICENSE").read_text()


def test_cutting_a_sheet_undoes_making_it() -> None:
    images = torch.arange(100 * 784).remainder(251).to(torch.uint8).reshape(100, 28, 28).numpy()
    assert (mini.cut(mini.sheet(images)) == images).all()


def test_labels_that_do_not_fit_the_images_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "FashionMNIST/raw"
    folder.mkdir(parents=True)
    images, labels = (
        struct.pack(">4BIII", 0, 0, 8, 3, 2, 28, 28) + bytes(1568),
        struct.pack(">4BI", 0, 0, 8, 1, 1) + b"\1",
    )
    files = []
    for file, raw in zip(FASHION_MNIST.files[:2], (images, labels), strict=True):
        data = gzip.compress(raw)
        (tmp_path / file.path).write_bytes(data)
        files.append(replace(file, md5=hashlib.md5(data).hexdigest(), size=len(data)))
    with pytest.raises(GradveilError, match="do not fit"):
        replace(FASHION_MNIST, files=tuple(files)).pixels(tmp_path, "train")
