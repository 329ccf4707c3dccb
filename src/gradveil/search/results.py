"""What a search found: its policies with what was measured of them, and where they are confirmed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradveil.core.errors import GradveilError
from gradveil.scores.estimates import Estimate
from gradveil.search.folders import RESULT, SEARCH
from gradveil.search.rankings import Saving
from gradveil.search.trials import Finished
from gradveil.transforms import Policy

FORMAT = "gradveil search 1"


@dataclass(frozen=True)
class Quantity:
    """The mean over n images or batches, and its standard error, which one value alone has not."""

    mean: float
    error: float | None
    n: int


@dataclass(frozen=True)
class Found:
    """A trial's policy and what was measured of it."""

    number: int
    policy: Policy
    state: str  # scored, inaccurate, or dropped by the race
    quantities: Mapping[str, Quantity]

    @classmethod
    def of(cls, trial: Finished) -> "Found":
        estimates = {name: Estimate(tuple(values)) for name, values in trial.values.items() if values}
        return cls(trial.number, trial.policy, trial.state, {name: Quantity(e.mean, e.error, e.n) for name, e in estimates.items()})

    def plain(self) -> dict[str, Any]:
        return asdict(self) | {"policy": str(self.policy)}

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> "Found":
        quantities = {name: Quantity(**one) for name, one in plain["quantities"].items()}
        return cls(plain["number"], Policy.parse(plain["policy"]), plain["state"], quantities)


@dataclass(frozen=True)
class SearchResult:
    """`kept` are the policies that qualified, lowest leakage first. `front` is what NSGA-II found, else empty."""

    out: Path
    settings: Mapping[str, Any]
    trials: tuple[Found, ...]
    kept: tuple[Found, ...]
    front: tuple[Found, ...]
    hybrid: Policy | None
    no_hybrid: str  # why there is none
    saving: Saving | None  # of a race
    notes: tuple[str, ...]
    study: str
    storage: str
    confirmed: Mapping[str, Mapping[str, str]]  # by model and row: the policy that was audited
    words: tuple[str, ...]  # what the audits say

    @property
    def best(self) -> Policy:
        return self.kept[0].policy

    def states(self, state: str) -> int:
        return sum(one.state == state for one in self.trials)

    def plain(self) -> dict[str, Any]:
        """For JSON. Kept policies and the front are named by their trials' numbers."""
        return {
            "format": FORMAT,
            "settings": dict(self.settings),
            "trials": [one.plain() for one in self.trials],
            "kept": [one.number for one in self.kept],
            "front": [one.number for one in self.front],
            "best": str(self.best),
            "hybrid": None if self.hybrid is None else str(self.hybrid),
            "no_hybrid": self.no_hybrid,
            "saving": None if self.saving is None else asdict(self.saving) | {"share": self.saving.share},
            "notes": list(self.notes),
            "study": self.study,
            "storage": self.storage,
            "confirmed": {model: dict(rows) for model, rows in self.confirmed.items()},
            "words": list(self.words),
        }

    @classmethod
    def read(cls, out: Path) -> "SearchResult":
        """From the folder of a search that has ended."""
        path = out / RESULT
        SEARCH.read(out)
        try:
            return cls._of(out, json.loads(path.read_text()))
        except FileNotFoundError:
            raise GradveilError(f"the search in {out} has not ended: there is no {RESULT} in it; run it again to go on") from None
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise GradveilError(f"{path} is damaged ({type(error).__name__}): delete it and run the search again") from None

    @classmethod
    def _of(cls, out: Path, plain: Mapping[str, Any]) -> "SearchResult":
        trials = tuple(Found.read(one) for one in plain["trials"])
        numbered = {one.number: one for one in trials}
        saving = plain["saving"]
        return cls(
            out,
            plain["settings"],
            trials,
            _pick(numbered, plain["kept"]),
            _pick(numbered, plain["front"]),
            None if plain["hybrid"] is None else Policy.parse(plain["hybrid"]),
            plain["no_hybrid"],
            saving and Saving(**{name: saving[name] for name in ("dropped", "scored", "all", "unjudged")}),
            tuple(plain["notes"]),
            plain["study"],
            plain["storage"],
            plain["confirmed"],
            tuple(plain["words"]),
        )


def _pick(numbered: Mapping[int, Found], numbers: Sequence[int]) -> tuple[Found, ...]:
    return tuple(numbered[number] for number in numbers)
