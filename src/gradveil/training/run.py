"""The training run: trains a job into a folder, or goes on where it stopped."""

import copy
import math
import platform
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradveil import __version__
from gradveil.core.boundary import public
from gradveil.core.errors import GradveilError, GradveilWarning, one_line
from gradveil.core.importing import RAISED
from gradveil.core.job_folder import claim
from gradveil.core.locks import alone, refuse_held
from gradveil.core.progress import LONG, Bar, foretold
from gradveil.core.seeds import generator
from gradveil.core.types import Batch
from gradveil.data.images import Images, as_images
from gradveil.defenses import Defense, as_defense
from gradveil.defenses.applied import protected_batch
from gradveil.defenses.weights import first_model
from gradveil.engine.device import find_device
from gradveil.models import NormalizedName, build_for
from gradveil.models.accuracy import measure_accuracy
from gradveil.models.bottleneck import penalties
from gradveil.models.checkpoints import load_checkpoint, read_settings, save_checkpoint
from gradveil.models.factories import check_fit
from gradveil.training.job import (
    FINAL,
    RESUME,
    Recipe,
    TrainingJob,
    TrainingResult,
    refuse_other,
    release,
    step_path,
)
from gradveil.training.step import DefendedStep, Objective, replays
from gradveil.transforms import Policy

TRAINING = "training into"  # for who finds the folder held
LOOKED_AT = 1_000  # test images on which the accuracy of a finished run is looked at again
SLACK, SIGMAS = 0.02, 4  # by how much it may differ: rounding, and the choice of images


@public
def train_model(
    model: nn.Module | str | NormalizedName,
    images: object,
    labels: object = None,
    *,
    test: object = None,
    defense: Defense | Policy | str = "none",
    checkpoint: Path | str | None = None,
    out: Path | str | None = None,
    seed: int = 0,
    epochs: int = 60,
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    batch_size: int = 128,
    loss_scale: float = 1.0,
    augment: bool = True,
    fraction: float = 1.0,
    image_size: int | None = None,
    channels: int | None = None,
    save_at: Iterable[int] = (),
    precision: str = "auto",
    delta: float | None = None,
    classes: int | None = None,
    root: Path | str | None = None,
    device: str = "auto",
    progress: bool = True,
) -> TrainingResult:
    """Train a model, a module or a name, by the published recipe; the module given is left alone.

    `images` is the name of a data set, or all that `data.images.as_images` takes: a tensor
    (N, C, H, W) with `labels`, a pair of both, a Dataset or DataLoader. `test` is the same for the
    images that the accuracy is measured on: by default the test split of a named data set, or about
    a fifth of the images given, which are then left out of training. `defense` is a value, a policy
    or a text. `checkpoint` is a file of weights to start from. The run goes into the folder `out`,
    by default runs/train-DATA-MODEL-SEED; a run that was stopped goes on there.
    """
    if isinstance(images, str) and labels is not None:
        raise GradveilError(f"labels: the data set {images[:100]!r} has its own; leave them out")
    data = images if isinstance(images, str) else as_images(images, labels, classes=classes)
    tested = (
        test
        if test is None or isinstance(test, str)
        else as_images(test, name="test", split="test")
    )
    job = TrainingJob(
        data,
        model,
        Recipe(epochs, lr, momentum, weight_decay, batch_size, loss_scale),
        as_defense(defense),
        augment,
        fraction,
        image_size,
        tuple(sorted(set(save_at))),
        precision,
        seed,
        delta,
        tested,
        channels,
        None if checkpoint is None else Path(checkpoint),
    )
    folder = job.folder if out is None else Path(out)
    return train(job, folder, root=root, device=device, progress=progress)


@public
def train(
    job: TrainingJob,
    out: Path | str,
    *,
    root: Path | str | None = None,
    device: str = "auto",
    progress: bool = True,
) -> TrainingResult:
    """Train into the folder `out`.

    A run that was stopped goes on after its last whole epoch; one that is done is read back.
    """
    where, out = find_device(device), Path(out)
    refuse_other(out, job.settings())
    refuse_held(out, TRAINING)
    train_split, test_split = job.splits(None if root is None else Path(root))
    steps = job.steps(len(train_split))
    shape = train_split.channels, train_split.size, train_split.size
    plain = candidate(job.model, train_split, job.seed)
    _refuse_other_types(plain)
    model = first_model(job.start, plain, job.defense, shape)
    if model is not plain:
        check_fit(model, train_split, f"of defense {job.defense}", penalties(model))
    if (out / FINAL).is_file():
        return _read_back(out, model, test_split, job.seed)
    job.spent(len(train_split), max(steps, 1))  # now it shows whether an accountant is there
    try_defense(job, model, train_split)
    with alone(out, TRAINING):
        if (out / FINAL).is_file():  # another process was faster
            return _read_back(out, model, test_split, job.seed)
        refuse_other(out, job.settings())
        claim(out, job.settings())
        try:
            if progress and not (out / RESUME).is_file():
                _foretell(job, model, (train_split, test_split), where)
            facts = _fitted(job, model, (train_split, test_split), out, where, progress)
            save_checkpoint(out / FINAL, model, facts)
        except RAISED:
            release(out)
            raise
        (out / RESUME).unlink(missing_ok=True)
    return _result(out, facts, model)


