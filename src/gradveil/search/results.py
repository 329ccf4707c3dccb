"""The result of a search: its policies, what was measured of them, and the files that hold both."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from rich.box import SIMPLE_HEAD
from rich.table import Table

from gradveil.core.errors import GradveilError, unknown
from gradveil.core.files import MissingFileError, remove_unfinished, shown, write_text
from gradveil.core.formats import FoundPolicy, Quantity, Savings, SearchFile, SearchSettings
from gradveil.core.reading import check_format, convert, read_json
from gradveil.core.text import SafeConsole, as_html, html_table, on_one_line
from gradveil.core.toml import toml_lines
from gradveil.scores.scorer import Estimate
from gradveil.search.job import FOLDER, RESULT
from gradveil.search.space import FinishedTrial
from gradveil.transforms import Policy
from gradveil.transforms.policy import FORMAT

SEARCH_FORMAT = "gradveil search 1"
POLICIES = "policies.toml"
TRIALS = "trials.csv"

HEADS = {
    "over_blind": "over blind, dB",
    "ssim": "SSIM",
    "lineup": "rank 1",
    "identified": "identified",  # by searches of version 0.1.0
    "privacy": "S_pri",
    "accuracy": "S_acc",
}
SHARES = ("lineup", "identified")
DIGITS = 6  # of a mean: where a search was stopped can change the last bits of its figures
HEADER = """\
# Transformation policies found by `gradveil search`. To use one:
#   gradveil train --defense policies.toml          the hybrid
#   gradveil audit --defense policies.toml:best     the best single policy
#   gradveil audit --defense policies.toml:3        the third best: a number is a rank
#   Policy.load("policies.toml")                    in Python
"""
SCORED = """\
# Digests of the images that scores used: an audit of these policies attacks others.
[images]
"""
MOST = 256 << 20  # bytes of search.json: about 400 for a trial
WIDTH = 100  # columns of the table in a terminal


@dataclass(frozen=True)
class TriedPolicy:
    """The policy of a finished trial, and the means of what was measured of it."""

    number: int
    policy: Policy
    state: str  # scored, inaccurate, or dropped by the race
    quantities: Mapping[str, Quantity]

    @classmethod
    def of(cls, trial: FinishedTrial[Policy]) -> "TriedPolicy":
        estimates = {
            name: Estimate(tuple(values)) for name, values in trial.values.items() if values
        }
        return cls(
            trial.number,
            trial.tried,
            trial.state,
            {name: Quantity(e.mean, e.error, e.n) for name, e in estimates.items()},
        )

    def plain(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "policy": str(self.policy),
            "state": self.state,
            "quantities": to_builtins(self.quantities),
        }

    @classmethod
    def read(cls, found: FoundPolicy, scored: tuple[str, ...] = ()) -> "TriedPolicy":
        """Return a trial of search.json; `scored` are digests of the images its score used."""
        for name in found.quantities:
            if name not in HEADS:
                raise unknown(f"quantity of trial {found.number}", shown(name), HEADS)
        policy = replace(Policy.parse(found.policy), scored_on=scored)
        return cls(found.number, policy, found.state, found.quantities)


@dataclass(frozen=True, repr=False)
class SearchResult:
    """The policies of a search, with the audits that confirm them.

    `kept` are the policies that qualified, lowest leakage first; `front` those that NSGA-II found,
    else empty. It shows itself as a table of the policies kept, in a terminal and in a notebook.
    """

    out: Path
    settings: Mapping[str, Any]
    trials: tuple[TriedPolicy, ...]
    kept: tuple[TriedPolicy, ...]
    front: tuple[TriedPolicy, ...]
    hybrid: Policy | None
    no_hybrid: str  # why there is none
    saving: Savings | None  # of a race
    notes: tuple[str, ...]
    study: str
    storage: str
    confirmed: Mapping[str, Mapping[str, str]]  # by model and row: the policy that was audited
    words: tuple[str, ...]  # what the audits say
    scored: tuple[str, ...] = ()  # short digests of the images that scores used

    @property
    def best(self) -> Policy:
        return self.kept[0].policy

    def states(self, state: str) -> int:
        """Count the trials that ended in this state."""
        return sum(trial.state == state for trial in self.trials)

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each trial, as in trials.csv."""
        try:
            pandas = import_module("pandas")
        except ImportError:
            raise GradveilError("to_pandas needs pandas: pip install pandas") from None
        head, *rows = _trials(self)
        return pandas.DataFrame(rows, columns=head)

    def __repr__(self) -> str:
        heads, rows = policy_cells(self.kept)
        table = Table(*heads, box=SIMPLE_HEAD, show_edge=False, padding=0)
        for cells in rows:
            table.add_row(*cells)
        text = io.StringIO()
        console = SafeConsole(file=text, width=WIDTH, color_system=None)
        console.print(table)
        lines = [line.rstrip() for line in text.getvalue().splitlines()]
        return "\n".join(map(on_one_line, [self._title, *lines, *self._about]))

    def _repr_html_(self) -> str:
        """Return the same table for a notebook."""
        heads, rows = policy_cells(self.kept)
        heads = [head.replace("\n", ", ") for head in heads]
        about = "".join(f"<p>{as_html(line)}</p>" for line in self._about)
        return html_table(heads, rows, self._title) + about

    @property
    def _title(self) -> str:
        of = f"{self.settings.get('model')} on {self.settings.get('data')}"
        return f"{len(self.kept)} of {len(self.trials)} policies kept: {of}"

    @property
    def _about(self) -> list[str]:
        hybrid = f"Hybrid: {self.hybrid}." if self.hybrid else f"No hybrid: {self.no_hybrid}."
        return [hybrid, *self.words]

    def plain(self) -> dict[str, Any]:
        """Return values for JSON; kept policies and the front are numbers of trials."""
        saving = self.saving
        return {
            "format": SEARCH_FORMAT,
            "settings": dict(self.settings),
            "trials": [trial.plain() for trial in self.trials],
            "kept": [trial.number for trial in self.kept],
            "front": [trial.number for trial in self.front],
            "best": str(self.best),
            "hybrid": None if self.hybrid is None else str(self.hybrid),
            "no_hybrid": self.no_hybrid,
            "saving": None if saving is None else to_builtins(saving) | {"share": saving.share},
            "notes": list(self.notes),
            "study": self.study,
            "storage": self.storage,
            "confirmed": {model: dict(rows) for model, rows in self.confirmed.items()},
            "words": list(self.words),
            "scored": list(self.scored),
        }

    def write(self) -> None:
        """Write the three files. search.json comes last: where it is, everything is."""
        remove_unfinished(self.out, (".*.part",))
        write_text(self.out / POLICIES, policies_text(self))
        write_text(self.out / TRIALS, trials_text(self))
        write_text(self.out / RESULT, json.dumps(self.plain(), allow_nan=False) + "\n")

    @classmethod
    def read(cls, out: Path) -> "SearchResult":
        """Read the folder of a search that has ended."""
        path = out / RESULT
        FOLDER.read(out)
        try:
            found = read_json(path, SearchFile, most=MOST)
            check_format(found.format, SEARCH_FORMAT, path)
            convert(found.settings, SearchSettings, f"{path}: settings")
            return cls._of(out, found)
        except MissingFileError:
            raise GradveilError(
                f"the search in {out} has not ended: there is no {RESULT} in it; run it again to "
                "go on"
            ) from None
        except GradveilError as error:
            problem = str(error).removeprefix(f"{shown(path)}: ")
            raise GradveilError(
                f"{shown(path)} is damaged ({problem}): delete it and run the search again"
            ) from None

    @classmethod
    def _of(cls, out: Path, found: SearchFile) -> "SearchResult":
        scored = tuple(found.scored)
        trials = tuple(TriedPolicy.read(each, scored) for each in found.trials)
        numbered = {trial.number: trial for trial in trials}
        if len(numbered) < len(trials):
            raise GradveilError("trials: a number is there twice")
        for name, numbers in (("kept", found.kept), ("front", found.front)):
            named = [numbered[number].quantities for number in numbers if number in numbered]
            if len(named) < len(numbers) or len({*numbers}) < len(numbers):
                raise GradveilError(f"{name}: expected numbers of trials, each once")
            if any(quantities.keys() != named[0].keys() for quantities in named):
                raise GradveilError(f"{name}: trials with other quantities")
        for model, rows in found.confirmed.items():
            if absent := [row for row in ("none", "random", "single") if row not in rows]:
                raise GradveilError(f"confirmed.{shown(model)}.{absent[0]}: missing")
        return cls(
            out,
            found.settings,
            trials,
            tuple(numbered[number] for number in found.kept),
            tuple(numbered[number] for number in found.front),
            None if found.hybrid is None else replace(Policy.parse(found.hybrid), scored_on=scored),
            found.no_hybrid,
            found.saving,
            tuple(found.notes),
            found.study,
            found.storage,
            found.confirmed,
            tuple(found.words),
            scored,
        )


