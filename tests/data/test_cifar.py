"""CIFAR in the official layout: real files where they are, else small stand-ins with checksums."""

import hashlib
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.data import load, verify
from gradveil.data.cifar import CIFAR10, CIFAR100, Cifar
from gradveil.data.files import File, loads

Root = Callable[[str], Path]


class Malicious:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def small(root: Path, dataset: Cifar) -> Cifar:
    """A stand-in with 20 images a file, in the official layout, and the dataset that expects it."""
    rng = np.random.default_rng(0)
    for path in (*dataset.train_batches, *dataset.test_batches):
        labels = [number % dataset.classes for number in range(20)]
        content: dict[bytes, object] = {
            b"data": rng.integers(0, 256, (20, 3072), np.uint8),
            dataset.label_key.encode(): labels,
            b"filenames": [b"a.png"] * 20,
        }
        write(root / path, content)
    write(
        root / dataset.meta,
        {
            dataset.names_key.encode(): [
                f"class {number}".encode() for number in range(dataset.classes)
            ]
        },
    )
    return expecting(root, dataset)


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=4))


def expecting(root: Path, dataset: Cifar) -> Cifar:
    sums = [(file.path, (root / file.path).read_bytes()) for file in dataset.files]
    return replace(
        dataset,
        files=tuple(File(path, hashlib.md5(data).hexdigest(), len(data)) for path, data in sums),
    )


def test_real_cifar100_has_500_training_and_100_test_images_of_each_class(real: Root) -> None:
    root = real("cifar-100-python")
    for split, each in (("train", 500), ("test", 100)):
        found = load("cifar100", split, root=root)
        assert found.images.shape == (100 * each, 3, 32, 32)
        assert found.images.dtype == torch.uint8 and found.labels.dtype == torch.int64
        assert found.labels.bincount().tolist() == [each] * 100
    assert found.classes[:3] == ("apple", "aquarium_fish", "baby")


def test_real_cifar100_pixels_have_the_published_spread(real: Root) -> None:
    found = load("cifar100", root=real("cifar-100-python"), fraction=0.1)
    pixels = found.images.double() / 255
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx(found.mean, abs=0.005)
    assert pixels.std((0, 2, 3)).tolist() == pytest.approx(found.std, abs=0.005)


def test_a_real_cifar100_file_with_one_byte_changed_is_named(real: Root, tmp_path: Path) -> None:
    root = real("cifar-100-python")
    shutil.copytree(
        root / "cifar-100-python",
        tmp_path / "cifar-100-python",
        ignore=shutil.ignore_patterns("train"),
    )
    (tmp_path / "cifar-100-python/train").symlink_to(root / "cifar-100-python/train")
    assert verify("cifar100", tmp_path).ok
    with (tmp_path / "cifar-100-python/test").open("rb+") as file:
        file.seek(20_000_000)
        byte = file.read(1)[0]
        file.seek(20_000_000)
        file.write(bytes([byte ^ 1]))
    state = verify("cifar100", tmp_path)
    wrong = [check for check in state.files if not check.ok]
    assert (
        not state.ok
        and [check.path.name for check in wrong] == ["test"]
        and "corrupted" in wrong[0].problem
    )
    with pytest.raises(GradveilError, match=r"cifar-100-python/test: corrupted"):
        load("cifar100", "test", root=tmp_path)


def test_cifar10_joins_its_five_batches_in_order(tmp_path: Path) -> None:
    dataset = small(tmp_path, CIFAR10)
    images, labels, classes = dataset.pixels(tmp_path, "train")
    assert (
        images.shape == (100, 3, 32, 32)
        and labels.tolist() == [number % 10 for number in range(20)] * 5
    )
    third = pickle.loads((tmp_path / "cifar-10-batches-py/data_batch_3").read_bytes())
    assert (images[40:60].reshape(20, -1) == third[b"data"]).all()
    assert classes[9] == "class 9" and dataset.verify(tmp_path).ok


def test_a_missing_file_is_named_with_the_command_that_gets_it(tmp_path: Path) -> None:
    with pytest.raises(GradveilError) as error:
        load("cifar100", root=tmp_path)
    text = str(error.value)
    assert f"not in {tmp_path}" in text and "cifar-100-python/{train,test,meta}" in text
    assert f"gradveil data fetch cifar100 --data-root {tmp_path}" in text and "\n" not in text
    assert {check.problem for check in verify("cifar100", tmp_path).files} == {"missing"}


def test_a_truncated_file_is_called_truncated(tmp_path: Path) -> None:
    dataset = small(tmp_path, CIFAR100)
    path = tmp_path / "cifar-100-python/train"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-10])
    problems = {check.path.name: check.problem for check in dataset.verify(tmp_path).files}
    assert problems == {"train": f"truncated: {size - 10} of {size} bytes", "test": "", "meta": ""}
    with pytest.raises(GradveilError, match="train: truncated"):
        dataset.pixels(tmp_path, "train")


def test_a_file_with_another_checksum_is_never_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    dataset = small(tmp_path, CIFAR100)
    write(tmp_path / "cifar-100-python/train", Malicious(mark))
    monkeypatch.setattr("gradveil.data.cifar.loads", lambda *_: pytest.fail("it was unpickled"))
    with pytest.raises(GradveilError, match="train: "):
        dataset.pixels(tmp_path, "train")
    assert not mark.exists()


def test_a_malicious_pickle_with_the_right_checksum_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    dataset = small(tmp_path, CIFAR100)
    write(tmp_path / "cifar-100-python/train", {b"data": Malicious(mark)})
    with pytest.raises(GradveilError, match=r"train: refused to unpickle: it asks for \w+\.system"):
        expecting(tmp_path, dataset).pixels(tmp_path, "train")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({b"a": np.array([len], dtype=object)}, "array of 'O8'"),
        ({b"a": np.arange(3, dtype=np.int64)}, "array of 'i8'"),
        ({b"a": Path()}, "it asks for pathlib"),
        ({b"a": torch.float32}, "it asks for "),
        ({b"a": np.float64(1)}, "it asks for numpy"),
        ([1], "it holds a list"),
    ],
)
def test_only_byte_arrays_and_plain_containers_are_unpickled(content: object, reason: str) -> None:
    with pytest.raises(GradveilError, match=f"here: refused to unpickle: {reason}"):
        loads(pickle.dumps(content, protocol=4), "here")


def test_a_pickle_cut_short_is_refused() -> None:
    with pytest.raises(GradveilError, match="here: refused to unpickle"):
        loads(pickle.dumps({b"a": [1, 2]})[:-4], "here")


def test_a_batch_whose_labels_do_not_fit_its_images_is_refused(tmp_path: Path) -> None:
    dataset = small(tmp_path, CIFAR100)
    write(
        tmp_path / "cifar-100-python/train",
        {b"data": np.zeros((3, 3072), np.uint8), b"fine_labels": [1, 2]},
    )
    with pytest.raises(GradveilError, match="not a batch of CIFAR-100"):
        expecting(tmp_path, dataset).pixels(tmp_path, "train")
