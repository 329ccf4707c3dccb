"""What a check says: one line on what it means, one on what to do."""

from dataclasses import asdict, dataclass
from typing import Literal, get_args

from gradveil.core.errors import unknown

Level = Literal["note", "warning", "error"]
"""A note is good to know; a warning says that figures may mislead; with an error nothing can be measured."""


@dataclass(frozen=True)
class Finding:
    """`name` is the check's; `means` and `do` are one line each."""

    level: Level
    name: str
    means: str
    do: str

    def __post_init__(self) -> None:
        if self.level not in get_args(Level):
            raise unknown("level", self.level, get_args(Level))
        for part in ("means", "do"):
            object.__setattr__(self, part, " ".join(getattr(self, part).split()))

    def __str__(self) -> str:
        return f"{self.name}: {self.means}; {self.do}"

    def plain(self) -> dict[str, str]:
        """As plain values, for JSON."""
        return asdict(self)
