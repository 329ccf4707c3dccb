"""A user's own model: found, called with what it takes, and every mistake told in one line."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gradveil import models
from gradveil.core.errors import GradveilError

SOURCE = """
import torch
from torch import nn

answer = 42
ready = nn.Linear(2, 2)

class Net(nn.Module):
    def __init__(self, classes, channels):
        super().__init__()
        self.layer = nn.Linear(channels, classes)

def everything(**settings):
    module = nn.Identity()
    module.settings = settings
    return module

def nothing():
    return nn.Linear(2, 2)

def more(classes, depth):
    return nn.Identity()

def number(size):
    return size

def broken(classes):
    raise RuntimeError("two\\nlines")

def leaves():
    raise SystemExit(3)

def renamed(in_channels, num_classes, image_size=1):
    module = nn.Linear(in_channels, num_classes)
    module.size = image_size
    return module

def handing_on(weights=None, **more):
    return renamed(**more)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that lies in the current folder."""
    name = f"own_model_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return name


def make(reference: str, seed: int = 0) -> nn.Module:
    return models.build(reference, channels=3, size=8, classes=7, seed=seed)


def test_a_class_gets_the_settings_its_signature_names(module: str) -> None:
    layer = make(f"{module}:Net").get_submodule("layer")
    assert isinstance(layer, nn.Linear) and layer.weight.shape == (7, 3)


def test_a_factory_with_open_keywords_gets_all_three(module: str) -> None:
    assert getattr(make(f"{module}:everything"), "settings", None) == {
        "channels": 3,
        "size": 8,
        "classes": 7,
    }


@pytest.mark.parametrize("name", ["renamed", "handing_on"])
def test_a_factory_gets_what_it_asks_for_by_usual_names(module: str, name: str) -> None:
    made = make(f"{module}:{name}")
    assert isinstance(made, nn.Linear) and made.weight.shape == (7, 3)
    assert getattr(made, "size", None) == 8


def test_a_module_in_place_of_a_factory_is_copied(module: str) -> None:
    made, again = make(f"{module}:ready"), make(f"{module}:ready")
    assert isinstance(made, nn.Linear) and isinstance(again, nn.Linear)
    assert made is not again and torch.equal(made.weight, again.weight)


def test_a_seed_fixes_the_weights_of_a_users_model(module: str) -> None:
    before = torch.get_rng_state()
    first, again, other = (
        make(f"{module}:nothing", seed).state_dict()["weight"] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_the_import_path_is_left_as_it_was(module: str) -> None:
    before = list(sys.path)
    make(f"{module}:nothing")
    assert sys.path == before


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("missing", "has no 'missing'; it has Net, everything"),
        ("answer", "is a whole number: name a module, or a function or class"),
        ("more", "could not be made: TypeError: .*depth"),
        ("number", "gave a whole number: .*torch.nn.Module"),
        ("broken", r"could not be made: RuntimeError: two lines \(own_model_\d+.py, line 28\)$"),
        ("leaves", r"could not be made: SystemExit: 3 \(own_model_\d+.py, line 31\)$"),
        ("", "write package.module:factory"),
        ("a b", "write package.module:factory"),
    ],
)
def test_a_mistake_in_the_factory_is_one_line(module: str, attribute: str, message: str) -> None:
    with pytest.raises(GradveilError, match=message) as caught:
        make(f"{module}:{attribute}")
    assert "\n" not in str(caught.value) and repr(f"{module}:{attribute}") in str(caught.value)


def test_the_name_of_a_file_in_place_of_a_modules_says_what_to_write(module: str) -> None:
    with pytest.raises(GradveilError, match=rf"current folder; write {module}:Net$"):
        make(f"{module}.py:Net")


@pytest.mark.parametrize("reference", ["nowhere_at_all:Net", "gradveil.nowhere_at_all:Net"])
def test_a_module_that_is_not_there_is_named(reference: str) -> None:
    with pytest.raises(GradveilError, match=f"there is no module '{reference.partition(':')[0]}'"):
        make(reference)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("def (", "SyntaxError"),
        ("import nowhere_at_all", "ModuleNotFoundError"),
        ("1 / 0", "ZeroDiv"),
    ],
)
def test_a_module_that_fails_to_import_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, kind: str
) -> None:
    name = f"broken_model_{kind.lower()}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GradveilError, match=f"importing '{name}' failed: {kind}") as caught:
        make(f"{name}:Net")
    assert "\n" not in str(caught.value)
