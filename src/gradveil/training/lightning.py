"""The Lightning module and data module."""

import csv
import io
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Generator, nn

from gradveil.core.errors import GradveilError
from gradveil.core.files import replacing, write_text
from gradveil.core.seeds import derived, generator
from gradveil.core.types import Batch
from gradveil.data import Batches, Images
from gradveil.defenses import Defense
from gradveil.models.bottleneck import at_rest, penalties
from gradveil.training.job import METRICS, RESUME, Prepare, Recipe
from gradveil.training.step import (
    DefendedStep,
    GraphedStep,
    Objective,
    Step,
    acts_on,
    hits,
    packed,
    unpacked,
)

TEST_BATCH = 1_000


class ImageData(L.LightningDataModule):
    """Two splits, moved to the training device once and prepared there. Each epoch has its own stream of random numbers."""

    def __init__(
        self, train: Images, test: Images, prepare: Prepare, batch_size: int, seed: int
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
    """A model, protected by its defense, the recipe it is trained by, and one line of history per epoch."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        seed: int = 0,
        bf16: bool = False,
        graphs: bool = False,
        defense: Defense | None = None,
    ) -> None:
        super().__init__()
        self.defense = defense or Defense()
        self.model, self.recipe, self.seed, self.bf16, self.graphs = (
            model,
            recipe,
            seed,
            bf16,
            graphs,
        )
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
        torch.manual_seed(
            derived(self.seed, "forward", self.current_epoch)
        )  # for layers that draw, such as dropout
        optimizer = self.trainer.optimizers[0]
        for group in optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.current_epoch)
        if self.step is None:
            self.step = self._first_step(optimizer)
        self.started = time.perf_counter()

    def _first_step(self, optimizer: torch.optim.Optimizer) -> Step:
        objective = Objective.of(self.defense, self.recipe.loss_scale)
        if acts_on(self.defense, "gradients"):
            step = DefendedStep(
                self.model, objective, optimizer, self.bf16, self.defense, self._stream, self.graphs
            )
            step.state = step.state if self.kept is None else unpacked(self.kept, self.device)
            return step
        loss = objective if acts_on(self.defense, "model") else self.recipe.loss
        return (GraphedStep if self.graphs else Step)(self.model, loss, optimizer, self.bf16)

    def _stream(self) -> Generator:
        """Where the model is: noise for all weights takes long to make elsewhere and bring there."""
        return Generator(self.device).manual_seed(derived(self.seed, "defense", self.number))

    def training_step(self, batch: Batch, index: int) -> None:
        assert self.step is not None
        self.number = self.current_epoch * int(self.trainer.num_training_batches) + index
        self.step(batch)

    def on_validation_epoch_start(self) -> None:
        torch.manual_seed(
            derived(self.seed, "test", self.current_epoch)
        )  # for layers that draw here too, as PRECODE's do
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
        """Optimizer steps after the current epoch."""
        return (self.current_epoch + 1) * int(self.trainer.num_training_batches)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["history"] = self.history
        if isinstance(self.step, DefendedStep):
            checkpoint["defense"] = packed(self.step.state)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.history, self.kept = checkpoint["history"], checkpoint.get("defense")


class RunSaver(Callback):
    """Weights at the steps asked for; after each epoch the metrics and, last, the point to go on from."""

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
                f"training diverged in epoch {latest['epoch']:.0f}: the loss is {latest['train_loss']}; lower --lr"
            )
        if not all(
            bool(weight.isfinite().all()) for weight in pl_module.model.parameters()
        ):  # the last step may be the one too far
            raise GradveilError(
                f"training diverged in epoch {latest['epoch']:.0f}: weights are not finite; lower --lr"
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


class Bar(Callback):
    """Steps, the last epoch's figures and the time left, on the error stream."""

    def __init__(self) -> None:
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[news]}"),
            console=Console(stderr=True),
            refresh_per_second=4,
        )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        batches = int(trainer.num_training_batches)
        self.task = self.progress.add_task(
            "",
            total=batches * int(trainer.max_epochs or 0),
            completed=batches * trainer.current_epoch,
            news="",
        )
        self.progress.start()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self.progress.update(self.task, advance=1)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Training)
        row = pl_module.history[-1]
        news = f"epoch {row['epoch']:.0f}/{trainer.max_epochs}  loss {row['train_loss']:.3f}  test accuracy {row['test_accuracy']:.1%}"
        self.progress.update(self.task, news=news)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.progress.stop()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        if self.progress.live.is_started:  # else it would print an empty line
            self.progress.stop()


def as_csv(rows: list[dict[str, float]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
