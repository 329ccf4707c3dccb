"""The training run: trains a job into a folder, or goes on where it stopped."""

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
from gradveil.core.devices import find_device
from gradveil.core.errors import GradveilError
from gradveil.data import Images, load
from gradveil.models.checkpoints import load_checkpoint, read_settings, save_checkpoint
from gradveil.training.callbacks import Bar, Saving
from gradveil.training.candidates import candidate, protected, try_defense
from gradveil.training.defended import passes_again
from gradveil.training.folders import FINAL, RESUME, TENSORBOARD, claim, refuse_other, release, step_path
from gradveil.training.jobs import Job, Trained
from gradveil.training.modules import ImageData, Training


def train(job: Job, out: Path, *, root: Path | None = None, device: str = "auto", progress: bool = True) -> Trained:
    """Train into `out`. A run that was stopped goes on after its last whole epoch; one that is done is read back."""
    place = find_device(device)
    refuse_other(out, job.settings())
    train_split = load(job.data, "train", root=root, image_size=job.image_size, fraction=job.fraction, seed=job.seed)
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
        facts = _facts(job, train_split, steps, place) | {"test_accuracy": accuracy, "history": module.history}
        save_checkpoint(out / FINAL, model, facts)
    except Exception:
        release(out)
        raise
    (out / RESUME).unlink(missing_ok=True)
    return _trained(out, facts)


def _fit(job: Job, model: nn.Module, data: ImageData, out: Path, place: torch.device, progress: bool) -> Training:
    on_gpu = place.type == "cuda"
    bf16 = job.precision == "bf16" or (job.precision == "auto" and on_gpu)
    if on_gpu:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # an overload that torch's annotations lack
    module = Training(model, job.recipe, job.seed, bf16, _graphs(job, place), job.protection)

    def save(step: int) -> None:
        save_checkpoint(step_path(out, step), model, _facts(job, data.splits["train"], step, place))

    callbacks: list[Callback] = [Saving(out, job.save_at, save)]
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[place] if on_gpu else []), _failures(job, out):
        warnings.filterwarnings("ignore", module="lightning")  # advice about workers and loggers that this loop does not use
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
def _failures(job: Job, out: Path) -> Iterator[None]:
    """What can go wrong in the midst of training, told in a line; and signals, which Lightning turns into the program's quiet end."""
    try:
        yield
    except SystemExit as stop:
        if not isinstance(stop, SIGTERMException) and not isinstance(stop.__context__, KeyboardInterrupt):
            raise GradveilError(f"model {job.model!r} ended the program while training, with {stop.code!r}") from stop
        raise KeyboardInterrupt from stop
    except torch.OutOfMemoryError as error:
        raise GradveilError(f"the GPU's memory is too small for batches of {job.recipe.batch_size}: lower --batch-size") from error
    except GradveilError:
        raise
    except OSError as error:  # from the TensorBoard log: all other files are written by core.files
        raise GradveilError(f"cannot write into {out}: {error.strerror or error}; mend that and run again") from error
    except Exception as error:
        if ":" not in job.model:
            raise
        raise GradveilError(f"model {job.model!r} failed while training: {type(error).__name__}: {error}") from error


def _stopped(out: Path) -> Path | None:
    """The point to go on from, if there is one."""
    path = out / RESUME
    if not path.is_file():
        return None
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise GradveilError(f"{path} is damaged ({type(error).__name__}): delete it, and the training starts again") from error
    return path


def _tensorboard(out: Path) -> TensorBoardLogger | None:
    try:
        return TensorBoardLogger(out, name=TENSORBOARD, version="")
    except ModuleNotFoundError:  # neither tensorboard nor tensorboardX is installed; metrics.csv has the same figures
        return None


def _facts(job: Job, split: Images, step: int, place: torch.device) -> dict[str, Any]:
    return job.settings() | {
        "step": step,
        "channels": split.channels,
        "image_size": split.size,
        "classes": len(split.classes),
        "images": len(split),
        **job.spent(len(split), step),
        "versions": {"gradveil": __version__, "torch": torch.__version__, "lightning": L.__version__, "python": platform.python_version()},
        "cuda_graphs": _graphs(job, place),
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
    }


def _graphs(job: Job, place: torch.device) -> bool:
    """Whether steps are replayed: on a GPU, unless a defense passes the batch through the model again."""
    return place.type == "cuda" and not passes_again(job.protection)


def _trained(out: Path, facts: Mapping[str, Any]) -> Trained:
    history, budget = tuple(facts["history"]), (facts.get("epsilon"), facts.get("delta"))
    return Trained(out, out / FINAL, facts["test_accuracy"], facts["epochs"], facts["step"], history, *budget)
