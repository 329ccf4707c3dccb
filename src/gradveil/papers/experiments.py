"""The experiments of the papers, as frozen values: claim, published figures, and cells.

`entries` gives the cells of an experiment for a set of switches, each with the row that it belongs
to; experiments share cells, which are told apart by their settings alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gradveil.core.errors import GradveilError, unknown
from gradveil.defenses import Defense, PolicyDefense, Precode, RandomPolicies, chain, parse
from gradveil.papers.cells import Audited, Cell, Place, Trained, Training
from gradveil.papers.measurements import Correlated, Layers, Lines, Singles
from gradveil.papers.networks import OWN
from gradveil.papers.published import claim
from gradveil.papers.switches import AS_PUBLISHED, RANDOM_SINGLE, VARIANTS, Switches
from gradveil.transforms import Policy

PAPER, REPLICATION, PRECODE = "paper", "replication", "precode"
NONE, RANDOM = "none", "random"
HYBRID = "3-1-7+43-18-18"
STANDARD, STRONGEST = "adam-cosine", "raced"
USUAL, USUAL_PUBLISHED = 64, 32  # images of a cell
FEW = 30  # images of a cell whose attack is slow
SEEDS = 3  # trainings of a row whose accuracy decides
OPTIONAL_DATA = ("cifar10",)  # PRECODE's rows on it are run where a user has the official files
LONG = 200  # epochs, as the paper trains


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
        for name in ("images", "seeds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise GradveilError(f"{name} {value}: it must be at least 1")

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
    """An experiment of a document: paper, replication or precode.

    `agrees` says in words what counts as agreeing with it. `table` is the key of its published
    figures, where a table was published.
    """

    id: str
    documents: tuple[str, ...]
    claim: str
    agrees: str

    @property
    def table(self) -> str | None:
        """The key of the published figures."""
        return None

    @property
    def variants(self) -> tuple[str, ...]:
        """The ways in which it is run: as published, and ours."""
        return tuple(VARIANTS)

    @abstractmethod
    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        """Return the cells with their rows."""

    def planned(self, switches: Switches, size: Size, place: Place) -> tuple[Entry, ...]:
        """Return the cells with their rows; small stand-ins for a quick run."""
        found = self.entries(switches, size)
        if not size.quick:
            return found
        return tuple(Entry(row, cell.quick(place)) for row, cell in found)


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
            constants=switches.constants if self.data == "cifar100" else OWN,
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

    setting: Setting
    rows: tuple[str, ...]
    attack: str = STANDARD
    strongest: str | None = STRONGEST
    repeated: bool = False
    most: int = USUAL

    @property
    def table(self) -> str:
        return self.id

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

    setting: Setting
    attacks: tuple[str, ...]
    slow: tuple[str, ...]  # run as published alone, on few images
    hybrid: str = HYBRID

    @property
    def table(self) -> str:
        return self.id

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


BREAKERS = {"prune": "masked", "gaussian": "likelihood", "laplacian": "likelihood"}
"""The attack known to undo a gradient defense, by its name."""


@dataclass(frozen=True)
class DefenseTable(Experiment):
    """PSNR and accuracy of gradient defenses; ours attacks what is shared, with breakers."""

    setting: Setting
    rows: tuple[str, ...]

    @property
    def table(self) -> str:
        return self.id

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        found = []
        for row in self.rows:
            training = self.setting.training(row, switches)
            found.append(Entry(row, Trained(training)))
            grid = row == HYBRID  # as in the other tables: the same cell
            images = size.count(switches)
            found.append(Entry(row, audit(training, switches, images, STANDARD, grid)))
            breaker = BREAKERS.get(row.partition(":")[0])
            if breaker and switches.gradient == "shared":
                found.append(Entry(row, audit(training, switches, images, breaker)))
        return tuple(found)


@dataclass(frozen=True)
class Curves(Experiment):
    """Loss and accuracy by epoch of some trainings."""

    setting: Setting
    rows: tuple[str, ...]
    epochs: int = 60

    @property
    def variants(self) -> tuple[str, ...]:
        return ("ours",)

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


def semi_trained(data: str, switches: Switches, fraction: float = 0.1) -> Training:
    """Return the model of the scores: 10% of the training images, 50 epochs."""
    full = Setting(data, "resnet20-4").training(NONE, switches, epochs=50)
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
class LayerSimilarities(Experiment):
    """The likeness of gradients, layer by layer, during attacks on three models."""

    setting: Setting
    rows: tuple[str, ...]

    @property
    def variants(self) -> tuple[str, ...]:
        return ("ours",)

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        found = []
        for row in self.rows:
            training = self.setting.training(row, switches)
            victims = victim_defense(training.defense, switches)
            found.append(Entry(row, Layers(training, 32, defense=victims)))
        return tuple(found)


PRECODE_ROWS = ("none", "gaussian:0.001", "prune:0.95", "precode")
PRECODE_BREAKERS = {
    "gaussian:0.001": ("likelihood",),
    "prune:0.95": ("masked",),
    "precode": ("without-random-layers", "joint-noise"),
}


def precode_training(data: str, model: str, defense: str, epochs: int = 30) -> Training:
    """Return a training of PRECODE's experiments: small networks, without crop and flip."""
    return Training(data, model, parse(defense), epochs, lr=0.01, augment=False)


