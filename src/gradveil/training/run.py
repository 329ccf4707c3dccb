"""The training run: trains a job into a folder, or goes on where it stopped."""

import copy
import logging
import platform
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn

from gradveil import __version__
from gradveil.core.errors import GradveilError, GradveilWarning, one_line
from gradveil.core.seeds import generator
from gradveil.core.types import Batch
from gradveil.data import Images, load
from gradveil.defenses import Defense
from gradveil.engine.device import find_device
from gradveil.models import build
from gradveil.models.checkpoints import load_checkpoint, read_settings, save_checkpoint
from gradveil.training.job import (
    FINAL,
    RESUME,
    TENSORBOARD,
    TrainingJob,
    TrainingResult,
    claim,
    refuse_other,
    release,
    step_path,
)
from gradveil.training.lightning import Bar, ImageData, RunSaver, Training
from gradveil.training.step import DefendedStep, Objective, acts_on, passes_again


def candidate(name: str, split: Images, seed: int) -> nn.Module:
    """A new model for these images. One that cannot be trained on them is refused: a user's own may be anything."""
    model = build(
        name,
        channels=split.channels,
        size=split.size,
        classes=len(split.classes),
        mean=split.mean,
        std=split.std,
        seed=seed,
    )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise GradveilError(f"model {name!r} has no parameters to train")
    images = split.images[:2].float() / 255
    given, wanted = _output_shape(name, model, images), (len(images), len(split.classes))
    if given != wanted:
        raise GradveilError(
            f"model {name!r} gives {given} for images of shape {tuple(images.shape)}: expected {wanted}, a logit per class"
        )
    return model


def protected(model: nn.Module, defense: Defense, split: Images) -> nn.Module:
    """The model that is trained under this defense."""
    return defense.protect_model(model, (split.channels, split.size, split.size))


def try_defense(name: str, model: nn.Module, defense: Defense, split: Images) -> None:
    """Refuse a defense that cannot change the gradients of this model, in a training step of a copy."""
    if not acts_on(defense, "gradients"):
        return
    tried, batch = (
        copy.deepcopy(model).train(),
        Batch(split.images[:2].float() / 255, split.labels[:2]),
    )
    step = DefendedStep(
        tried,
        Objective.of(defense, 1.0),
        torch.optim.SGD(tried.parameters(), lr=0),
        False,
        defense,
        lambda: generator(0, "trial"),
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
            f"model {name!r} cannot be trained with defense {defense}: {one_line(error)}"
        ) from error


def _output_shape(name: str, model: nn.Module, images: torch.Tensor) -> tuple[int, ...]:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return tuple(
                copy.deepcopy(model).eval()(images).shape
            )  # a copy: its own modes and statistics stay as they are
    except Exception as error:
        raise GradveilError(
            f"model {name!r} fails on images of shape {tuple(images.shape)}: {type(error).__name__}: {error}"
        ) from error


def train(
    job: TrainingJob,
    out: Path,
    *,
    root: Path | None = None,
    device: str = "auto",
    progress: bool = True,
) -> TrainingResult:
    """Train into `out`. A run that was stopped goes on after its last whole epoch; one that is done is read back."""
    place = find_device(device)
    refuse_other(out, job.settings())
    train_split = load(
        job.data,
        "train",
        root=root,
        image_size=job.image_size,
        fraction=job.fraction,
        seed=job.seed,
    )
    test_split = load(job.data, "test", root=root, image_size=job.image_size)
    steps = job.steps(len(train_split))
    model = protected(candidate(job.model, train_split, job.seed), job.protection, train_split)
    if (out / FINAL).is_file():
        load_checkpoint(out / FINAL, model)
        return _trained(out, read_settings(out / FINAL))
    job.spent(len(train_split), max(steps, 1))  # now it shows whether an accountant is there
    try_defense(job.model, model, job.protection, train_split)
    claim(out, job.settings())
    data = ImageData(train_split, test_split, job.preparation(), job.recipe.batch_size, job.seed)
    try:
        module = _fit(job, model, data, out, place, progress)
        accuracy = module.history[-1]["test_accuracy"] if module.history else module.accuracy
        facts = _facts(job, train_split, steps, place) | {
            "test_accuracy": accuracy,
            "history": module.history,
        }
        save_checkpoint(out / FINAL, model, facts)
    except Exception:
        release(out)
        raise
    (out / RESUME).unlink(missing_ok=True)
    return _trained(out, facts)


