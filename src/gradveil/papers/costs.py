"""How long the parts of an experiment take on one H200 by a process alone, estimated beforehand.

Measured with resnet20-4 on images of 32 x 32: 60 epochs of CIFAR-100 take 84 s; an iteration of an
attack takes 3.9 ms with 32 rows, 5.3 ms with 64 and 27.6 ms with 512. All else is scaled.

`OWN_WEIGHTS` and `FEATURES` are fitted to 12 cells of clients that ran beside other processes. Nine
cells of one step took 1.8 times as long there as is estimated here, and so do these.
"""

from gradveil.attacks import GradientMatching, find
from gradveil.attacks.dense_matching import MatchedFeatures
from gradveil.attacks.lbfgs import LBFGS

TRAINING = 84 / 60 / 50_000  # seconds an image of 32 x 32, resnet20-4
STARTING = 15.0  # seconds: loading, compiling, controls, writing
ITERATION, ROW = 2.2e-3, 0.0497e-3  # seconds: of an iteration, and of each of its rows
SLOW = 1.5  # how much longer full precision takes
SHAM = 32  # images at most of the sham of an attack
MODE = 1.5  # batch norm in train mode beside eval mode, batches of 8: 39.9 and 25.8 ms
OWN_WEIGHTS = {False: 6.0, True: 2.8}
"""A local step of several, with weights for each client, beside a single one, by train mode."""
FEATURES = 0.6  # an iteration that matches features alone, whatever steps a client makes

MODELS = {"resnet20-4": 1.0, "convnet": 1.5, "convnet-9": 1.7, "lenet": 0.15, "mlp": 0.2}
"""Time of a pass beside that of resnet20-4 (a training step: 5.4 and 3.5 ms); others are rough."""

TRAIN_IMAGES = {
    "cifar10": 50_000,
    "cifar100": 50_000,
    "fashion-mnist": 60_000,
    "tiny-imagenet": 10_000,  # of the part that is measured; the whole has ten times as many
    "medical-mnist": 9_600,  # of the part that is measured
    "fashion-mnist-mini": 2_000,
}
SIDES = {"fashion-mnist": 28, "fashion-mnist-mini": 28, "tiny-imagenet": 64, "medical-mnist": 64}


def area(data: str, image_size: int | None) -> float:
    """Return how many pixels an image has, beside 32 x 32."""
    return ((image_size or SIDES.get(data, 32)) / 32) ** 2


def training_seconds(
    data: str, model: str, epochs: int, fraction: float, image_size: int | None
) -> float:
    """Estimate a training; a small network is bound by the start of each step."""
    images = TRAIN_IMAGES.get(data, 50_000) * fraction * epochs
    each = TRAINING * max(0.4, MODELS.get(model, 1.0) * area(data, image_size))
    return STARTING + images * each


def attack_seconds(
    attack: str,
    victims: int,
    model: str,
    scale: float = 1.0,
    steps: int | None = None,
    restarts: int | None = None,
) -> float:
    """Estimate an attack on single images; `scale` is `area` of them."""
    chosen = find(attack)
    if not isinstance(chosen, GradientMatching):
        return 1.0
    inner, slow = 1, 1.0
    if isinstance(chosen.optimizer, LBFGS):
        inner, slow = chosen.optimizer.inner, SLOW
    stages = chosen.race.stages(restarts or chosen.restarts, steps or chosen.steps)
    return sum(
        some * inner * slow * iteration_seconds(rows * victims, model, scale)
        for rows, some in stages
    )


def iteration_seconds(rows: int, model: str, scale: float = 1.0) -> float:
    """Estimate an iteration of so many rows; what it takes by itself is independent of `scale`."""
    weight = MODELS.get(model, 1.0)
    return ITERATION * max(0.5, weight) + ROW * rows * weight * scale


def client_factor(attack: str, local_steps: int, train_mode: bool) -> float:
    """Return how many times longer an attack takes than on a client's one step in eval mode."""
    chosen = find(attack)
    if isinstance(chosen, GradientMatching) and isinstance(chosen.distance, MatchedFeatures):
        return FEATURES
    if local_steps > 1:
        return local_steps * OWN_WEIGHTS[train_mode]
    return MODE if train_mode else 1.0


def score_seconds(policies: int, images: int, rules: int, scale: float = 1.0) -> float:
    """Estimate S_pri: 0.06 s for a policy on 100 images, in bf16."""
    return STARTING + 0.06 * policies * rules * images / 100 * scale
