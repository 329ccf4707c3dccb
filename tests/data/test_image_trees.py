"""Tiny ImageNet and Medical MNIST: small stand-ins, and the real files where they are."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gradveil.core.errors import GradveilError
from gradveil.data import load, verify
from gradveil.data.decode import in_test
from gradveil.data.medical_mnist import MEDICAL_MNIST

Root = Callable[[str], Path]
IDS = ("n00000002", "n00000001")


def picture(path: Path, seed: int, *, gray: bool = False, size: int = 64) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size, size) if gray else (size, size, 3)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8)).save(
        path, "JPEG"
    )


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Two classes with twelve training images each, one of them gray, and four test images."""
    root = tmp_path / "root"
    folder = root / "tiny-imagenet-200"
    for wnid in IDS:
        for number in range(12):
            picture(folder / f"train/{wnid}/images/{wnid}_{number}.JPEG", number, gray=number == 3)
    for number in range(4):
        picture(folder / f"val/images/val_{number}.JPEG", 100 + number)
    (folder / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in IDS))
    (folder / "words.txt").write_text("n00000001\tgoldfish, Carassius\nn00000002\tbullfrog\n")
    (folder / "val/val_annotations.txt").write_text(
        "".join(f"val_{n}.JPEG\t{IDS[n % 2]}\t0\t0\t1\t1\n" for n in range(4))
    )
    return root


@pytest.fixture
def medical(tmp_path: Path) -> Path:
    """Six classes of forty images; the first image is there twice."""
    root = tmp_path / "root"
    for number, layout in enumerate(MEDICAL_MNIST.layout):
        for image in range(40):
            picture(
                root / Path(layout).parent / f"{image:06}.jpeg",
                1000 * number + max(image, 1),
                gray=True,
            )
    return root


def test_tiny_imagenet_labels_follow_the_sorted_ids_and_the_annotations(tiny: Path) -> None:
    train, test = load("tiny-imagenet", root=tiny), load("tiny-imagenet", "test", root=tiny)
    assert train.images.shape == (24, 3, 64, 64) and train.labels.tolist() == [0] * 12 + [1] * 12
    assert test.labels.tolist() == [1, 0, 1, 0] and train.classes == (
        "goldfish, Carassius",
        "bullfrog",
    )
    assert (train.images[3, 0] == train.images[3, 1]).all()
    with Image.open(tiny / "tiny-imagenet-200/train/n00000001/images/n00000001_10.JPEG") as image:
        assert (train.images[10].permute(1, 2, 0).numpy() == np.asarray(image)).all()


def test_tiny_imagenet_verification_says_how_large_the_part_is(tiny: Path) -> None:
    state = verify("tiny-imagenet", tiny)
    assert state.ok and state.note == "12 of 500 training images per class, 4 of 10000 test images"


def test_a_broken_jpeg_of_tiny_imagenet_is_named(tiny: Path) -> None:
    path = tiny / "tiny-imagenet-200/train/n00000002/images/n00000002_7.JPEG"
    path.write_bytes(path.read_bytes()[:400])
    state = verify("tiny-imagenet", tiny)
    assert not state.ok and [check.path for check in state.files if not check.ok] == [path]
    with pytest.raises(GradveilError, match=rf"broken image {path}: .*; replace or remove it$"):
        load("tiny-imagenet", root=tiny)


def test_a_jpeg_of_another_size_is_named(tiny: Path) -> None:
    path = tiny / "tiny-imagenet-200/val/images/val_2.JPEG"
    picture(path, 1, size=32)
    with pytest.raises(GradveilError, match=f"{path} is 32x32: expected 64x64"):
        load("tiny-imagenet", "test", root=tiny)


def test_an_unknown_class_in_the_annotations_is_an_error(tiny: Path) -> None:
    (tiny / "tiny-imagenet-200/val/val_annotations.txt").write_text("val_0.JPEG\tn99999999\n")
    with pytest.raises(GradveilError, match=r"val_annotations\.txt: corrupted"):
        load("tiny-imagenet", "test", root=tiny)


def test_annotations_cannot_point_outside_their_folder(tiny: Path, tmp_path: Path) -> None:
    picture(tmp_path / "outside.JPEG", 1)
    (tiny / "tiny-imagenet-200/val/val_annotations.txt").write_text(
        "../../../../outside.JPEG\tn00000001\n"
    )
    with pytest.raises(GradveilError, match="tiny-imagenet is not in"):
        load("tiny-imagenet", "test", root=tiny)


def test_a_missing_class_of_tiny_imagenet_is_named(tiny: Path) -> None:
    (tiny / "tiny-imagenet-200/wnids.txt").write_text("n00000001\nn00000002\nn00000003\n")
    with pytest.raises(GradveilError, match="no tiny-imagenet-200/train/n00000003/images"):
        load("tiny-imagenet", root=tiny)
    assert not verify("tiny-imagenet", tiny).ok


def test_medical_mnist_divides_by_content_so_that_no_duplicate_is_in_both_splits(
    medical: Path,
) -> None:
    train, test = load("medical-mnist", root=medical), load("medical-mnist", "test", root=medical)
    assert len(train) + len(test) == 240 and 0.1 < len(test) / 240 < 0.3
    content = [{image.numpy().tobytes() for image in part.images} for part in (train, test)]
    assert not content[0] & content[1] and len(content[0] | content[1]) == 240 - 6
    assert train.channels == 1 and len(train.classes) == 6


def test_medical_mnist_without_a_class_says_which(medical: Path) -> None:
    for path in (medical / "medical-mnist/CXR").iterdir():
        path.unlink()
    with pytest.raises(GradveilError, match=r"no medical-mnist/CXR/\*\.jpeg"):
        load("medical-mnist", root=medical)
    state = verify("medical-mnist", medical)
    assert not state.ok and [check.path.name for check in state.files if not check.ok] == ["CXR"]


def test_medical_mnist_with_too_few_images_says_so(medical: Path) -> None:
    for path in (medical / "medical-mnist/CXR").iterdir():
        if path.name != "000005.jpeg":
            path.unlink()
    with Image.open(medical / "medical-mnist/CXR/000005.jpeg") as image:
        lacking = "train" if in_test(np.asarray(image).tobytes()) else "test"
    with pytest.raises(
        GradveilError, match=f"too few images: by content, the {lacking} split lacks"
    ):
        load("medical-mnist", lacking, root=medical)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "folder"), [("tiny-imagenet", "tiny-imagenet-200"), ("medical-mnist", "medical-mnist")]
)
def test_the_constants_are_those_of_the_real_training_pixels(
    real: Root, name: str, folder: str
) -> None:
    found = load(name, root=real(folder))
    pixels = found.images[::4].double() / 255
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx(found.mean, abs=0.01)
    assert pixels.std((0, 2, 3)).tolist() == pytest.approx(found.std, abs=0.01)
