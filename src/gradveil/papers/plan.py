"""The plan: which cells of some experiments are done, which are missing, and in which order.

Cells of the same model form a group, since weights may be lost between two sittings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gradveil.papers.cells import Cell, Training, Workspace
from gradveil.papers.experiments import Entry, Experiment, Size
from gradveil.papers.records import Records
from gradveil.papers.switches import Switches


@dataclass(frozen=True)
class Part:
    """An experiment in one way, with its cells: `way` is published or ours."""

    experiment: Experiment
    way: str
    entries: tuple[Entry, ...]

    @property
    def name(self) -> str:
        """The experiment and the way."""
        return f"{self.experiment.id}, {self.way}"


@dataclass(frozen=True)
class Group:
    """A training and the missing cells that need it, in the order in which they are done."""

    training: Training
    cells: tuple[Cell, ...]

    def seconds(self, workspace: Workspace) -> float:
        """Return the time for what is left of it on an H200, estimated."""
        return training_left(self.training, workspace) + sum(
            cell.left(workspace) for cell in self.cells
        )


@dataclass(frozen=True)
class Plan:
    """What is done, what is missing, and what cannot be done because its data is not there."""

    parts: tuple[Part, ...]
    done: frozenset[str]
    absent: frozenset[str]
    groups: tuple[Group, ...]

    def left(self, part: Part) -> list[Cell]:
        """Return the cells of a part that are missing and can be done."""
        every = {entry.cell.key: entry.cell for entry in part.entries}
        return [cell for key, cell in every.items() if key not in self.done | self.absent]

    def seconds(self, workspace: Workspace) -> float:
        """Return the time for all that is missing on an H200, estimated."""
        return sum(group.seconds(workspace) for group in self.groups)


def training_left(training: Training, workspace: Workspace) -> float:
    """Return the time for a training on an H200, estimated; 0 where its weights are there."""
    return 0.0 if training.there(workspace) else training.seconds


def estimate(cells: Sequence[Cell], workspace: Workspace) -> float:
    """Return the time for some cells and their trainings on an H200, estimated."""
    trainings = {cell.training.key: cell.training for cell in cells}
    return sum(training_left(each, workspace) for each in trainings.values()) + sum(
        cell.left(workspace) for cell in cells
    )


def whole(cells: Sequence[Cell]) -> float:
    """Return the time for some cells and their trainings from the start, estimated."""
    trainings = {cell.training.key: cell.training for cell in cells}
    return sum(each.seconds for each in trainings.values()) + sum(cell.seconds for cell in cells)


def make_parts(
    experiments: Sequence[Experiment], ways: dict[str, Switches], size: Size, workspace: Workspace
) -> tuple[Part, ...]:
    """Return each experiment in each of its ways."""
    return tuple(
        Part(experiment, way, experiment.planned(switches, size, workspace))
        for experiment in experiments
        for way, switches in ways.items()
        if way in experiment.variants
    )


def make_plan(parts: Sequence[Part], records: Records, workspace: Workspace) -> Plan:
    """Order what is missing: the cheapest experiment first, and all cells of a model together."""
    every = {entry.cell.key: entry.cell for part in parts for entry in part.entries}
    done = frozenset(key for key, cell in every.items() if records.done(cell))
    data = {cell.data: workspace.has(cell.data) for cell in every.values()}
    absent = frozenset(
        key for key, cell in every.items() if key not in done and not data[cell.data]
    )
    plan = Plan(tuple(parts), done, absent, ())
    cheapest = sorted(parts, key=lambda part: estimate(plan.left(part), workspace))
    ranks: dict[str, int] = {}
    for rank, part in enumerate(cheapest):
        for cell in plan.left(part):
            ranks.setdefault(cell.key, rank)
    groups: dict[str, list[Cell]] = {}
    for key in ranks:
        groups.setdefault(every[key].training.key, []).append(every[key])
    ordered = sorted(
        groups.values(), key=lambda cells: (min(ranks[c.key] for c in cells), cells[0].training.key)
    )
    made = tuple(
        Group(cells[0].training, tuple(sorted(cells, key=lambda c: (ranks[c.key], c.seconds))))
        for cells in ordered
    )
    return Plan(tuple(parts), done, absent, made)