@dataclass(frozen=True)
class PrecodeAccuracy(Experiment):
    """Accuracy by epoch of none, noise, pruning and PRECODE."""

    data: tuple[str, ...] = ("cifar10", "cifar100", "medical-mnist")
    models: tuple[str, ...] = ("mlp", "lenet")

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        return tuple(
            Entry(f"{data}, {model}, {row}", Trained(precode_training(data, model, row)))
            for data in self.data
            for model in self.models
            for row in PRECODE_ROWS
        )


@dataclass(frozen=True)
class PrecodeReconstructions(Experiment):
    """What attacks recover from untrained models; ours adds the breakers of each defense."""

    data: tuple[tuple[str, int], ...] = (("cifar10", 50), ("cifar100", 100), ("medical-mnist", 48))
    models: tuple[str, ...] = ("mlp", "lenet")

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        published = switches == AS_PUBLISHED
        found = []
        for data, images in self.data:
            for model in self.models:
                for row in PRECODE_ROWS:
                    training = precode_training(data, model, row, epochs=0)
                    attacks: list[str] = ["iga"]
                    if not published:
                        attacks += PRECODE_BREAKERS.get(row, ())
                        attacks += ["closed-form"] if model == "mlp" else []
                    found += [
                        Entry(f"{data}, {model}, {row}", _precode_audit(training, attack, images))
                        for attack in attacks
                    ]
        return tuple(found)


def _precode_audit(training: Training, attack: str, images: int) -> Audited:
    return Audited(training, training.defense, attack, images, controls=False, grid=attack == "iga")


@dataclass(frozen=True)
class PrecodeGrid(Experiment):
    """PRECODE's k, beta, position and number of modules: accuracy, and what attacks recover."""

    data: str = "cifar100"
    model: str = "mlp"

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        attacks = ["iga"] if switches == AS_PUBLISHED else ["iga", *PRECODE_BREAKERS["precode"]]
        images = size.count(switches, FEW)
        found = []
        for row, defense in GRID.items():
            training = precode_training(self.data, self.model, str(defense))
            found.append(Entry(row, Trained(training)))
            untrained = replace(training, epochs=0)
            found += [Entry(row, _precode_audit(untrained, attack, images)) for attack in attacks]
        return tuple(found)


