"""A folder of the user's own images."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gradveil.core.errors import GradveilError
from gradveil.data import load, verify
from gradveil.data.decode import in_test


def fill(
    folder: Path,
    count: int,
    *,
    mode: str = "RGB",
    size: tuple[int, int] = (8, 8),
    suffix: str = "png",
    seed: int = 0,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for number in range(count):
        pixels = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), np.uint8))
        pixels.convert(mode).save(folder / f"{number:03}.{suffix}")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of thirty, no split."""
    fill(tmp_path / "photos/cat", 30, seed=1)
    fill(tmp_path / "photos/dog", 30, seed=2)
    return tmp_path / "photos"


@pytest.fixture
def parted(tmp_path: Path) -> Path:
    """Two classes in train and test folders."""
    for split, count, seed in (("train", 5, 1), ("test", 2, 2)):
        fill(tmp_path / f"photos/{split}/cat", count, seed=seed)
        fill(tmp_path / f"photos/{split}/dog", count, seed=seed + 10)
    return tmp_path / "photos"


def test_a_folder_is_loaded_by_prefix_or_by_path(photos: Path) -> None:
    for name in (f"folder:{photos}", str(photos)):
        found = load(name)
        assert (
            found.classes == ("cat", "dog")
            and found.name == f"folder:{photos}"
            and found.channels == 3
        )


def test_content_divides_a_folder_and_every_image_is_in_one_split(photos: Path) -> None:
    train, test = load(str(photos)), load(str(photos), "test")
    content = [{image.numpy().tobytes() for image in part.images} for part in (train, test)]
    assert (
        len(content[0] | content[1]) == 60 and not content[0] & content[1] and 2 <= len(test) <= 24
    )


def test_the_division_by_content_does_not_depend_on_the_size_asked_for(photos: Path) -> None:
    assert [load(str(photos), image_size=size).labels.tolist() for size in (4, 16)] == [
        load(str(photos)).labels.tolist()
    ] * 2


def test_given_splits_are_kept(parted: Path) -> None:
    train, test = load(str(parted)), load(str(parted), "test")
    assert train.labels.tolist() == [0] * 5 + [1] * 5 and test.labels.tolist() == [0, 0, 1, 1]
    with Image.open(parted / "train/dog/003.png") as image:
        assert (train.images[8].permute(1, 2, 0).numpy() == np.asarray(image)).all()


def test_mean_and_std_of_both_splits_come_from_the_training_pixels(parted: Path) -> None:
    train, test = load(str(parted)), load(str(parted), "test")
    pixels = train.images.double() / 255
    for found in (train, test):
        assert found.mean == pytest.approx(pixels.mean((0, 2, 3)).tolist())
        assert found.std == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist())


def test_gray_images_give_one_channel_unless_one_is_colored(parted: Path) -> None:
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            fill(parted / part / name, 5, mode="L")
    fill(parted / "train/cat", 1, mode="1")
    assert load(str(parted)).channels == 1
    fill(parted / "test/cat", 1, mode="P")
    assert load(str(parted)).channels == 3


def test_images_of_several_sizes_need_an_image_size(parted: Path) -> None:
    fill(parted / "train/cat", 1, size=(12, 8))
    with pytest.raises(GradveilError, match=r"000\.png is 12x8.*give an image size"):
        load(str(parted))
    assert load(str(parted), image_size=8).images.shape == (10, 3, 8, 8)
    assert "several sizes" in verify(str(parted)).note


def test_the_middle_square_is_kept(tmp_path: Path) -> None:
    for name in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / "set" / name).mkdir(parents=True)
        pixels = np.zeros((4, 10, 3), np.uint8)
        pixels[:, 3:7] = 200
        Image.fromarray(pixels).save(tmp_path / "set" / name / "x.bmp")
    assert (load(str(tmp_path / "set"), image_size=4).images == 200).all()


def test_an_image_cut_short_is_named(photos: Path) -> None:
    path = photos / "dog/007.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(GradveilError, match=f"broken image {path}"):
        load(str(photos))
    state = verify(str(photos))
    assert not state.ok and [check.path for check in state.files] == [path]


