"""What a search asks of a score: values for some policies on one block of images at a time."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from gradveil.transforms import Policy


class Scorer(ABC):
    """A score with its model and images. It can be pickled, so that it can travel to another machine.

    Every value is a function of the seed, the policy and the image alone: neither the other policies of a call, nor the
    order of calls, nor the device's memory change it beyond rounding. So work can be split in any way, at any place.
    """

    names: ClassVar[tuple[str, ...]]
    """Of the quantities it gives; a search ranks by the first."""

    unit: int = 1
    """Policies that are best scored together, in one call."""

    @property
    @abstractmethod
    def blocks(self) -> tuple[int, ...]:
        """How many values each block gives. All blocks together are the whole score."""

    @abstractmethod
    def score(self, policies: Sequence[Policy], block: int) -> Mapping[str, Tensor]:
        """By name, (policies, values of the block) in float64 on the CPU."""
