"""Experiments beyond the papers: leakage during training, of real clients, and after a search."""

from dataclasses import dataclass, replace
from typing import ClassVar

from gradveil.audits.attackers import MATCHED
from gradveil.defenses import parse
from gradveil.papers.cells import STAGES, Audited, Training
from gradveil.papers.experiments import (
    HYBRID,
    NONE,
    RACED,
    STANDARD,
    STRONGEST,
    Entry,
    Ours,
    Setting,
    Size,
    audit,
    semi_trained,
)
from gradveil.papers.searched import Searched
from gradveil.papers.switches import Switches
from gradveil.papers.tuned import TunedAttack

EARLY = 4  # epochs: those of the stages, at the same rate and with the same draws as of 60
END = "end"
SINGLE = "batch 1, 1 step, eval mode"  # of clients: what their other kinds are compared with
FEWER = 1_200  # iterations of an attack on clients that do more than one step
FEW_LARGE = 16  # images of a cell whose images and network are large


@dataclass(frozen=True)
class OverTraining(Ours):
    """Rank 1 by stage of training, of the published and the strongest attack.

    A claim about training needs two trainings at least: the last stages are attacked with the
    second seed too.
    """

    setting: Setting
    rows: tuple[str, ...] = (NONE, HYBRID)
    again: tuple[int | str, ...] = (500, END)

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        found = []
        for row in self.rows:
            for seed, stages in ((0, (*STAGES, END)), (1, self.again)):
                for stage in stages:
                    name = f"{row}, step {stage}" if stage != END else f"{row}, {END}"
                    name += f", seed {seed}" if seed else ""
                    found += [
                        Entry(name, cell) for cell in self._cells(row, switches, size, stage, seed)
                    ]
        return tuple(found)

    def _cells(
        self, row: str, switches: Switches, size: Size, stage: int | str, seed: int
    ) -> list[Audited]:
        if isinstance(stage, str):
            training = self.setting.training(row, switches, seed=seed)
            both = not seed  # these are the cells of the table of policies
        else:
            training = self.setting.training(row, switches, seed=seed, epochs=EARLY)
            training, both = replace(training, at=stage), False
        usual = audit(training, switches, size.count(switches), STANDARD, both)
        images = size.count(switches) if both else size.count(switches, RACED)
        strong = audit(training, switches, images, STRONGEST, both)
        return [usual, strong if both else replace(strong, sham=False)]


@dataclass(frozen=True)
class RealClients(Ours):
    """Rank 1 for batches and local steps, with batch norm in eval and train mode.

    `updates` are attacked of each kind, before training and after it. Of several local steps, which
    take eight times as long and more, the race has half of its starts. Batches are also attacked by
    the features of each image, which their last dense layer tells.
    """

    distanced: ClassVar[bool] = True

    setting: Setting
    kinds: tuple[tuple[int, int], ...] = ((1, 1), (8, 1), (32, 1), (8, 4))
    updates: int = 8

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        found = []
        for epochs, stage in ((0, "untrained"), (60, "trained")):
            training = self.setting.training(NONE, switches, epochs=epochs)
            for batch, steps in self.kinds:
                for train_mode in (False, True):
                    mode = "train mode" if train_mode else "eval mode"
                    row = f"{stage}, batch {batch}, {steps} step{'s' * (steps > 1)}, {mode}"
                    images = max(RACED, self.updates * batch)
                    for attack in (STANDARD, STRONGEST, *((MATCHED,) if batch > 1 else ())):
                        cell = replace(
                            audit(training, switches, images, attack),
                            steps=FEWER,
                            restarts=1 if steps > 1 and attack == STRONGEST else None,
                            sham=False,
                            batch_size=batch,
                            local_steps=steps,
                            train_mode=train_mode,
                        )
                        if not (batch == 1 and train_mode):  # no statistics of one image
                            found.append(Entry(row, cell))
        return tuple(found)


@dataclass(frozen=True)
class Searches(Ours):
    """Searches by the published score and by ours, each with the audits that confirm it."""

    small_lr: float = 0.01  # of lenet: the published rate is that of the residual network

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        large = semi_trained("cifar100", switches)
        small = replace(semi_trained("fashion-mnist", switches, model="lenet"), lr=self.small_lr)
        images = size.count(switches)
        cells = {
            "S_pri, as published": Searched(large, "privacy", 100, images),
            "the probe": Searched(large, images=images),
            "the probe, Fashion-MNIST, lenet": Searched(small, images=images),
        }
        return tuple(Entry(row, cell) for row, cell in cells.items())


@dataclass(frozen=True)
class RacedPolicies(Ours):
    """Rank 1 of the strongest attack on the semi-trained model, for some policies.

    They are the 1st, 8th, 15th, ... 50th by S_pri of those in the study of scores on such a model
    (`benchmarks/probe.py`), chosen before any was attacked so.
    """

    policies: tuple[str, ...] = (
        "3-24-34",
        "8-13-20",
        "20-8",
        "15-37-6",
        "25-29-12",
        "41-0-40",
        "46-44",
        "32-45-13",
    )

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        training, found = semi_trained("cifar100", switches), []
        for policy in self.policies:
            images = size.count(switches, RACED)
            cell = audit(training, switches, images, STRONGEST)
            found.append(Entry(policy, replace(cell, defense=parse(policy), sham=False)))
        return tuple(found)


@dataclass(frozen=True)
class Tuning(Ours):
    """The published, the raced and a tuned attack, before training and after it."""

    setting: Setting

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        early = replace(self.setting.training(NONE, switches, epochs=EARLY), at=0)
        trained = self.setting.training(NONE, switches)
        found = []
        for row, training, end in (("step 0", early, False), (END, trained, True)):
            images = size.count(switches)
            usual = audit(training, switches, images, STANDARD, end)
            few = images if end else size.count(switches, RACED)
            strong = audit(training, switches, few, STRONGEST, end)
            strong = strong if end else replace(strong, sham=False)
            tuned = TunedAttack(training, usual.defense, images=images)
            found += [Entry(row, usual), Entry(row, strong), Entry(row, tuned)]
        return tuple(found)


@dataclass(frozen=True)
class LargerPictures(Ours):
    """The published and the strongest attack on a ResNet-18 and images of 64 pixels."""

    setting: Setting

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        found = []
        for epochs, stage in ((0, "untrained"), (60, "trained")):
            training = self.setting.training(NONE, switches, epochs=epochs)
            for attack in (STANDARD, STRONGEST):
                cell = audit(training, switches, size.count(switches, FEW_LARGE), attack)
                found.append(Entry(stage, cell))
        return tuple(found)


@dataclass(frozen=True)
class Breakers(Ours):
    """Defenses against the standard attack and all their known breakers, on untrained networks."""

    data: str = "fashion-mnist"
    rows: tuple[tuple[str, str], ...] = (
        ("lenet", NONE),
        ("lenet", "prune:0.95"),
        ("lenet", "gaussian:0.01"),
        ("lenet", "soteria:0.8"),
        ("lenet", "dropout:0.3"),
        ("mlp", NONE),
        ("mlp", "precode"),
    )

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        found = []
        for model, row in self.rows:
            defense = parse(row)
            training = Training(self.data, model, defense, epochs=0, augment=False)
            exact = ("closed-form",) if model == "mlp" else ()
            for attack in dict.fromkeys((STANDARD, *defense.breakers, *exact)):
                cell = Audited(
                    training,
                    defense,
                    attack,
                    size.count(switches),
                    sham=True,
                    steps=None if attack in exact else FEWER,
                )
                found.append(Entry(f"{model}, {row}", cell))
        return tuple(found)
