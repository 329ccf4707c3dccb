"""How long a training takes, from timed steps of its model on this machine."""

import copy
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

from gradveil.core.errors import GradveilWarning
from gradveil.core.seeds import forked, generator
from gradveil.core.types import Batch
from gradveil.data.images import Images
from gradveil.defenses.applied import protected_batch
from gradveil.models.accuracy import measure_accuracy
from gradveil.training.job import TrainingJob
from gradveil.training.step import DefendedStep, Objective, Step

TIMED = 3  # runs, of which the shortest counts: what else runs here makes them longer only
TESTED = 50  # test images of a timed pass


def step_seconds(job: TrainingJob, model: nn.Module, split: Images, device: torch.device) -> float:
    """Return the seconds of a training step of a copy of the model, images prepared."""
    rng, size = generator(job.seed, "timing"), job.recipe.batch_size
    images, labels = split.images[:size].to(device), split.labels[:size].to(device)
    prepare, on_batch = job.preparation(), job.on_batch
    tried = copy.deepcopy(model).to(device).train()
    objective = Objective.of(job.defense, job.recipe.loss_scale)
    optimizer = torch.optim.SGD(tried.parameters(), lr=0)
    if job.defense.changes("gradients"):
        step: Step = DefendedStep(tried, objective, optimizer, False, job.defense, lambda: rng)
    else:
        step = Step(tried, objective, optimizer, False)

    def work() -> None:
        pixels = images if prepare is None else prepare(images, rng)
        batch = Batch(pixels.float() / 255, labels)
        step(batch if on_batch is None else protected_batch(on_batch, batch, rng))

    with forked(), warnings.catch_warnings(action="ignore", category=GradveilWarning):
        return _shortest(work, device)


def training_seconds(
    job: TrainingJob, model: nn.Module, splits: tuple[Images, Images], device: torch.device
) -> float:
    """Return the seconds of all steps, and of the accuracy after each epoch."""
    train, test = splits
    few = test.select(range(min(TESTED, len(test))))
    tested = copy.deepcopy(model).to(device)
    of_test = _shortest(lambda: measure_accuracy(tested, few), device) * len(test) / len(few)
    of_steps = step_seconds(job, model, train, device) * job.steps(len(train))
    return of_steps + job.recipe.epochs * of_test


def _shortest(work: Callable[[], object], device: torch.device) -> float:
    taken = []
    for _ in range(TIMED):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken)