def policy_cells(policies: Sequence[TriedPolicy]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of a table of policies: means with errors, and n in the heads."""
    names = sorted(policies[0].quantities, key=list(HEADS).index)
    heads = [f"{HEADS[name]}\nn {policies[0].quantities[name].n}" for name in names]
    rows = [
        [
            str(rank),
            str(tried.policy),
            str(tried.number),
            *(tried.quantities[name].text(share=name in SHARES) for name in names),
        ]
        for rank, tried in enumerate(policies, start=1)
    ]
    return ["", "policy", "trial", *heads], rows


def trials_text(result: SearchResult) -> str:
    """Return the text of trials.csv: a row for each trial, with mean, error and n of each."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerows(["" if cell is None else cell for cell in row] for row in _trials(result))
    return text.getvalue()


def _trials(result: SearchResult) -> list[list[Any]]:
    names = list(dict.fromkeys(name for trial in result.trials for name in trial.quantities))
    parts = ("mean", "error", "n")
    head = ["trial", "policy", "state", *(f"{name}_{part}" for name in names for part in parts)]
    rows: list[list[Any]] = [head]
    for trial in result.trials:
        cells: list[Any] = [trial.number, str(trial.policy), trial.state]
        for name in names:
            found = trial.quantities.get(name)
            cells += [None, None, 0] if found is None else [found.mean, found.error, found.n]
        rows.append(cells)
    return rows


def policies_text(result: SearchResult) -> str:
    """Return the text of policies.toml: best, hybrid, settings, policies by rank, digests."""
    head: dict[str, Any] = {"format": FORMAT, "best": str(result.best)}
    if result.hybrid is None:
        head |= {"no_hybrid": result.no_hybrid}
    else:
        head |= {"hybrid": str(result.hybrid)}
    parts = [HEADER + toml_lines(head), "[search]\n" + toml_lines(result.settings)]
    for rank, tried in enumerate(result.kept, start=1):
        entry = {"rank": rank, "policy": str(tried.policy), "trial": tried.number}
        parts.append("[[policy]]\n" + toml_lines(entry | _rounded(tried.quantities)))
    if result.scored:
        parts.append(SCORED + toml_lines({"scored": result.scored}))
    return "\n".join(parts)


def _rounded(values: Mapping[str, Quantity]) -> dict[str, dict[str, Any]]:
    """Return quantities as tables, with as many digits as people read."""
    return {
        name: {
            "mean": float(f"{value.mean:.{DIGITS}g}"),
            "error": None if value.error is None else float(f"{value.error:.{DIGITS}g}"),
            "n": value.n,
        }
        for name, value in values.items()
    }
