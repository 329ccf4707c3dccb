"""What a run leaves behind while it goes on: weights at chosen steps, logs, a point to go on from, and a progress bar."""

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gradveil.core.errors import GradveilError
from gradveil.core.files import replacing, write_text
from gradveil.training.folders import METRICS, RESUME
from gradveil.training.modules import Training


class Saving(Callback):
    """Weights at the steps asked for; after each epoch the metrics and, last, the point to go on from."""

    def __init__(self, out: Path, save_at: tuple[int, ...], save: Callable[[int], None]) -> None:
        self.out, self.save_at, self.save = out, frozenset(save_at), save

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        if trainer.current_epoch == 0:
            self._at(0)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        self._at(trainer.current_epoch * int(trainer.num_training_batches) + batch_idx + 1)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Training)
        latest = pl_module.history[-1]
        if not math.isfinite(latest["train_loss"]):
            raise GradveilError(f"training diverged in epoch {latest['epoch']:.0f}: the loss is {latest['train_loss']}; lower --lr")
        if not all(bool(weight.isfinite().all()) for weight in pl_module.model.parameters()):  # the last step may be the one too far
            raise GradveilError(f"training diverged in epoch {latest['epoch']:.0f}: weights are not finite; lower --lr")
        write_text(self.out / METRICS, as_csv(pl_module.history))
        if trainer.logger is not None:
            trainer.logger.log_metrics({key: value for key, value in latest.items() if key != "step"}, step=int(latest["step"]))
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

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        batches = int(trainer.num_training_batches)
        self.task = self.progress.add_task(
            "", total=batches * int(trainer.max_epochs or 0), completed=batches * trainer.current_epoch, news=""
        )
        self.progress.start()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        self.progress.update(self.task, advance=1)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Training)
        row = pl_module.history[-1]
        news = f"epoch {row['epoch']:.0f}/{trainer.max_epochs}  loss {row['train_loss']:.3f}  test accuracy {row['test_accuracy']:.1%}"
        self.progress.update(self.task, news=news)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        self.progress.stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        if self.progress.live.is_started:  # else it would print an empty line
            self.progress.stop()


def as_csv(rows: list[dict[str, float]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
