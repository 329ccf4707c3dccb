"""What is foretold of a training: its start, every step, and the accuracy after each epoch."""

import copy

import pytest
import torch

import toys
from gradveil.defenses import Pruning
from gradveil.training import Recipe, TrainingJob, timing

TRAIN, TEST = toys.split(60, part="train"), toys.split(20, seed=1)
CPU = torch.device("cpu")


def test_the_start_every_step_and_every_accuracy_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = toys.lenet().float()
    job = TrainingJob(TRAIN, model, Recipe(epochs=3, batch_size=20), test=TEST)
    monkeypatch.setattr(timing, "step_seconds", lambda *_: 0.5)
    monkeypatch.setattr(timing, "_seconds", lambda *_: 2.0)
    found = timing.training_seconds(job, model, (TRAIN, TEST), CPU)
    assert found == pytest.approx(timing.START + 3 * 3 * 0.5 + 3 * 2.0)


def test_timed_steps_change_neither_the_model_nor_the_random_numbers_of_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "ENOUGH", 0.0)
    model = toys.lenet().float()
    job = TrainingJob(TRAIN, model, Recipe(batch_size=20), Pruning(0.5), test=TEST)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert timing.step_seconds(job, model, TRAIN, CPU) > timing.LOOP
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
