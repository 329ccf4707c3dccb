"""PRECODE's experiments: accuracies, reconstructions with its breakers, and a grid of settings."""

from dataclasses import dataclass, replace

from gradveil.defenses import Precode, parse
from gradveil.papers.cells import Audited, Trained, Training
from gradveil.papers.experiments import FEW, Entry, Experiment, Size
from gradveil.papers.switches import AS_PUBLISHED, Switches

PRECODE_ROWS = ("none", "gaussian:0.001", "prune:0.95", "precode")
PRECODE_BREAKERS = {
    "gaussian:0.001": ("likelihood",),
    "prune:0.95": ("masked",),
    "precode": ("without-random-layers", "joint-noise"),
}


SEEDS = 2  # trainings of the rows that a claim compares: one cannot tell a defense from luck
COMPARED = ("none", "precode")


def precode_training(
    data: str, model: str, defense: str, epochs: int = 30, seed: int = 0
) -> Training:
    """Return a training of PRECODE's experiments: small networks, without crop and flip."""
    return Training(data, model, parse(defense), epochs, lr=0.01, augment=False, seed=seed)


@dataclass(frozen=True)
class PrecodeAccuracy(Experiment):
    """Accuracy by epoch of none, noise, pruning and PRECODE."""

    data: tuple[str, ...] = ("cifar10", "cifar100", "medical-mnist")
    models: tuple[str, ...] = ("mlp", "lenet")

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        return tuple(
            Entry(f"{data}, {model}, {row}", Trained(precode_training(data, model, row, seed=seed)))
            for data in self.data
            for model in self.models
            for row in PRECODE_ROWS
            for seed in range(max(SEEDS, size.seeds) if row in COMPARED else 1)
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
