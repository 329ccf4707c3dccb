"""Kinds of experiments: tables, pictures, curves and scores, each made of cells.

`entries` gives the cells of an experiment for a set of switches, each with the row that it belongs
to; experiments share cells, which are told apart by their settings alone. The experiments
themselves are in `catalog`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from gradveil.core.errors import GradveilError
from gradveil.defenses import Defense, PolicyDefense, RandomPolicies, chain, parse
from gradveil.papers.cells import Audited, Cell, Trained, Training, Workspace
from gradveil.papers.measurements import Correlated, Layers, Lines, Singles
from gradveil.papers.networks import OF_DATA
from gradveil.papers.switches import AS_PUBLISHED, RANDOM_SINGLE, VARIANTS, Switches
from gradveil.transforms import Policy

PAPER, REPLICATION, PRECODE, BEYOND = "paper", "replication", "precode", "beyond"
NONE, RANDOM = "none", "random"
HYBRID = "3-1-7+43-18-18"
STANDARD, STRONGEST = "adam-cosine", "raced"
USUAL, USUAL_PUBLISHED = 64, 32  # images of a cell
FEW = 30  # images of a cell whose attack is slow
RACED = 32  # images of a cell whose attack is raced, where none was published
SEEDS = 3  # trainings of a row whose accuracy decides
OPTIONAL_DATA = ("cifar10",)  # PRECODE's rows on it are run where a user has the official files
LONG = 200  # epochs, as the paper trains
MOST = {"images": 10_000, "seeds": 100}  # of an experiment: each seed is a training


@dataclass(frozen=True)
class Size:
    """How large an experiment is: images of a cell, trainings of the rows none and hybrid.

    `images` None takes the usual number: 64, and 32 as published. `quick` makes stand-ins that run
    in minutes on two cores and prove nothing.
    """

    images: int | None = None
    seeds: int = 1
    quick: bool = False

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise GradveilError(f"{name} {value}: it must be from 1 to {most:,}")

    def count(self, switches: Switches, most: int = USUAL) -> int:
        """Return the images of a cell, by default at most `most`."""
        if self.images is not None:
            return self.images
        return min(most, USUAL_PUBLISHED if switches == AS_PUBLISHED else USUAL)


class Entry(NamedTuple):
    """A cell, and the row of the experiment that it belongs to."""

    row: str
    cell: Cell


@dataclass(frozen=True)
class Experiment(ABC):
    """An experiment of a document: paper, replication or precode; or one beyond them.

    `agrees` says in words what counts as agreeing with it. `tabled` says that its figures were
    published, as a table of this id; `distanced` that its tables show how far each search ended.
    """

    tabled: ClassVar[bool] = False
    distanced: ClassVar[bool] = False

    id: str
    documents: tuple[str, ...]
    claim: str
    agrees: str

    @property
    def table(self) -> str | None:
        """The key of the published figures."""
        return self.id if self.tabled else None

    @property
    def variants(self) -> tuple[str, ...]:
        """The ways in which it is run: as published, and ours."""
        return tuple(VARIANTS)

    @abstractmethod
    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        """Return the cells with their rows."""

    def planned(self, switches: Switches, size: Size, workspace: Workspace) -> tuple[Entry, ...]:
        """Return the cells with their rows; small stand-ins for a quick run."""
        found = self.entries(switches, size)
        if not size.quick:
            return found
        return tuple(Entry(row, cell.quick(workspace)) for row, cell in found)


class Ours(Experiment):
    """An experiment that is run in our way alone."""

    @property
    def variants(self) -> tuple[str, ...]:
        return ("ours",)


@dataclass(frozen=True)
class Setting:
    """A data set and a model, which the switches may change."""

    data: str
    model: str

    def training(
        self, row: str, switches: Switches, *, seed: int = 0, epochs: int = 60
    ) -> Training:
        """Return the training of a row: none, random, a policy or another defense."""
        model, size = self.model, None
        if model == "convnet" and switches.convnet == "9":
            model = "convnet-9"
        if self.data == "fashion-mnist" and switches.fashion_size == "32":
            size = 32
        return Training(
            self.data,
            model,
            row_defense(row, switches),
            epochs,
            loss_scale=0.5 if switches.loss == "halved" else 1.0,
            constants=switches.constants if self.data == "cifar100" else OF_DATA,
            image_size=size,
            augment=switches.crop == "yes",
            seed=seed,
        )


def row_defense(row: str, switches: Switches) -> Defense:
    """Return the defense that a row is trained under."""
    if row != RANDOM:
        return parse(row)
    return parse(RANDOM_SINGLE) if switches.random == "single" else RandomPolicies()


def victim_defense(defense: Defense, switches: Switches) -> Defense:
    """Return the defense of the victims of a model that was trained under a defense.

    Where victims are alike, all are cropped and flipped, with a policy and without.
    """
    if switches.crop == "no":
        return defense.without_augmentation()
    if defense.changes("batch") or switches.victims == "plain":
        return defense
    return chain([PolicyDefense(Policy()), *defense.parts()])


def expanded(row: str, switches: Switches) -> tuple[str, ...]:
    """Return the policies that a row is the mean of: ten for random, if so switched."""
    if row != RANDOM or switches.random != "mean":
        return (row,)
    return tuple(str(Policy((member,))) for member in RandomPolicies().policy.members)


def audit(
    training: Training, switches: Switches, images: int, attack: str = STANDARD, grid: bool = False
) -> Audited:
    """Return the audit of a trained model by an attack."""
    published = switches == AS_PUBLISHED
    return Audited(
        training,
        victim_defense(training.defense, switches),
        attack,
        images,
        first=switches.images == "first",
        clean=switches.gradient == "clean",
        controls=not published,
        sham=attack == STRONGEST,
        grid=grid,
    )


@dataclass(frozen=True)
class PolicyTable(Experiment):
    """PSNR of an attack and accuracy by policy; ours adds the strongest attack and its sham."""

    tabled: ClassVar[bool] = True

    setting: Setting
    rows: tuple[str, ...]
    attack: str = STANDARD
    strongest: str | None = STRONGEST
    repeated: bool = False
    most: int = USUAL

    @property
    def hybrid(self) -> str:
        """The hybrid policy, the last of the rows."""
        return self.rows[-1]

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        found: list[Entry] = []
        for row in self.rows:
            policies = expanded(row, switches)
            images = max(4, size.count(switches, self.most) // len(policies))
            for policy in policies:
                training = self.setting.training(policy, switches)
                ends = row in (NONE, self.hybrid)
                found.append(Entry(row, Trained(training)))
                found.append(Entry(row, audit(training, switches, images, self.attack, ends)))
                if ends and self.strongest and switches != AS_PUBLISHED:
                    strong = audit(training, switches, images, self.strongest, True)
                    found.append(Entry(row, strong))
                seeds = max(SEEDS, size.seeds) if self._repeats(switches) else size.seeds
                found += [
                    Entry(row, Trained(self.setting.training(policy, switches, seed=seed)))
                    for seed in range(1, seeds if ends else 1)
                ]
        return tuple(found)

    def _repeats(self, switches: Switches) -> bool:
        return self.repeated and switches != AS_PUBLISHED


@dataclass(frozen=True)
class AttackTable(Experiment):
    """PSNR of several attacks without and with the hybrid."""

    tabled: ClassVar[bool] = True

    setting: Setting
    attacks: tuple[str, ...]
    slow: tuple[str, ...]  # run as published alone, on few images
    hybrid: str = HYBRID

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        found = []
        for attack in self.attacks:
            if attack in self.slow and switches != AS_PUBLISHED:
                continue
            images = size.count(switches, FEW if attack in self.slow else USUAL)
            for name, row in (("none", NONE), ("hybrid", self.hybrid)):
                training = self.setting.training(row, switches)
                cell = audit(training, switches, images, attack, attack == STANDARD)
                found.append(Entry(f"{attack}, {name}", cell))
        return tuple(found)


@dataclass(frozen=True)
class DefenseTable(Experiment):
    """PSNR and accuracy of gradient defenses; ours attacks what is shared, with raced breakers."""

    tabled: ClassVar[bool] = True

    setting: Setting
    rows: tuple[str, ...]

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        found = []
        for row in self.rows:
            training = self.setting.training(row, switches)
            found.append(Entry(row, Trained(training)))
            grid = row in (NONE, HYBRID)  # as in the other tables: the same cells
            images = size.count(switches)
            found.append(Entry(row, audit(training, switches, images, STANDARD, grid)))
            if switches.gradient == "shared":
                breakers = () if grid else training.defense.strongest
                few = images if grid else size.count(switches, RACED)
                strong = audit(training, switches, few, "+".join((STRONGEST, *breakers)), grid)
                found.append(Entry(row, strong))
        return tuple(found)


@dataclass(frozen=True)
class Curves(Ours):
    """Loss and accuracy by epoch of some trainings."""

    setting: Setting
    rows: tuple[str, ...]
    epochs: int = 60

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        return tuple(
            Entry(row, Trained(self.setting.training(row, switches, epochs=self.epochs)))
            for row in self.rows
        )


@dataclass(frozen=True)
class Pictures(Experiment):
    """Reconstructions without and with the hybrid, of each table's model, with their PSNR."""

    tables: tuple[PolicyTable, ...]

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        found = []
        for table in self.tables:
            for row in (NONE, table.hybrid):
                training = table.setting.training(row, switches)
                cell = audit(training, switches, size.count(switches), table.attack, True)
                found.append(Entry(f"{table.setting.data}, {table.setting.model}, {row}", cell))
        return tuple(found)


