"""A model for a split: by name, or a copy of a user's module; what cannot work is one line."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import toys
from gradveil.core.errors import GradveilError
from gradveil.models import build, build_for

SPLIT = toys.split(4)


class Answering(nn.Module):
    """A linear model whose answer goes through a function, which may do anything."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(toys.CHANNELS * toys.SIZE**2, toys.CLASSES)

    def forward(self, images: Tensor) -> object:
        logits = self.layer(images.flatten(1))
        match self.kind:
            case "fails":
                raise KeyError("no such key")
            case "exits":
                sys.exit(3)
            case "complex":
                return logits.to(torch.complex64)
            case "whole numbers":
                return logits.long()
            case "no tensor":
                return [logits]
            case "too few":
                return logits[:, :3]
        return logits


def test_a_name_gives_the_model_that_build_gives() -> None:
    found = build_for("lenet", SPLIT, seed=3)
    expected = build(
        "lenet",
        channels=toys.CHANNELS,
        size=toys.SIZE,
        classes=toys.CLASSES,
        mean=SPLIT.mean,
        std=SPLIT.std,
        seed=3,
    )
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value)


@pytest.mark.parametrize("check", [True, False])
def test_a_module_is_copied_and_stays_as_it_is(check: bool) -> None:
    model = toys.conv_with_norm().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = build_for(model, SPLIT, check=check)
    assert found is not model and model.training and found.training
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value)
        assert torch.equal(found.state_dict()[name], value)
        assert found.state_dict()[name].data_ptr() != model.state_dict()[name].data_ptr()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("fails", "model Answering fails on images of shape (2, 3, 8, 8): KeyError: 'no such key'"),
        ("exits", "model Answering fails on images of shape (2, 3, 8, 8): SystemExit: 3"),
        ("complex", "model Answering gives values of type torch.complex64: expected logits"),
        ("whole numbers", "model Answering gives values of type torch.int64: expected logits"),
        ("no tensor", "model Answering gives a list for images of shape (2, 3, 8, 8)"),
        (
            "too few",
            "model Answering gives (2, 3) for images of shape (2, 3, 8, 8): expected (2, 10)",
        ),
    ],
)
def test_a_module_that_does_not_fit_is_refused(kind: str, says: str) -> None:
    assert toys.refused(build_for, Answering(kind), SPLIT).startswith(says)
    build_for(Answering(kind), SPLIT, check=False)


def test_the_line_of_the_users_code_is_named() -> None:
    assert "(test_build_for.py, line " in toys.refused(build_for, Answering("fails"), SPLIT)


def test_what_is_no_module_or_has_no_weights_yet_is_refused() -> None:
    said = toys.refused(build_for, 3, SPLIT)
    assert said.startswith("model: a whole number; expected a torch.nn.Module")
    assert "has no parameters to train" in toys.refused(build_for, nn.Flatten(), SPLIT)
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(toys.CLASSES))
    assert "'1.weight' has no shape yet" in toys.refused(build_for, lazy, SPLIT, check=False)
    meta = toys.mlp().to("meta")
    assert "'1.weight' has no values (device meta)" in toys.refused(build_for, meta, SPLIT)


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    model = toys.mlp()
    kept = model.get_parameter("1.weight") * 2  # with a history, which torch does not copy
    model.register_buffer("kept", kept)
    assert toys.refused(build_for, model, SPLIT).startswith("model Sequential cannot be copied: ")


def test_a_factorys_model_is_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "from torch import nn\ndef lazy():\n    return nn.LazyLinear(3)\n"
    (tmp_path / "lazy_model_of_a_test.py").write_text(lines)
    monkeypatch.chdir(tmp_path)
    assert "has no shape yet" in toys.refused(build_for, "lazy_model_of_a_test:lazy", SPLIT)


def test_a_model_for_other_channels_says_how_to_give_these() -> None:
    with pytest.raises(
        GradveilError, match=r"; it takes images of 3 channel\(s\): give channels 3$"
    ):
        build_for(toys.conv_with_norm().float(), toys.split(2, 1))
