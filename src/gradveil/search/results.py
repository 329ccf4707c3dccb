"""What a search found: its policies with what was measured of them, and where they are confirmed."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradveil.core.errors import GradveilError
from gradveil.core.files import write_text
from gradveil.models.checkpoints import read_settings
from gradveil.scores.scorer import Estimate
from gradveil.search.confirm import FEWEST
from gradveil.search.folders import POLICIES, RESULT, SEARCH, TRIALS, remove_parts
from gradveil.search.job import SearchJob
from gradveil.search.loop import RaceSavings
from gradveil.search.setup import Setup
from gradveil.search.space import Finished, functions
from gradveil.transforms import Policy
from gradveil.transforms.policy import FORMAT

SEARCH_FORMAT = "gradveil search 1"


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
        estimates = {
            name: Estimate(tuple(values)) for name, values in trial.values.items() if values
        }
        return cls(
            trial.number,
            trial.policy,
            trial.state,
            {name: Quantity(e.mean, e.error, e.n) for name, e in estimates.items()},
        )

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
    saving: RaceSavings | None  # of a race
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
            "format": SEARCH_FORMAT,
            "settings": dict(self.settings),
            "trials": [one.plain() for one in self.trials],
            "kept": [one.number for one in self.kept],
            "front": [one.number for one in self.front],
            "best": str(self.best),
            "hybrid": None if self.hybrid is None else str(self.hybrid),
            "no_hybrid": self.no_hybrid,
            "saving": None
            if self.saving is None
            else asdict(self.saving) | {"share": self.saving.share},
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
            raise GradveilError(
                f"the search in {out} has not ended: there is no {RESULT} in it; run it again to go on"
            ) from None
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise GradveilError(
                f"{path} is damaged ({type(error).__name__}): delete it and run the search again"
            ) from None

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
            saving
            and RaceSavings(
                **{name: saving[name] for name in ("dropped", "scored", "all", "unjudged")}
            ),
            tuple(plain["notes"]),
            plain["study"],
            plain["storage"],
            plain["confirmed"],
            tuple(plain["words"]),
        )


def _pick(numbered: Mapping[int, Found], numbers: Sequence[int]) -> tuple[Found, ...]:
    return tuple(numbered[number] for number in numbers)


DIGITS = 6  # of a mean: where a search was stopped can change the last bits of its figures
HEADER = """\
# Transformation policies found by `gradveil search`. To use one:
#   gradveil train --defense policies.toml          the hybrid
#   gradveil audit --defense policies.toml:best     the best single policy; a number is a rank, such as policies.toml:3
#   Policy.load("policies.toml")                    in Python
"""


def write_files(result: SearchResult) -> None:
    """search.json comes last: where it is, everything is."""
    remove_parts(result.out)
    write_text(result.out / POLICIES, policies_text(result))
    write_text(result.out / TRIALS, trials_text(result))
    write_text(result.out / RESULT, json.dumps(result.plain(), allow_nan=False) + "\n")


def policies_text(result: SearchResult) -> str:
    head: dict[str, Any] = {"format": FORMAT, "best": str(result.best)}
    head |= (
        {"no_hybrid": result.no_hybrid} if result.hybrid is None else {"hybrid": str(result.hybrid)}
    )
    parts = [HEADER + _table(head), "[search]\n" + _table(result.settings)]
    parts += [
        "[[policy]]\n" + _table(_entry(rank, one)) for rank, one in enumerate(result.kept, start=1)
    ]
    return "\n".join(parts)


def trials_text(result: SearchResult) -> str:
    names = list(dict.fromkeys(name for one in result.trials for name in one.quantities))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(
        [
            "trial",
            "policy",
            "state",
            *(f"{name}_{part}" for name in names for part in ("mean", "error", "n")),
        ]
    )
    for one in result.trials:
        known = [one.quantities.get(name) for name in names]
        cells = [
            cell
            for q in known
            for cell in (
                ("", "", 0) if q is None else (q.mean, "" if q.error is None else q.error, q.n)
            )
        ]
        table.writerow([one.number, str(one.policy), one.state, *cells])
    return text.getvalue()


def _entry(rank: int, one: Found) -> dict[str, Any]:
    return {"rank": rank, "policy": str(one.policy), "trial": one.number} | dict(one.quantities)


def _table(values: Mapping[str, Any]) -> str:
    """Lines of TOML, which has no word for None: such values are left out."""
    return "".join(
        f"{name} = {_toml(value)}\n" for name, value in values.items() if value is not None
    )


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case Quantity():
            parts = {
                "mean": _rounded(value.mean),
                "error": None if value.error is None else _rounded(value.error),
                "n": value.n,
            }
            return (
                "{"
                + ", ".join(
                    f"{name} = {part!r}" for name, part in parts.items() if part is not None
                )
                + "}"
            )
        case _:
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


SURE = 0.999  # a race that keeps the same ten, as `race` has measured


def notes(
    setup: Setup,
    checkpoint: Path,
    done: Sequence[Finished],
    ranked: Sequence[Policy],
    kept: int,
    hybrid: Policy | None,
) -> tuple[str, ...]:
    """All of them. The first `kept` of those ranked are kept."""
    job, test = setup.job, setup.test
    return (
        *accuracy_note(checkpoint, len(test.classes)),
        *setup.chosen.notes,
        *threshold_note(job, done),
        *job_notes(job, kept),
        *idle_note(ranked[:kept], test.channels),
        *hybrid_note(ranked, kept, hybrid, job.race),
    )


def accuracy_note(checkpoint: Path, classes: int) -> tuple[str, ...]:
    """What the semi-trained model has learned, where its file says so: one that learned nothing makes all scores doubtful."""
    accuracy = read_settings(checkpoint).get("test_accuracy")
    if not isinstance(accuracy, float):
        return ()
    said = f"the semi-trained model has a test accuracy of {accuracy:.1%}"
    doubt = f", chance is {1 / classes:.1%}: its scores say little; train another way and give it as the checkpoint"
    return (said + (doubt if accuracy < 2 / classes else ""),)


def threshold_note(job: SearchJob, done: Sequence[Finished]) -> tuple[str, ...]:
    """Where the threshold filtered nothing: scores depend on the number of classes, and -85 was chosen for a hundred."""
    seen = [one.mean("accuracy") for one in done if "accuracy" in one.values]
    if not seen or min(seen) < job.threshold:
        return ()
    return (
        f"the accuracy threshold {job.threshold:g} dropped no policy: their scores were {min(seen):.1f} to {max(seen):.1f}",
    )


def job_notes(job: SearchJob, kept: int) -> tuple[str, ...]:
    """What these settings leave open."""
    notes = []
    if kept < job.keep:
        notes.append(f"the front holds {kept} policies that qualify, {job.keep} were wanted")
    if job.race and job.race_confidence < SURE:
        notes.append(
            f"raced at a confidence of {job.race_confidence:g}: a search without a race may keep others"
        )
    if job.audit_images < FEWEST:
        notes.append(
            f"{job.audit_images} audit images: no test can tell two policies apart on fewer than {FEWEST}"
        )
    return tuple(notes)


def idle_note(kept: Sequence[Policy], channels: int = 3) -> tuple[str, ...]:
    """Images as they are may leak least; nobody should take such a policy for a defence."""
    idle = [str(policy) for policy in kept if not any(functions(policy, channels))]
    return (f"kept, but no defence, since it changes no image: {', '.join(idle)}",) if idle else ()


def hybrid_note(
    ranked: Sequence[Policy], kept: int, hybrid: Policy | None, race: bool = False
) -> tuple[str, ...]:
    """Where a member stands that is not among the policies kept, and why; after a race it might have been another."""
    members = [Policy((member,)) for member in (hybrid.members if hybrid else ())]
    notes = []
    for member in members:
        place = ranked.index(member)
        if place < kept:
            continue
        others = [policy for policy in ranked[:place] if policy not in members]
        why = (
            ": others before it share a function with a member or change nothing" if others else ""
        )
        doubt = "; one that the race dropped might have stood before it" if race else ""
        notes.append(
            f"member {member} of the hybrid ranks {place + 1} of {len(ranked)}{why}{doubt}"
        )
    return tuple(notes)
