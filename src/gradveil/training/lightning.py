"""The Lightning side of a training: data, module, callbacks, and the fit itself.

Lightning takes seconds to import: nothing but `run.train` imports this module, when it trains.
"""

import csv
import io
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Generator, nn

from gradveil.core.errors import GradveilError, one_line
from gradveil.core.files import MissingFileError, replacing, write_text
from gradveil.core.progress import Bar
from gradveil.core.seeds import derived, generator
from gradveil.core.types import Batch
from gradveil.data import Batches, Images
from gradveil.defenses import Defense
from gradveil.defenses.applied import protected_batch
from gradveil.engine.device import sharing_cores
from gradveil.models.bottleneck import at_rest, penalties
from gradveil.models.checkpoints import damaged_resume, mismatch, read_resume
from gradveil.training.job import METRICS, RESUME, TENSORBOARD, Prepare, Recipe, TrainingJob
from gradveil.training.step import (
    DefendedStep,
    GraphedStep,
    Objective,
    Step,
    hits,
    replays,
)

TEST_BATCH = 1_000


class ImageData(L.LightningDataModule):
    """Two splits, moved to the training device once and prepared there.

    Each epoch has its own stream of random numbers.
    """

    def __init__(
        self, train: Images, test: Images, prepare: Prepare | None, batch_size: int, seed: int
    ) -> None:
        super().__init__()
        self.splits = {"train": train, "test": test}
        self.prepare, self.batch_size, self.seed = prepare, batch_size, seed
        self.resident: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        device = self.trainer.strategy.root_device
        self.resident = {
            name: (split.images.to(device), split.labels.to(device))
            for name, split in self.splits.items()
        }

    def train_dataloader(self) -> Batches:
        assert self.trainer is not None
        rng = generator(self.seed, "train", self.trainer.current_epoch)
        return Batches(*self.resident["train"], self.batch_size, rng, self.prepare)

    def val_dataloader(self) -> Batches:
        return Batches(*self.resident["test"], TEST_BATCH)


class Training(L.LightningModule):
    """A protected model, the recipe it is trained by, and a line of history for each epoch.

    `on_batch` is what of the defense changes each batch (see `TrainingJob.on_batch`).
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        seed: int = 0,
        bf16: bool = False,
        graphs: bool = False,
        defense: Defense | None = None,
        on_batch: Defense | None = None,
    ) -> None:
        super().__init__()
        self.defense, self.on_batch = defense or Defense(), on_batch
        self.model, self.recipe, self.seed = model, recipe, seed
        self.bf16, self.graphs = bf16, graphs
        self.automatic_optimization = False  # a replayed graph holds the whole step, the update too
        self.history: list[dict[str, float]] = []
        self.step: Step | None = None
        self.number = 0  # of the present step, from the start of the training
        self.kept: Any = None  # what the defense had kept when the run was stopped
        self.accuracy = float("nan")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.recipe.optimizer(self.model)

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        return batch  # it is made where the images lie

    def on_train_epoch_start(self) -> None:
        # For layers that draw, such as dropout.
        torch.manual_seed(derived(self.seed, "forward", self.current_epoch))
        optimizer = self.trainer.optimizers[0]
        for group in optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.current_epoch)
        if self.step is None:
            self.step = self._first_step(optimizer)
        self.started = time.perf_counter()

    def _first_step(self, optimizer: torch.optim.Optimizer) -> Step:
        objective = Objective.of(self.defense, self.recipe.loss_scale)
        if self.defense.changes("gradients"):
            step = DefendedStep(
                self.model, objective, optimizer, self.bf16, self.defense, self._stream, self.graphs
            )
            if self.kept is not None:
                step.state = self.defense.unpack_state(self.kept, self.device)
            return step
        loss = objective if self.defense.changes("model") else self.recipe.loss
        return (GraphedStep if self.graphs else Step)(self.model, loss, optimizer, self.bf16)

    def _stream(self) -> Generator:
        """Make the step's generator where the model is: noise for all weights is slow to move."""
        return Generator(self.device).manual_seed(derived(self.seed, "defense", self.number))

    def training_step(self, batch: Batch, index: int) -> None:
        assert self.step is not None
        self.number = self.current_epoch * int(self.trainer.num_training_batches) + index
        if self.on_batch is not None:
            rng = generator(self.seed, "batch", self.number)  # on the CPU, as a client's is
            batch = protected_batch(self.on_batch, batch, rng)
        self.step(batch)

    def on_validation_epoch_start(self) -> None:
        # For layers that draw here too, as PRECODE's do.
        torch.manual_seed(derived(self.seed, "test", self.current_epoch))
        self.hits = torch.zeros((), device=self.device)
        self.tested = 0
        if self.step is not None:  # a validation belongs to the epoch that it ends
            self.train_loss, self.train_accuracy = self.step.averages()
            self.seconds = time.perf_counter() - self.started

    def validation_step(self, batch: Batch, index: int) -> None:
        with (
            at_rest(self.model),
            torch.autocast(batch.images.device.type, torch.bfloat16, enabled=self.bf16),
        ):
            answers = self.model(batch.images)
        self.hits += hits(answers, batch.labels, penalties(self.model))
        self.tested += len(batch)

    def on_validation_epoch_end(self) -> None:
        self.accuracy = float(self.hits) / self.tested
        if self.step is None:
            return
        self.history.append(
            {
                "epoch": self.current_epoch + 1,
                "step": self.steps_done,
                "lr": self.recipe.rate(self.current_epoch),
                "train_loss": self.train_loss,
                "train_accuracy": self.train_accuracy,
                "test_accuracy": self.accuracy,
                "seconds": self.seconds,
            }
        )

    @property
    def steps_done(self) -> int:
        """The optimizer steps after the current epoch."""
        return (self.current_epoch + 1) * int(self.trainer.num_training_batches)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["history"] = self.history
        if isinstance(self.step, DefendedStep):
            checkpoint["defense"] = self.defense.pack_state(self.step.state)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.history, self.kept = checkpoint["history"], checkpoint.get("defense")