GRID: dict[str, Precode] = {
    **{f"k = {k}": Precode(k=k) for k in (64, 128, 256, 512)},
    **{f"beta = {beta:g}": Precode(beta=beta) for beta in (1e-1, 1e-2, 1e-4)},
    **{f"after hidden layer {n}": Precode(position=f"features.{2 * n}") for n in (1, 2, 3)},
    **{f"{count} modules": Precode(modules=count) for count in (2, 3)},
}
"""k = 256, beta = 1e-3, before the head, one module, but for what the row says."""

CIFAR_RESNET = Setting("cifar100", "resnet20-4")
CIFAR_CONVNET = Setting("cifar100", "convnet")
FASHION_RESNET = Setting("fashion-mnist", "resnet20-4")
FASHION_CONVNET = Setting("fashion-mnist", "convnet")
TINY = Setting("tiny-imagenet", "resnet20-4")
BOTH = (PAPER, REPLICATION)

LOWER = (
    "Attacked by the strongest attack, the hybrid gives away no more than chance (rank 1 in the "
    "line-up); PSNR, as published, falls below that without a policy."
)

TABLE_1A = PolicyTable(
    "table1a",
    BOTH,
    claim(1),
    LOWER,
    CIFAR_RESNET,
    (NONE, RANDOM, "3-1-7", "43-18-18", HYBRID),
    repeated=True,
)
TABLE_1B = PolicyTable(
    "table1b",
    BOTH,
    claim(1),
    LOWER,
    CIFAR_CONVNET,
    (NONE, RANDOM, "21-13-3", "7-4-15", "7-4-15+21-13-3"),
)
TABLE_1C = PolicyTable(
    "table1c",
    BOTH,
    claim(1),
    LOWER,
    FASHION_RESNET,
    (NONE, RANDOM, "19-15-45", "2-43-21", "2-43-21+19-15-45"),
)
TABLE_1D = PolicyTable(
    "table1d",
    BOTH,
    claim(1),
    LOWER,
    FASHION_CONVNET,
    (NONE, RANDOM, "42-28-42", "14-48-48", "14-48-48+42-28-42"),
)