def _fit(
    job: TrainingJob,
    model: nn.Module,
    data: ImageData,
    out: Path,
    place: torch.device,
    progress: bool,
) -> Training:
    on_gpu = place.type == "cuda"
    bf16 = job.precision == "bf16" or (job.precision == "auto" and on_gpu)
    if on_gpu:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # an overload that torch's annotations lack
    module = Training(model, job.recipe, job.seed, bf16, _graphs(job, place), job.protection)

    def save(step: int) -> None:
        save_checkpoint(step_path(out, step), model, _facts(job, data.splits["train"], step, place))

    callbacks: list[Callback] = [RunSaver(out, job.save_at, save)]
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[place] if on_gpu else []),
        _failures(job, out),
    ):
        warnings.filterwarnings(
            "ignore", module="lightning"
        )  # advice about workers and loggers that this loop does not use
        trainer = L.Trainer(
            accelerator="gpu" if on_gpu else "cpu",
            devices=1,
            max_epochs=job.recipe.epochs,
            callbacks=[*callbacks, Bar()] if progress else callbacks,
            logger=_tensorboard(out),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            reload_dataloaders_every_n_epochs=1,
            default_root_dir=out,
        )
        trainer.fit(module, datamodule=data, ckpt_path=_stopped(out), weights_only=True)
        if not module.history:  # no epoch was asked for: the untrained model
            trainer.validate(module, datamodule=data, verbose=False)
            for step in job.save_at:
                save(step)
    return module


@contextmanager
def _failures(job: TrainingJob, out: Path) -> Iterator[None]:
    """What can go wrong in the midst of training, told in a line; and signals, which Lightning turns into the program's quiet end."""
    try:
        yield
    except SystemExit as stop:
        if not isinstance(stop, SIGTERMException) and not isinstance(
            stop.__context__, KeyboardInterrupt
        ):
            raise GradveilError(
                f"model {job.model!r} ended the program while training, with {stop.code!r}"
            ) from stop
        raise KeyboardInterrupt from stop
    except torch.OutOfMemoryError as error:
        raise GradveilError(
            f"the GPU's memory is too small for batches of {job.recipe.batch_size}: lower --batch-size"
        ) from error
    except GradveilError:
        raise
    except OSError as error:  # from the TensorBoard log: all other files are written by core.files
        raise GradveilError(
            f"cannot write into {out}: {error.strerror or error}; mend that and run again"
        ) from error
    except Exception as error:
        if ":" not in job.model:
            raise
        raise GradveilError(
            f"model {job.model!r} failed while training: {type(error).__name__}: {error}"
        ) from error


def _stopped(out: Path) -> Path | None:
    """The point to go on from, if there is one."""
    path = out / RESUME
    if not path.is_file():
        return None
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise GradveilError(
            f"{path} is damaged ({type(error).__name__}): delete it, and the training starts again"
        ) from error
    return path


def _tensorboard(out: Path) -> TensorBoardLogger | None:
    try:
        return TensorBoardLogger(out, name=TENSORBOARD, version="")
    except (
        ModuleNotFoundError
    ):  # neither tensorboard nor tensorboardX is installed; metrics.csv has the same figures
        return None


def _facts(job: TrainingJob, split: Images, step: int, place: torch.device) -> dict[str, Any]:
    return job.settings() | {
        "step": step,
        "channels": split.channels,
        "image_size": split.size,
        "classes": len(split.classes),
        "images": len(split),
        **job.spent(len(split), step),
        "versions": {
            "gradveil": __version__,
            "torch": torch.__version__,
            "lightning": L.__version__,
            "python": platform.python_version(),
        },
        "cuda_graphs": _graphs(job, place),
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
    }


def _graphs(job: TrainingJob, place: torch.device) -> bool:
    """Whether steps are replayed: on a GPU, unless a defense passes the batch through the model again."""
    return place.type == "cuda" and not passes_again(job.protection)


def _trained(out: Path, facts: Mapping[str, Any]) -> TrainingResult:
    history, budget = tuple(facts["history"]), (facts.get("epsilon"), facts.get("delta"))
    return TrainingResult(
        out, out / FINAL, facts["test_accuracy"], facts["epochs"], facts["step"], history, *budget
    )