def semi_trained(
    data: str, switches: Switches, fraction: float = 0.1, model: str = "resnet20-4"
) -> Training:
    """Return the model of the scores: 10% of the training images, 50 epochs."""
    full = Setting(data, model).training(NONE, switches, epochs=50)
    return replace(full, fraction=fraction)


@dataclass(frozen=True)
class Similarities(Experiment):
    """GradSim from noise to the image, with and without a policy."""

    data: str = "cifar100"

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        training = semi_trained(self.data, switches)
        return (Entry("lines", Lines(training, 100, rule=switches.gradsim)),)


@dataclass(frozen=True)
class SingleScores(Experiment):
    """S_pri of each of the 50 transformations. Of Tiny ImageNet a part stands for the tenth."""

    data: str = "cifar100"
    fraction: float = 0.1

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        return (Entry("singles", Singles(semi_trained(self.data, switches, self.fraction), 100)),)


@dataclass(frozen=True)
class ScoreAgainstAttack(Experiment):
    """S_pri against what an attack recovers, over random policies."""

    data: str = "cifar100"
    policies: int = 100
    victims: int = 8

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        published = switches == AS_PUBLISHED
        cell = Correlated(
            semi_trained(self.data, switches),
            policies=self.policies,
            victims=1 if published else self.victims,
            first=published,
        )
        return (Entry("correlation", cell),)


@dataclass(frozen=True)
class LayerSimilarities(Ours):
    """The likeness of gradients, layer by layer, during attacks on three models."""

    setting: Setting
    rows: tuple[str, ...]

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        found = []
        for row in self.rows:
            training = self.setting.training(row, switches)
            victims = victim_defense(training.defense, switches)
            found.append(Entry(row, Layers(training, 32, defense=victims)))
        return tuple(found)
