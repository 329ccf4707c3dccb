"""Deviations as switches: where the published code differs from what an experiment should do."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from gradveil.core.errors import GradveilError, unknown
from gradveil.papers.networks import CIFAR10_CONSTANTS, CONSTANTS, OF_DATA

CHOICES: dict[str, tuple[str, ...]] = {
    "loss": ("whole", "halved"),
    "gradient": ("shared", "clean"),
    "crop": ("yes", "no"),
    "victims": ("alike", "plain"),
    "images": ("drawn", "first"),
    "constants": CONSTANTS,
    "fashion-size": ("28", "32"),
    "convnet": ("8", "9"),
    "random": ("mixed", "single", "mean"),
    "gradsim": ("code", "paper"),
}
"""The values of each switch; the first is ours, as it should be."""

RANDOM_SINGLE = "19-1-18"
"""The random policy of the replication, in all of its tables."""


@dataclass(frozen=True)
class Switches:
    """One value for each of `CHOICES`; DEVIATIONS.md explains them.

    `loss`: the training loss as it is, or halved. `gradient`: attack what is shared, or the clean
    gradient of a model trained under a gradient defense. `crop`: crop and flip before the policy,
    or not. `victims`: without a policy they are cropped and flipped as with one, or left plain.
    `images`: drawn over all classes, or the first of the test split. `constants`: of the data
    set, or CIFAR-10's for CIFAR-100. `fashion_size`: pixels of Fashion-MNIST. `convnet`: its
    layers. `random`: each image by one of ten policies, the replication's single policy, or the
    mean over ten policies with a model each. `gradsim`: S_pri by the code's rule or the paper's.
    """

    loss: str = "whole"
    gradient: str = "shared"
    crop: str = "yes"
    victims: str = "alike"
    images: str = "drawn"
    constants: str = OF_DATA
    fashion_size: str = "28"
    convnet: str = "8"
    random: str = "mixed"
    gradsim: str = "code"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name.replace("-", "_"))
            if value not in choices:
                raise unknown(f"value of switch {name}", value, choices)

    @property
    def changed(self) -> dict[str, str]:
        """The switches that are not as ours are."""
        ours = Switches()
        return {
            each.name.replace("_", "-"): getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) != getattr(ours, each.name)
        }


OURS = Switches()
AS_PUBLISHED = Switches(
    loss="halved",
    gradient="clean",
    victims="plain",
    images="first",
    constants=CIFAR10_CONSTANTS,
    fashion_size="32",
    random="single",
)
VARIANTS = {"published": AS_PUBLISHED, "ours": OURS}
"""The two ways in which an experiment is run: as the published code does, and as it should be."""


def switched(switches: Switches, settings: Iterable[str]) -> Switches:
    """Return the switches with some set, each given as NAME=VALUE."""
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise GradveilError(f"switch {text!r}: write NAME=VALUE, such as loss=halved")
        if name not in CHOICES:
            raise unknown("switch", name, CHOICES)
        switches = replace(switches, **{name.replace("-", "_"): value})
    return switches
