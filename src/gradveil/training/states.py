"""What a defense keeps between steps, as lists, dicts and tensors: a checkpoint is read without running what is in it."""

from typing import Any

import torch

from gradveil.defenses import State
from gradveil.defenses.pruning import Residuals


def packed(state: State) -> Any:
    if state is None:
        return None
    if isinstance(state, tuple):
        return [packed(one) for one in state]
    if isinstance(state, Residuals):
        return {"momentum": dict(state.momentum), "unsent": dict(state.unsent)}
    raise TypeError(f"a defense keeps a {type(state).__name__} between steps: say here how a checkpoint holds it")


def unpacked(plain: Any, device: torch.device) -> State:
    """What `packed` was given, on this device."""
    if plain is None:
        return None
    if isinstance(plain, list):
        return tuple(unpacked(one, device) for one in plain)
    return Residuals(**{part: {name: value.to(device) for name, value in values.items()} for part, values in plain.items()})