class RunSaver(Callback):
    """Save weights at the steps asked for; after each epoch metrics and a point to go on from."""

    def __init__(self, out: Path, save_at: tuple[int, ...], save: Callable[[int], None]) -> None:
        self.out, self.save_at, self.save = out, frozenset(save_at), save

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 0:
            self._at(0)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._at(trainer.current_epoch * int(trainer.num_training_batches) + batch_idx + 1)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Training)
        latest = pl_module.history[-1]
        if not math.isfinite(latest["train_loss"]):
            raise GradveilError(
                f"training diverged in epoch {latest['epoch']:.0f}: the loss is "
                f"{latest['train_loss']}; lower --lr"
            )
        # The last step may be the one too far.
        if not all(bool(weight.isfinite().all()) for weight in pl_module.model.parameters()):
            raise GradveilError(
                f"training diverged in epoch {latest['epoch']:.0f}: weights are not finite; "
                "lower --lr"
            )
        write_text(self.out / METRICS, as_csv(pl_module.history))
        if trainer.logger is not None:
            trainer.logger.log_metrics(
                {key: value for key, value in latest.items() if key != "step"},
                step=int(latest["step"]),
            )
            trainer.logger.save()
        with replacing(self.out / RESUME) as temporary:
            trainer.save_checkpoint(temporary)

    def _at(self, step: int) -> None:
        if step in self.save_at:
            self.save(step)


class FreeCores(Callback):
    """Let each epoch have as many threads as cores are free when it begins; see `sharing_cores`.

    A step is no attack's iteration: much of it takes one thread anyway, so that the time that its
    threads have does not tell whether others use the cores, and nobody looks within an epoch.
    """

    def __init__(self, device: torch.device, part: ExitStack) -> None:
        self.device, self.part = device, part

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.part.close()
        self.part.enter_context(sharing_cores(self.device))


