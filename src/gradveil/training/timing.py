"""How long a training takes, from timed steps of its model on this machine."""

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import nn

from gradveil.core.errors import GradveilWarning
from gradveil.core.seeds import forked, generator
from gradveil.core.types import Batch
from gradveil.data.images import Batches, Images
from gradveil.defenses.applied import protected_batch
from gradveil.engine.device import sharing_cores
from gradveil.models.accuracy import measure_accuracy
from gradveil.training.job import TrainingJob
from gradveil.training.step import DefendedStep, Objective, Step

LEAST, MOST = 2, 40  # timed steps, after one that does not count
ENOUGH = 1.0  # seconds of timed steps: whatever else runs here slows them as it will the training
FEW, MANY = 50, 1_000  # test images of a timed pass: many where a few are fast, as in the training
LOOP = 1e-3  # seconds that the loop around a step takes, and the bar
START = 4.0  # seconds until the first step


def step_seconds(job: TrainingJob, model: nn.Module, split: Images, device: torch.device) -> float:
    """Return the seconds of a training step of a copy of the model, images prepared."""
    rng, on_batch = generator(job.seed, "timing"), job.on_batch
    tried = copy.deepcopy(model).to(device).train()
    optimizer = job.recipe.optimizer(tried)
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # the weights stay finite, whatever the rate is
    objective = Objective.of(job.defense, job.recipe.loss_scale)
    if job.defense.changes("gradients"):
        step: Step = DefendedStep(tried, objective, optimizer, False, job.defense, lambda: rng)
    else:
        step = Step(tried, objective, optimizer, False)
    some = split.select(range(min(len(split), job.recipe.batch_size * MOST)))
    batches = Batches(
        some.images.to(device),
        some.labels.to(device),
        job.recipe.batch_size,
        rng,
        job.preparation(),
    )

    def steps() -> Iterator[None]:
        for batch in _repeated(batches):
            step(batch if on_batch is None else protected_batch(on_batch, batch, rng))
            yield

    with (
        forked(),
        warnings.catch_warnings(action="ignore", category=GradveilWarning),
        sharing_cores(device),
    ):
        each = steps()
        next(each)
        count, began = 0, _now(device)
        for _ in islice(each, MOST):
            count += 1
            taken = _now(device) - began
            if count >= LEAST and taken > ENOUGH:
                break
    return taken / count + LOOP


def training_seconds(
    job: TrainingJob, model: nn.Module, splits: tuple[Images, Images], device: torch.device
) -> float:
    """Return the seconds of the start, of all steps, and of the accuracy after each epoch."""
    train, test = splits
    tested = copy.deepcopy(model).to(device)

    def passed(count: int) -> float:
        some = test.select(range(min(count, len(test))))
        return _seconds(lambda: measure_accuracy(tested, some), device) * len(test) / len(some)

    passed(FEW)  # the first pass has what is done but once
    of_test = passed(FEW)
    if of_test * min(MANY, len(test)) / len(test) < ENOUGH:
        of_test = passed(MANY)
    of_steps = step_seconds(job, model, train, device) * job.steps(len(train))
    return START + of_steps + job.recipe.epochs * of_test


def _repeated(batches: Batches) -> Iterator[Batch]:
    while True:
        yield from batches


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    began = _now(device)
    work()
    return _now(device) - began


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
