"""Loading by name: roots, fractions, sizes, and parts of a split."""

from pathlib import Path

import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.data import find_root, load, verify
from gradveil.data.images import balanced


def test_an_unknown_name_lists_the_choices() -> None:
    with pytest.raises(
        GradveilError,
        match=r"unknown dataset 'cifar': choose from cifar10, cifar100, .*folder:PATH",
    ):
        load("cifar")
    with pytest.raises(GradveilError, match="unknown dataset ''"):
        verify("")
    with pytest.raises(GradveilError, match="names no folder"):
        load("folder:")


def test_an_unknown_split_lists_the_choices() -> None:
    with pytest.raises(GradveilError, match="unknown split 'val': choose from train, test"):
        load("fashion-mnist-mini", "val")


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5, float("nan")])
def test_a_fraction_out_of_range_is_an_error(fraction: float) -> None:
    with pytest.raises(GradveilError, match=r"fraction .* is out of range"):
        load("fashion-mnist-mini", fraction=fraction)


@pytest.mark.parametrize("size", [0, -3, 10**6])
def test_an_image_size_out_of_range_is_an_error(size: int) -> None:
    with pytest.raises(GradveilError, match=f"image size {size} is out of range"):
        load("fashion-mnist-mini", image_size=size)


def test_a_fraction_is_balanced_and_depends_on_the_seed_alone() -> None:
    whole = load("fashion-mnist-mini")
    tenth, again, other = (
        load("fashion-mnist-mini", fraction=0.1, seed=seed) for seed in (3, 3, 4)
    )
    assert tenth.labels.bincount().tolist() == [20] * 10
    assert torch.equal(tenth.images, again.images) and not torch.equal(tenth.images, other.images)
    assert (tenth.classes, tenth.mean, tenth.split) == (whole.classes, whole.mean, whole.split)


def test_a_fraction_keeps_the_order_and_rounds_each_class_but_never_to_nothing() -> None:
    labels = torch.tensor([0] * 10 + [1] * 3 + [2] + [0] * 5)
    kept = balanced(labels, 0.2, seed=0)
    assert kept.tolist() == sorted(set(kept.tolist()))
    assert labels[kept].bincount().tolist() == [3, 1, 1]


def test_a_smaller_fraction_is_part_of_a_larger_one() -> None:
    labels = torch.arange(300) % 3
    assert set(balanced(labels, 0.1, 5).tolist()) < set(balanced(labels, 0.5, 5).tolist())


def test_selected_images_keep_their_labels() -> None:
    whole = load("fashion-mnist-mini")
    part = whole.select([7, 3])
    assert (
        torch.equal(part.images, whole.images[[7, 3]])
        and part.labels.tolist() == [7, 3]
        and len(whole.select([])) == 0
    )


def test_selecting_what_is_not_there_is_an_error() -> None:
    whole = load("fashion-mnist-mini", "test")
    with pytest.raises(
        GradveilError, match="no image 500 in fashion-mnist-mini test: choose from 0 to 499"
    ):
        whole.select([0, 500])
    with pytest.raises(GradveilError, match=r"torch\.bool cannot select"):
        whole.select(whole.labels == 3)


def test_the_root_is_the_one_given_else_the_variables_else_the_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert find_root() == tmp_path / ".local/share/gradveil"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert find_root() == tmp_path / "xdg/gradveil"
    monkeypatch.setenv("GRADVEIL_DATA", str(tmp_path / "chosen"))
    assert find_root() == tmp_path / "chosen"
    assert find_root(Path("~/given")) == tmp_path / "given"
