"""What a shell offers for the value of an option: names of attacks, defenses, models, data sets.

They stand here as text, and a test compares them with the registries: to import those takes
seconds, and a shell asks at every press of the Tab key.
"""

from collections.abc import Callable

ATTACKS = [
    "auto",
    "adam-cosine",
    "ig-default",
    "lbfgs-l2",
    "lbfgs-cosine",
    "dlg",
    "adam-l1",
    "adam-l2",
    "sgd-cosine",
    "cpl",
    "iga",
    "raced",
    "features",
    "dense-matching",
    "sent-statistics",
    "closed-form",
    "dense-inversion",
    "peeling",
    "early-step",
    "transform-known",
    "transform-drawn",
    "transform-guessed",
    "class-mean",
    "without-random-layers",
    "without-defended-layers",
    "joint-noise",
    "joint-masks",
    "masked",
    "masked-rounds",
    "likelihood",
    "averaged",
]
DEFENSES = [
    "none",
    "3-1-7+43-18-18",
    "random:count=10",
    "prune:0.95",
    "prune-feedback:0.99",
    "gaussian:1e-2",
    "laplacian:1e-2",
    "clip:1",
    "dp:norm=1,multiplier=1.1",
    "soteria:0.8",
    "precode:k=256,beta=1e-3",
    "dropout:0.5",
]
MODELS = ["resnet20-4", "convnet", "convnet-9", "lenet", "mlp", "vit"]
DATA_SETS = [
    "cifar10",
    "cifar100",
    "fashion-mnist",
    "tiny-imagenet",
    "medical-mnist",
    "fashion-mnist-mini",
]


def _offer(names: list[str]) -> Callable[[str], list[str]]:
    """Return the completion of a word from these names; of other words a shell offers files."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


attacks, defenses = _offer(ATTACKS), _offer(DEFENSES)
models, data_sets = _offer(MODELS), _offer(DATA_SETS)