def _foretell(
    job: TrainingJob, model: nn.Module, splits: tuple[Images, Images], device: torch.device
) -> None:
    """Say how long the training takes, where that is more than a minute."""
    from gradveil.training.timing import training_seconds

    if not job.recipe.epochs:
        return
    whole, few = training_seconds(job, model, splits, device), max(1, job.recipe.epochs // 10)
    if whole > LONG:
        shorter = {} if few == job.recipe.epochs else {f"--epochs {few}": few / job.recipe.epochs}
        cheaper = shorter | ({"--fraction 0.1": 0.1} if job.fraction == 1 else {})
        said = foretold(whole, {option: share * whole for option, share in cheaper.items()})
        Bar(shown=True).say(said)


def candidate(given: nn.Module | str | NormalizedName, split: Images, seed: int) -> nn.Module:
    """Return a new model for these images, or a copy of a module, on the CPU and in training mode.

    Layers that a module in training mode keeps in eval mode stay so.
    """
    model = build_for(given, split, seed).cpu()
    return model if model.training else model.train()


def _refuse_other_types(model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        if weight.dtype != torch.float32:
            raise GradveilError(
                f"model {type(model).__name__}: {name!r} is of {weight.dtype}, and training is in "
                "torch.float32: give model.float()"
            )


def try_defense(job: TrainingJob, model: nn.Module, split: Images) -> None:
    """Refuse a defense that cannot change these images or this model's gradients.

    One training step of a copy of the model shows it, and whether a checkpoint can hold what the
    defense keeps.
    """
    defense, on_batch = job.defense, job.on_batch
    batch = Batch(split.images[:2].float() / 255, split.labels[:2])
    if on_batch is not None:
        batch = protected_batch(on_batch, batch, generator(0, "trial"))
        low, high = float(batch.images.min()), float(batch.images.max())
        if not (low >= 0 and high <= 1):
            raise GradveilError(
                f"defense {on_batch}: protect_batch gave images with values from {low:g} to "
                f"{high:g}; expected [0, 1]"
            )
    if not defense.changes("gradients"):
        return
    tried = copy.deepcopy(model).train()
    step = DefendedStep(
        tried,
        Objective.of(defense, 1.0),
        torch.optim.SGD(tried.parameters(), lr=0),
        False,
        defense,
        lambda: generator(0, "trial"),
        thorough=True,
    )
    try:
        with (
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(action="ignore", category=GradveilWarning),
        ):  # the run will say it
            step(batch)
    except GradveilError:
        raise
    except Exception as error:
        raise GradveilError(
            f"model {job.model_name!r} cannot be trained with defense {defense}: {one_line(error)}"
        ) from error
    defense.unpack_state(defense.pack_state(step.state), torch.device("cpu"))


def _fitted(
    job: TrainingJob,
    model: nn.Module,
    splits: tuple[Images, Images],
    out: Path,
    device: torch.device,
    progress: bool,
) -> dict[str, Any]:
    """Train the model in place and return the facts to be saved with its weights."""
    from gradveil.training import lightning  # which takes seconds to import

    train_split, test_split = splits
    data = lightning.ImageData(
        train_split, test_split, job.preparation(), job.recipe.batch_size, job.seed
    )

    def save(step: int) -> None:
        save_checkpoint(step_path(out, step), model, _facts(job, train_split, step, device))

    module = lightning.fit(job, model, data, out, device, save, progress)
    accuracy = module.history[-1]["test_accuracy"] if module.history else module.accuracy
    return _facts(job, train_split, job.steps(len(train_split)), device) | {
        "test_accuracy": accuracy,
        "history": module.history,
    }


def _facts(job: TrainingJob, split: Images, step: int, device: torch.device) -> dict[str, Any]:
    """Return what is saved with weights; `trained_under` is the defense as training applied it."""
    import lightning

    return job.settings() | {
        "trained_under": str(job.acting),
        "step": step,
        "channels": split.channels,
        "image_size": split.size,
        "classes": len(split.classes),
        "images": len(split),
        **job.spent(len(split), step),
        "versions": {
            "gradveil": __version__,
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "python": platform.python_version(),
        },
        "cuda_graphs": replays(job.defense, device),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def _read_back(out: Path, model: nn.Module, test: Images, seed: int) -> TrainingResult:
    """Read a finished run; an accuracy that its weights do not have is refused."""
    path = out / FINAL
    (out / RESUME).unlink(missing_ok=True)  # where the run was killed at its very end
    load_checkpoint(path, model)
    facts = read_settings(path, ("test_accuracy", "epochs", "step", "history"))
    check_accuracy(path, facts["test_accuracy"], model, test, seed)
    return _result(out, facts, model)


def check_accuracy(path: Path, said: float, model: nn.Module, test: Images, seed: int) -> None:
    """Refuse an accuracy that a file says of its weights, which are the model's, and is not so."""
    found, n = measure_accuracy(model, test, LOOKED_AT, seed)
    # Training measures in bfloat16 on a GPU, on all images, and a model may draw.
    if abs(found - said) > SLACK + SIGMAS * math.sqrt(0.25 / n):
        raise GradveilError(
            f"the settings inside {path}: test_accuracy: {said:.1%}, but its weights have "
            f"{found:.1%} on {n} test images; choose another --out"
        )


def _result(out: Path, facts: Mapping[str, Any], model: nn.Module) -> TrainingResult:
    return TrainingResult(
        out,
        out / FINAL,
        facts["test_accuracy"],
        facts["epochs"],
        facts["step"],
        tuple(facts["history"]),
        model.cpu(),
        facts.get("epsilon"),
        facts.get("delta"),
    )