def test_a_text_file_called_png_is_named(photos: Path) -> None:
    (photos / "cat/z.png").write_text("no image")
    with pytest.raises(GradveilError, match=r"broken image .*z\.png"):
        load(str(photos))


@pytest.mark.parametrize(
    ("count", "says"),
    [
        (2, r" 1 more cannot be used: \S+/dog/001\.png$"),
        (6, r" 5 more .*: \S+/002\.png, \S+/004\.png, \S+/dog/001\.png and 2 more$"),
    ],
)
def test_several_broken_images_are_named_together(photos: Path, count: int, says: str) -> None:
    names = ("cat/000", "dog/001", "cat/002", "dog/003", "cat/004", "dog/005")[:count]
    for number, name in enumerate(names):
        path = photos / f"{name}.png"
        path.write_bytes(path.read_bytes()[:60] if number % 2 else b"no image")
    with pytest.raises(GradveilError, match=rf"^broken image \S+/cat/000\.png: .*;{says}"):
        load(str(photos))


def test_sixteen_bit_images_are_refused_rather_than_clipped(photos: Path) -> None:
    Image.fromarray(np.full((8, 8), 1000, np.uint16)).save(photos / "cat/deep.png")
    with pytest.raises(GradveilError, match=r"deep\.png has more than 8 bits"):
        load(str(photos))


def test_transparent_palette_images_load(parted: Path) -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.save(parted / "train/cat/000.png", transparency=bytes([0, 128]))
    assert load(str(parted)).images[0, :, 0, 0].tolist() == [10, 20, 30]


def test_other_files_are_ignored_and_counted(photos: Path) -> None:
    (photos / "cat/notes.txt").write_text("x")
    (photos / "dog/.DS_Store").write_text("x")
    state = verify(str(photos))
    assert (
        state.ok and "60 images, 2 classes" in state.note and "2 other files ignored" in state.note
    )
    assert len(load(str(photos))) + len(load(str(photos), "test")) == 60


def test_an_empty_class_is_an_error(photos: Path) -> None:
    (photos / "eel").mkdir()
    with pytest.raises(GradveilError, match=f"class folder {photos / 'eel'} has no images"):
        load(str(photos))
    assert not verify(str(photos)).ok


def test_one_class_or_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GradveilError, match="has 0 class folders: at least 2"):
        load(f"folder:{tmp_path}")
    fill(tmp_path / "only/one", 3)
    with pytest.raises(GradveilError, match="has 1 class folder: at least 2"):
        load(f"folder:{tmp_path / 'only'}")


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    for call in (load, verify):
        with pytest.raises(GradveilError, match=f"no folder {tmp_path / 'gone'}"):
            call(f"folder:{tmp_path / 'gone'}")


def test_train_without_test_is_an_error_and_no_class_named_train(tmp_path: Path) -> None:
    fill(tmp_path / "set/train/a", 2)
    fill(tmp_path / "set/train/b", 2)
    fill(tmp_path / "set/val/a", 2)
    with pytest.raises(GradveilError, match="holds class folders, but there is no"):
        load(str(tmp_path / "set"))


def test_a_test_class_that_is_not_trained_on_is_an_error(parted: Path) -> None:
    fill(parted / "test/eel", 2)
    with pytest.raises(GradveilError, match="class 'eel' is in"):
        load(str(parted))


def test_too_few_images_to_divide_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        (tmp_path / "set" / name).mkdir(parents=True)
        Image.new("L", (8, 8), value).save(tmp_path / "set" / name / "x.png")
    sides = [in_test(b"(8, 8)" + bytes([value] * 192)) for value in (1, 2)]
    lacking = "test" if not any(sides) else "train"
    with pytest.raises(GradveilError, match=rf"the {lacking} split has .* divide them into"):
        load(str(tmp_path / "set"), lacking)


def test_a_constant_channel_has_a_spread_that_can_divide(parted: Path) -> None:
    for path in parted.rglob("*.png"):
        Image.new("RGB", (8, 8), (0, 0, 0)).save(path)
    assert load(str(parted)).std == pytest.approx((1 / 255,) * 3)
    assert load(str(parted)).images.dtype == torch.uint8
