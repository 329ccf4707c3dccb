"""The Lightning module and data module."""

import time
from typing import Any

import lightning as L
import torch
from torch import nn

from gradveil.core.seeds import derived, generator
from gradveil.core.types import Batch
from gradveil.data import Images
from gradveil.data.batches import Batches
from gradveil.training.recipe import Recipe
from gradveil.training.steps import GraphedStep, Step
from gradveil.transforms import Preparation

TEST_BATCH = 1_000


class ImageData(L.LightningDataModule):
    """Two splits, moved to the training device once and prepared there. Each epoch has its own stream of random numbers."""

    def __init__(self, train: Images, test: Images, prepare: Preparation, batch_size: int, seed: int) -> None:
        super().__init__()
        self.splits = {"train": train, "test": test}
        self.prepare, self.batch_size, self.seed = prepare, batch_size, seed
        self.resident: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def setup(self, stage: str) -> None:  # noqa: ARG002
        assert self.trainer is not None
        device = self.trainer.strategy.root_device
        self.resident = {name: (split.images.to(device), split.labels.to(device)) for name, split in self.splits.items()}

    def train_dataloader(self) -> Batches:
        assert self.trainer is not None
        rng = generator(self.seed, "train", self.trainer.current_epoch)
        return Batches(*self.resident["train"], self.batch_size, rng, self.prepare)

    def val_dataloader(self) -> Batches:
        return Batches(*self.resident["test"], TEST_BATCH)


class Training(L.LightningModule):
    """A model, the recipe it is trained by, and one line of history per epoch."""

    def __init__(self, model: nn.Module, recipe: Recipe, seed: int = 0, bf16: bool = False, graphs: bool = False) -> None:
        super().__init__()
        self.model, self.recipe, self.seed, self.bf16, self.graphs = model, recipe, seed, bf16, graphs
        self.automatic_optimization = False  # a replayed graph holds the whole step, the update too
        self.history: list[dict[str, float]] = []
        self.step: Step | None = None
        self.accuracy = float("nan")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.recipe.optimizer(self.model)

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:  # noqa: ARG002
        return batch  # it is made where the images lie

    def on_train_epoch_start(self) -> None:
        torch.manual_seed(derived(self.seed, "forward", self.current_epoch))  # for layers that draw, such as dropout
        optimizer = self.trainer.optimizers[0]
        for group in optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.current_epoch)
        if self.step is None:
            self.step = (GraphedStep if self.graphs else Step)(self.model, self.recipe.loss, optimizer, self.bf16)
        self.started = time.perf_counter()

    def training_step(self, batch: Batch, index: int) -> None:  # noqa: ARG002
        assert self.step is not None
        self.step(batch)

    def on_validation_epoch_start(self) -> None:
        self.hits = torch.zeros((), device=self.device)
        self.tested = 0
        if self.step is not None:  # a validation belongs to the epoch that it ends
            self.train_loss, self.train_accuracy = self.step.averages()
            self.seconds = time.perf_counter() - self.started

    def validation_step(self, batch: Batch, index: int) -> None:  # noqa: ARG002
        with torch.autocast(batch.images.device.type, torch.bfloat16, enabled=self.bf16):
            logits = self.model(batch.images)
        self.hits += (logits.argmax(1) == batch.labels).sum()
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

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.history = checkpoint["history"]