EXPERIMENTS: dict[str, Experiment] = {
    experiment.id: experiment
    for experiment in (
        Similarities(
            "exp1",
            BOTH,
            "With a policy, GradSim rises later from noise to the image than without.",
            "The mean GradSim with the policy lies below that without, at the middle of the line.",
        ),
        Pictures(
            "exp2",
            BOTH,
            "Under the hybrid, reconstructions cannot be recognized.",
            "To be looked at: the grids of the hybrid show less of the image than those of none.",
            (TABLE_1A, TABLE_1B, TABLE_1C, TABLE_1D),
        ),
        TABLE_1A,
        TABLE_1B,
        TABLE_1C,
        TABLE_1D,
        Curves(
            "table1a-200",
            (PAPER,),
            claim(4),
            "200 epochs give the accuracy of 60 within 2 points.",
            CIFAR_RESNET,
            (NONE, HYBRID),
            epochs=LONG,
        ),
        AttackTable(
            "table2",
            BOTH,
            claim(2),
            "The hybrid leaves each attack that works without it no more than chance (rank 1 in "
            "the line-up); as published, its PSNR falls.",
            CIFAR_RESNET,
            ("lbfgs-l2", "adam-cosine", "lbfgs-cosine", "adam-l1", "adam-l2", "sgd-cosine"),
            slow=("lbfgs-l2", "lbfgs-cosine"),
        ),
        PolicyTable(
            "table3-defaults",
            (REPLICATION,),
            "The policies defeat the further attack ig-default too.",
            "The mean PSNR with each policy is below that without.",
            CIFAR_RESNET,
            (NONE, "3-1-7", "43-18-18", HYBRID),
            attack="ig-default",
            strongest=None,
        ),
        DefenseTable(
            "table-defenses",
            BOTH,
            "Policies protect better than pruning and noise, at a smaller cost of accuracy.",
            "Under the stronger of two attacks the hybrid has fewer images with rank 1 than every "
            "other defense, and a higher accuracy.",
            CIFAR_RESNET,
            (
                "prune:0.7",
                "prune:0.95",
                "prune:0.99",
                "laplacian:0.001",
                "laplacian:0.01",
                "gaussian:0.001",
                "gaussian:0.01",
                HYBRID,
            ),
        ),
        PolicyTable(
            "table4a",
            BOTH,
            claim(3),
            LOWER,
            FASHION_RESNET,
            (NONE, "3-1-7", "43-18-18", HYBRID),
        ),
        PolicyTable(
            "table4b",
            BOTH,
            claim(3),
            LOWER,
            FASHION_CONVNET,
            (NONE, "21-13-3", "7-4-15", "7-4-15+21-13-3"),
        ),
        PolicyTable(
            "table5",
            (REPLICATION,),
            "CIFAR-100's policies protect Tiny ImageNet too.",
            LOWER,
            TINY,
            (NONE, HYBRID),
            most=32,  # each has four times the pixels of the others
        ),
        Curves(
            "exp7",
            BOTH,
            claim(4),
            "With the hybrid the accuracy is at most 1 point lower than without.",
            CIFAR_RESNET,
            (NONE, "3-1-7", "43-18-18", HYBRID),
        ),
        LayerSimilarities(
            "exp8",
            BOTH,
            claim(5),
            "At the end of the attack the hybrid lowers the likeness in both shallow layers, and "
            "in both deep layers by less.",
            CIFAR_RESNET,
            (NONE, RANDOM, HYBRID),
        ),
        SingleScores(
            "exp9", BOTH, claim(6), "All five are among our five lowest; four in the replication."
        ),
        ScoreAgainstAttack(
            "exp10",
            BOTH,
            claim(7),
            "Pearson's r of S_pri and PSNR is above 0, and 0.697 lies in its 95% interval.",
        ),
        SingleScores(
            "ext2",
            (REPLICATION,),
            "The best transformations of CIFAR-100 are the best of Tiny ImageNet too.",
            "Three or more of the paper's five are among the five lowest.",
            "tiny-imagenet",
            1.0,  # the part that is at hand has 10,000 training images, a tenth of the whole
        ),
        PrecodeAccuracy(
            "precode-acc",
            (PRECODE,),
            "PRECODE does not lower the accuracy.",
            "Its accuracy is at most 1 point below that without a defense.",
        ),
        PrecodeReconstructions(
            "precode-rec",
            (PRECODE,),
            "PRECODE prevents recognizable reconstructions.",
            "Rank 1 in the line-up is no more than chance; ours adds PRECODE's breakers.",
        ),
        PrecodeGrid(
            "precode-grid",
            (PRECODE,),
            "k does not matter; beta = 0.1 and more than one module cost accuracy.",
            "Accuracies differ by at most 1 point over k, and fall at beta = 0.1 and with modules.",
        ),
    )
}
"""All experiments by their id."""

ALIASES: dict[str, tuple[str, ...]] = {
    "exp3": ("table1a", "table1b", "table1c", "table1d"),
    "exp4": ("table-defenses",),
    "exp5": ("table2",),
    "exp6": ("table4a", "table4b"),
    "ext1": ("table5",),
    "table1": ("table1a", "table1b", "table1c", "table1d"),
    "table3": ("table-defenses",),
    "table4": ("table4a", "table4b"),
    "precode": ("precode-acc", "precode-rec", "precode-grid"),
}
"""Other names, as the documents number their experiments."""


def find_experiments(names: Sequence[str]) -> list[Experiment]:
    """Return the experiments of these ids or aliases, each once."""
    found: dict[str, Experiment] = {}
    for name in names:
        if name not in EXPERIMENTS and name not in ALIASES:
            raise unknown("experiment", name, (*EXPERIMENTS, *ALIASES))
        for each in ALIASES.get(name, (name,)):
            found[each] = EXPERIMENTS[each]
    return [*found.values()]
