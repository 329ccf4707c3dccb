"""Checkpoints of other programs: every kind of file that people have, and what does not fit."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import toys
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.defenses import Defense
from gradveil.defenses.weights import load_weights
from gradveil.models.checkpoints import load_checkpoint, read_settings
from gradveil.models.normalized import normalized

State = dict[str, Tensor]


def net(seed: int = 0, channels: int = 3) -> nn.Module:
    return toys.conv_with_norm(channels, seed=seed).float()


def prefixed(state: State, prefix: str) -> State:
    return {prefix + name: value for name, value in state.items()}


def lightning(state: State) -> dict[str, Any]:
    """As Lightning writes a checkpoint of a module with its net in an attribute."""
    return {
        "epoch": 3,
        "global_step": 12,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": prefixed(state, "net.") | {"criterion.weight": torch.ones(10)},
        "optimizer_states": [{"state": {}, "param_groups": [{"lr": 0.1}]}],
        "hyper_parameters": {"lr": 0.1},
    }


FORMS: dict[str, Callable[[State], Any]] = {
    "plain.pt": lambda state: state,
    "plain.pth": lambda state: state,
    "parallel.pt": lambda state: prefixed(state, "module."),
    "nested.pt": lambda state: {"epoch": 3, "model_state_dict": prefixed(state, "_orig_mod.")},
    "twice.pth": lambda state: {"model": {"state_dict": state}, "best": 0.9},
    "net.pt": lambda state: {"net": prefixed(state, "module.")},
    "run.ckpt": lightning,
}


def same(made: nn.Module, like: nn.Module) -> bool:
    found = list(made.parameters()) + list(made.buffers())
    return all(map(torch.equal, found, [*like.parameters(), *like.buffers()]))


@pytest.mark.parametrize("name", FORMS)
def test_files_of_other_programs_are_loaded_and_have_no_settings(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    torch.save(FORMS[name](net().state_dict()), path)
    with warnings.catch_warnings(action="ignore", category=GradveilWarning):
        found, protected = load_weights(path, net(seed=1), Defense(), (3, 8, 8))
    assert same(found, net()) and not protected and read_settings(path) == {}


def test_a_safetensors_file_of_another_program_may_have_a_prefix(tmp_path: Path) -> None:
    save_file(prefixed(net().state_dict(), "module."), tmp_path / "x.safetensors")
    assert same(load_checkpoint(tmp_path / "x.safetensors", net(seed=1)), net())


def test_what_is_left_out_of_a_file_is_said(tmp_path: Path) -> None:
    torch.save(lightning(net().state_dict()), tmp_path / "run.ckpt")
    with pytest.warns(GradveilWarning, match=r"1 other tensor\(s\), such as 'criterion.weight'"):
        load_checkpoint(tmp_path / "run.ckpt", net(seed=1))


def test_weights_that_a_file_holds_twice_are_refused(tmp_path: Path) -> None:
    state = net().state_dict()
    torch.save(prefixed(state, "net.") | prefixed(state, "ema."), tmp_path / "x.pt")
    with pytest.raises(GradveilError, match=r"holds these weights 2 times, as net\.\*, ema\.\*"):
        load_checkpoint(tmp_path / "x.pt", net())


def test_weights_go_behind_a_normalization(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "x.pt")
    made = normalized(net(seed=1), 0.5, [0.5, 0.5, 0.5])
    assert isinstance(made, nn.Module)
    load_checkpoint(tmp_path / "x.pt", made)
    assert same(made.get_submodule("model"), net())


def test_a_file_without_running_statistics_is_refused(tmp_path: Path) -> None:
    torch.save(dict(net().named_parameters()), tmp_path / "x.pt")
    with pytest.raises(GradveilError, match=r"^checkpoint .*x\.pt .* it has no '1\.running_mean'$"):
        load_checkpoint(tmp_path / "x.pt", net())


def test_weights_of_another_model_are_refused_by_a_name_of_each(tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "x.pt")
    says = (
        r"it has no '0\.weight', and the model no 'weight': name the model that it was saved from$"
    )
    with pytest.raises(GradveilError, match=says):
        load_checkpoint(tmp_path / "x.pt", net())


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_weights_for_other_channels_say_how_to_give_these(tmp_path: Path, name: str) -> None:
    state = net().state_dict()
    (save_file if name.endswith("s") else torch.save)(state, tmp_path / name)
    with pytest.raises(GradveilError, match=r"takes images of 3 channel.*: give channels 3$"):
        load_checkpoint(tmp_path / name, nn.Sequential(nn.Conv2d(1, 2, 3), *net()[1:]))  # type: ignore[index]


@pytest.mark.parametrize("name", ["gone.pt", "gone.safetensors"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    for read in (lambda path: load_checkpoint(path, net()), read_settings):
        with pytest.raises(GradveilError, match=f"^no checkpoint at .*{name}$"):
            read(tmp_path / name)


def test_a_whole_pickled_model_is_refused_and_nothing_of_it_is_run(tmp_path: Path) -> None:
    torch.save(net(), tmp_path / "x.pt")
    with pytest.raises(GradveilError, match=r"^checkpoint .* is refused: .*model.state_dict\(\)"):
        load_checkpoint(tmp_path / "x.pt", net())
