"""One quantity measured several times: the values, their mean, and how sure it is."""

import math
from dataclasses import dataclass

from gradveil.core.errors import GradveilError


@dataclass(frozen=True)
class Estimate:
    """`values` are one for each image or batch."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise GradveilError("an estimate needs at least one value")

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / self.n

    @property
    def error(self) -> float | None:
        """The standard error of the mean; None for a single value."""
        if self.n < 2:
            return None
        squares = math.fsum((value - self.mean) ** 2 for value in self.values)
        return math.sqrt(squares / (self.n - 1) / self.n)