class ProgressBar(Callback):
    """Show the steps, the last epoch's figures and the time left."""

    def __init__(self) -> None:
        self.bar = Bar(shown=True, counted=True)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        batches = int(trainer.num_training_batches)
        total = batches * int(trainer.max_epochs or 0)
        self.bar.start("training", total, batches * trainer.current_epoch)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        before = trainer.current_epoch * int(trainer.num_training_batches)
        self.bar.update(before + batch_idx + 1)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Training)
        row = pl_module.history[-1]
        self.bar.update(
            news=f"epoch {row['epoch']:.0f}/{trainer.max_epochs}  loss {row['train_loss']:.3f}  "
            f"test accuracy {row['test_accuracy']:.1%}"
        )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.bar.stop()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self.bar.stop()


def as_csv(rows: list[dict[str, float]]) -> str:
    """Write rows with the same keys as text, the keys first."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def fit(
    job: TrainingJob,
    model: nn.Module,
    data: ImageData,
    out: Path,
    device: torch.device,
    save: Callable[[int], None],
    progress: bool,
) -> Training:
    """Train the model in place, from where a stopped run left off; `save` keeps a step's state."""
    on_gpu = device.type == "cuda"
    bf16 = job.precision == "bf16" or (job.precision == "auto" and on_gpu)
    if on_gpu:
        # torch's annotations lack this overload.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    graphs = replays(job.defense, device)
    module = Training(model, job.recipe, job.seed, bf16, graphs, job.defense, job.on_batch)
    part = ExitStack()
    callbacks: list[Callback] = [FreeCores(device, part), RunSaver(out, job.save_at, save)]
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[device] if on_gpu else []),
        _failures(job, out),
        part,
    ):
        # Advice about workers and loggers that this loop does not use.
        warnings.filterwarnings("ignore", module="lightning")
        trainer = L.Trainer(
            accelerator="gpu" if on_gpu else "cpu",
            devices=1,
            max_epochs=job.recipe.epochs,
            callbacks=[*callbacks, ProgressBar()] if progress else callbacks,
            logger=_tensorboard(out),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            reload_dataloaders_every_n_epochs=1,
            default_root_dir=out,
        )
        stopped = _stopped(out, module)
        try:
            trainer.fit(module, datamodule=data, ckpt_path=stopped, weights_only=True)
        except GradveilError:
            raise
        except Exception as error:
            if stopped is None or module.step is not None:
                raise
            raise damaged_resume(stopped, one_line(error, 200)) from error
        if not module.history:  # no epoch was asked for: the untrained model
            trainer.validate(module, datamodule=data, verbose=False)
            for step in job.save_at:
                save(step)
    return module


@contextmanager
def _failures(job: TrainingJob, out: Path) -> Iterator[None]:
    """Tell in a line what goes wrong while training; a signal, which Lightning hides, ends all."""
    try:
        yield
    except SystemExit as stop:
        if not isinstance(stop, SIGTERMException) and not isinstance(
            stop.__context__, KeyboardInterrupt
        ):
            raise GradveilError(
                f"model {job.model_name!r} ended the program while training, with {stop.code!r}"
            ) from stop
        raise KeyboardInterrupt from stop
    except torch.OutOfMemoryError as error:
        raise GradveilError(
            f"the GPU's memory is too small for batches of {job.recipe.batch_size}: "
            "lower --batch-size"
        ) from error
    except GradveilError:
        raise
    except OSError as error:  # from the TensorBoard log: all other files are written by core.files
        raise GradveilError(
            f"cannot write into {out}: {error.strerror or error}; mend that and run again"
        ) from error
    except Exception as error:
        if isinstance(job.model, str) and ":" not in job.model:
            raise
        raise GradveilError(
            f"model {job.model_name!r} failed while training: {one_line(error)}"
        ) from error


def _stopped(out: Path, module: nn.Module) -> Path | None:
    """Return the point to go on from, if there is any; it must fit the module."""
    path = out / RESUME
    try:
        found = read_resume(path)
    except MissingFileError:
        return None
    if problem := mismatch(found["state_dict"], module.state_dict()):
        raise damaged_resume(path, problem)
    return path


def _tensorboard(out: Path) -> TensorBoardLogger | None:
    try:
        return TensorBoardLogger(out, name=TENSORBOARD, version="")
    except ModuleNotFoundError:  # metrics.csv has the same figures
        return None
