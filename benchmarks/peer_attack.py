"""breaching's `invertinggradients` as an attack of gradveil, so that an audit can measure it.

    pip install --no-deps breaching==0.1.2 hydra-core omegaconf antlr4-python3-runtime==4.9.3
    PEER_SECONDS=150 PYTHONPATH=benchmarks gradveil audit ... --attack peer_attack:breaching

breaching attacks one victim after the other. Each gets an equal part of the seconds: the attack
takes as many iterations as fit, by the time of the first few, and its step size decays over them.
Its settings are those that it comes with, but for the weight of total variation, which may be
given. It works on normalized pictures, from N(0, 1), as its own cases do.
"""

import contextlib
import io
import os
import time
import types
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peers import import_breaching
from torch import Generator, Tensor, nn

from gradveil.attacks import Attack, Progress
from gradveil.core.types import Observation, Reconstruction
from gradveil.models import Normalize

TRIAL = 12  # iterations that are timed, after as many that are not


class Unnormalized(nn.Module):
    """A model for pictures that its user has normalized already."""

    def __init__(self, model: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, images: Tensor) -> Tensor:
        answers: Tensor = self.model(images * self.get_buffer("std") + self.get_buffer("mean"))
        return answers


@dataclass(frozen=True)
class Breaching(Attack):
    """The attack, with so many seconds for all victims together, or `steps` where these end first.

    `tv` None leaves the weight of total variation as breaching has it, 0.2.
    """

    seconds: float = 150.0
    steps: int = 24_000
    tv: float | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        return ("labels",)

    def reconstruct(
        self, seen: Sequence[Observation], rng: Generator, progress: Progress
    ) -> list[Reconstruction]:
        package = import_breaching()
        torch.manual_seed(int(torch.randint(2**31, (), generator=rng, device=rng.device)))
        first = seen[0]
        mean, std = _constants(first.model, first.image_shape[0])
        device = next(first.model.parameters()).device
        model = Unnormalized(first.model, mean.to(device), std.to(device)).eval()
        facts = types.SimpleNamespace(
            shape=first.image_shape, modality="vision", mean=_numbers(mean), std=_numbers(std)
        )
        setup = {"dtype": torch.float, "device": device}

        def run(victim: Observation, steps: int) -> tuple[Tensor, float]:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                attack = package.attacks.prepare_attack(
                    model, nn.CrossEntropyLoss(), self._config(package, steps), setup
                )
                found, stats = attack.reconstruct([_payload(model, facts)], [_shared(victim)], {})
            pixels: Tensor = found["data"] * model.get_buffer("std") + model.get_buffer("mean")
            return pixels.clamp(0, 1).detach(), float(stats["opt_value"])

        share = self.seconds / len(seen)
        steps = _fitting(lambda count: run(first, count), share, self.steps, device)
        results = []
        for number, victim in enumerate(seen):
            images, distance = run(victim, steps)
            results.append(Reconstruction(images, victim.knowledge.labels, distance))
            progress(number + 1, len(seen))
        return results

    def _config(self, package: Any, steps: int) -> Any:
        overrides = [f"optim.max_iterations={steps}", f"optim.callback={steps + 1}"]
        if self.tv is not None:
            overrides.append(f"regularization.total_variation.scale={self.tv}")
        return package.get_attack_config("invertinggradients", overrides=overrides)


def _constants(model: nn.Module, channels: int) -> tuple[Tensor, Tensor]:
    """Return mean and std of the first normalization in a model; none changes nothing."""
    for module in model.modules():
        if isinstance(module, Normalize):
            return module.mean, module.std
    return torch.zeros(channels, 1, 1), torch.ones(channels, 1, 1)


def _numbers(constants: Tensor) -> list[float]:
    return [float(value) for value in constants.flatten()]


def _payload(model: nn.Module, facts: object) -> dict[str, Any]:
    return {
        "parameters": [p.detach() for p in model.parameters()],
        "buffers": list(model.buffers()),
        "metadata": facts,
    }


def _shared(victim: Observation) -> dict[str, Any]:
    known = {
        "labels": victim.knowledge.labels,
        "num_data_points": victim.size,
        "local_hyperparams": None,
    }
    return {"gradients": [*victim.gradients.values()], "buffers": None, "metadata": known}


def _fitting(run: Any, seconds: float, most: int, device: torch.device) -> int:
    """Return how many iterations fit into so many seconds of one victim; at least one."""
    run(TRIAL)
    taken = []
    for count in (TRIAL, 2 * TRIAL):
        start = time.perf_counter()
        run(count)
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    each = max((taken[1] - taken[0]) / TRIAL, 1e-6)
    fixed = max(taken[0] - TRIAL * each, 0.0)  # made anew for each victim, as its users do
    return max(1, min(most, int((seconds - fixed) / each)))


breaching = Breaching(float(os.environ.get("PEER_SECONDS", "150")))
