"""The papers' experiments, run again: verdicts, tables four ways, and what is missing."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gradveil.audits.results import Row
from gradveil.papers.beyond import END, LargerPictures, RealClients
from gradveil.papers.catalog import EXPERIMENTS
from gradveil.papers.cells import Audited, Cell, Workspace
from gradveil.papers.claims import Decision, decide_all
from gradveil.papers.experiments import (
    BEYOND,
    HYBRID,
    NONE,
    OPTIONAL_DATA,
    STANDARD,
    STRONGEST,
    DefenseTable,
    Experiment,
    Size,
)
from gradveil.papers.figures import Stages, draw_figures, find_drawing, find_stages
from gradveil.papers.plan import Part, make_parts, whole
from gradveil.papers.precode import PrecodeAccuracy, PrecodeGrid
from gradveil.papers.published import table_title
from gradveil.papers.records import Records
from gradveil.papers.searched import Searched
from gradveil.papers.switches import VARIANTS
from gradveil.papers.tables import (
    FAR_RANK,
    accuracies,
    attack_records,
    attack_row,
    attacks_of,
    compare,
    count_first,
    median_distance,
    rows_of,
    told_by_gradients,
    way_words,
)
from gradveil.papers.verdicts import INFEASIBLE, MISSING, POINT
from gradveil.search.job import SEMI_TRAINED
from gradveil.stats import EACH, above_chance, holm
from results import distances, searches
from results.records import RECORDS, ROOT, guess, link, mcnemar, p_value, ranked_first, table

LEVEL = 0.05
CLASSES = {"cifar10": 10, "cifar100": 100, "medical-mnist": 6}
LEARNED = 1.5  # times the accuracy of a constant answer: a training with less has learned nothing
FOLDER = RECORDS / "reproduce"
FIGURES = "docs/figures"
NOWHERE = Workspace(Path("no-weights"), Path("no-data"), "cpu")  # so that no machine's files count
STORE = Records((FOLDER,))


@cache
def _parts() -> tuple[Part, ...]:
    """Return every experiment in each of its ways."""
    return make_parts([*EXPERIMENTS.values()], VARIANTS, Size(), NOWHERE)


def _ways(experiment: Experiment) -> dict[str, Part]:
    """Return the ways of an experiment."""
    return {part.way: part for part in _parts() if part.experiment is experiment}


@cache
def _shown() -> tuple[str, ...]:
    """Return the experiments with a cell of their own that is done, or with a figure.

    The cells of the others, as far as they are done, stand in those that share them.
    """
    users: dict[str, set[str]] = {}
    for part in _parts():
        for entry in part.entries:
            if STORE.done(entry.cell):
                users.setdefault(entry.cell.key, set()).add(part.experiment.id)
    alone = {name for names in users.values() if len(names) == 1 for name in names}
    return tuple(
        name
        for name, experiment in EXPERIMENTS.items()
        if name in alone or find_drawing(_ways(experiment)["ours"], STORE) is not None
    )


@cache
def decisions() -> dict[str, Decision]:
    """Return the verdicts on the claims, by name."""
    return {each.name: each for each in decide_all(_parts(), STORE)}


def draw() -> list[Path]:
    """Draw the figures that the sections show."""
    ours = [part for part in _parts() if part.way == "ours"]
    return draw_figures(ours, STORE, ROOT / FIGURES)


def stages() -> Stages:
    """Return rank 1 by stage of training."""
    return find_stages(_ways(EXPERIMENTS["over-training"])["ours"], STORE)


def client(row: str) -> tuple[str, str]:
    """Write rank 1 of the best attack done on a kind of client, and of a guess."""
    entries = rows_of(_ways(EXPERIMENTS["clients"])["ours"], row)
    made = [attack_records(entries, STORE, name) for name in attacks_of(entries)]
    counts = [(count_first(found) or 0, len(found)) for found in made if found]
    cells = [entry.cell for entry in entries if isinstance(entry.cell, Audited)]
    case = next(case for cell in cells if (case := STORE.case(cell)) is not None)
    beside = guess(case)
    return "{} of {}".format(*max(counts)), f"{beside.identified} of {beside.n}"


def client_told(row: str) -> str:
    """Write rank 1 of the gradients of a kind of client, with all else of an update known."""
    told = told_by_gradients(rows_of(_ways(EXPERIMENTS["clients"])["ours"], row), STORE)
    return f"{told.identified} of {told.n}"


def clients_beyond_luck() -> list[tuple[str, Row, float]]:
    """Return the rows of batches that find more than luck, with p by Holm's correction."""
    found = [each for each in _client_rows() if each[1].largest_update > 1]
    adjusted = holm([row.verdict.p_identified for _, row in found])
    return [(*each, p) for each, p in zip(found, adjusted, strict=True) if p < LEVEL]


def searched(row: str) -> dict[str, str]:
    """Write rank 1 of the audits of a search on the semi-trained model, by policy's row."""
    part = _ways(EXPERIMENTS["searches"])["ours"]
    (cell,) = (entry.cell for entry in rows_of(part, row))
    assert isinstance(cell, Searched)
    found = {}
    for name, case in STORE.confirmed(cell)[SEMI_TRAINED].items():
        first = ranked_first(case, STANDARD)
        found[name] = f"{sum(first.values())} of {len(first)}"
    return found


def second_training() -> tuple[str, str]:
    """Write rank 1 of the raced attack at the end of the second training, by both line-ups."""
    part = _ways(EXPERIMENTS["over-training"])["ours"]
    made = attack_records(rows_of(part, f"{NONE}, {END}, seed 1"), STORE, STRONGEST)
    near, far = (f"{count_first(made, rank)} of {len(made)}" for rank in ("rank", FAR_RANK))
    return near, far


def verdicts() -> str:
    """Return the section of the verdicts, with the figures that decide them."""
    told = [each for each in decisions().values() if each.verdict != MISSING]
    body = [[each.name, each.claim, f"**{each.verdict}**"] for each in told]
    parts = [
        "## Verdicts on the claims",
        "Each is at 95%, not corrected for their number.",
        f"- *Infeasible* means that at most {INFEASIBLE:.0%} of images can have rank 1, under an "
        "attack that works without the defense. It does not hold where it must be more. It holds "
        "in part where it is between chance and that, but less than without the defense.\n"
        f"- *Almost nothing* is at most {100 * POINT:.0f} point of accuracy.\n"
        "- A claim of several tables holds where all of them do, and in part where some do and "
        "others do not; *so far* where some are missing.\n"
        "- Rank 1 is by a line-up that finds a picture moved by up to 2 pixels. Shares of trained "
        f"models are lower bounds ({link('The line-up is strict')}).",
        table(["name", "claim", "verdict"], body),
        "What decided:",
        "\n".join(_decided(each) for each in told),
    ]
    return "\n\n".join(parts)


def _decided(decision: Decision) -> str:
    """Write the figures that decided on a claim, with the experiments of that claim."""
    places = [link(name) for name in _shown() if EXPERIMENTS[name].claim == decision.claim]
    head = ", ".join([f"- **{decision.name}**", decision.verdict, *places])
    return "\n".join([head, *(f"    - {figure}" for figure in decision.figures)])


def section() -> str:
    """Return the section of the papers' experiments."""
    every = _cells()
    done = sum(map(STORE.done, every.values()))
    text = (
        "## The papers' experiments, run again\n"
        "Each is run in two ways.\n\n"
        "- *As published*: with the defects of the published code. `DEVIATIONS.md` lists the "
        "switches.\n"
        "- *As it should be*: what is shared is attacked. Victims are drawn over all classes, and "
        "cropped and flipped with a policy and without. For none and the hybrid `raced`, the "
        "stronger attack at the end of training, and its sham stand beside the published attack.\n"
        "\n"
        f"{done} of {len(every)} cells are done ({link('Not measured yet')} lists the others). "
        "`gradveil reproduce ID --data-root DIR`; records `reproduce/`, one folder for each cell. "
        f"They took {_spent(every)}."
    )
    return "\n\n".join([text, *_experiments(beyond=False)])


def beyond() -> str:
    """Return the section of our own experiments."""
    text = "## Beyond the papers\nThese are run in one way, as it should be."
    return "\n\n".join([text, *_experiments(beyond=True)])


def _cells() -> dict[str, Cell]:
    return {entry.cell.key: entry.cell for part in _parts() for entry in part.entries}


def _spent(keys: Mapping[str, Cell]) -> str:
    """Say how many minutes the finished cells took, by device."""
    spent: dict[str, float] = {}
    for key in keys:
        path = FOLDER / key / "cell.json"
        if path.is_file():
            facts = json.loads(path.read_text())
            used = facts["seconds"] + facts["result"].get("training_seconds", 0.0)
            spent[facts["device"]] = spent.get(facts["device"], 0.0) + used
    return ", ".join(f"{seconds / 60:.0f} minutes on {name}" for name, seconds in spent.items())


def _experiments(*, beyond: bool) -> list[str]:
    every = (EXPERIMENTS[name] for name in _shown())
    return [_experiment(each) for each in every if (BEYOND in each.documents) is beyond]


def _experiment(experiment: Experiment) -> str:
    ways = _ways(experiment)
    title = experiment.claim if experiment.table is None else table_title(experiment.table)
    parts = [f"### {experiment.id}\n{title.rstrip('.')}.", f"Agreeing means: {experiment.agrees}"]
    for each in compare(ways, STORE):
        parts += [f"*{each.title}:*", table(each.head, each.body)]
    if experiment.id == "searches":
        parts.append(searches.remarks(ways["ours"], STORE))
    if isinstance(experiment, LargerPictures):
        parts.append(_part_of_the_training_images(ways["ours"]))
    if isinstance(experiment, RealClients):
        parts.append(_of_clients(ways["ours"]))
    if isinstance(experiment, PrecodeAccuracy | PrecodeGrid):
        parts.append(_untaught(ways["ours"]))
    if isinstance(experiment, DefenseTable):
        parts += paired().told()
    if (drawing := find_drawing(ways["ours"], STORE)) is not None:
        path = f"{FIGURES}/{experiment.id}-ours.png"
        parts.append(f"![{experiment.id}, {way_words('ours')}]({path})\n\n*{drawing.caption}*")
    return "\n\n".join(parts)


def _of_clients(part: Part) -> str:
    """Say what the table of clients rests on."""
    done = [e.cell for e in part.entries if isinstance(e.cell, Audited) and STORE.done(e.cell)]
    steps = " and ".join(f"{each:,}" for each in sorted({cell.steps or 0 for cell in done}))
    updates = sorted({cell.images // cell.batch_size for cell in done if cell.batch_size > 1})
    assert not any(cell.sham for cell in done)
    right = {STORE.result(cell)["accuracy"] for cell in done if cell.training.epochs}
    trained = ", ".join(f"{value:.1%}" for value in sorted(right))
    lines = [
        f"Batches: {' and '.join(map(str, updates))} updates a row; intervals are over updates. "
        f"The trained network has {trained} accuracy, one training.",
        _beyond_luck(),
        f"The attacks have {steps} iterations (published: 4,800; of a race those of its last "
        "searches), and were told the labels. No sham. A figure like the guess's says that these "
        "attacks failed, not that nothing leaks.",
        _controls(done),
        "Distance: 1 - cosine to what was shared, in the median over updates; the images used have "
        f"0. {_ended(part)}. Compare rows of one mode and number of steps: {distances.told()}. "
        "A small distance does not show that images were found, nor a large one that none was. "
        "`dense-matching` minimizes no cosine.",
        *_failed(),
    ]
    return "\n".join(f"- {line}" for line in lines)


def _ended(part: Part) -> str:
    """Say how far from what was shared the searches ended in each mode."""
    found: dict[str, list[str]] = {"train mode": [], "eval mode": []}
    for name in dict.fromkeys(entry.row for entry in part.entries):
        entries = rows_of(part, name)
        for attack in attacks_of(entries):
            made = attack_records(entries, STORE, attack)
            found[name.split(", ")[-1]] += [median_distance(made)] if made else []
    spread = {mode: sorted(filter(None, each), key=float) for mode, each in found.items()}
    assert float(spread["train mode"][0]) > 0.1, "a search matched in train mode: say so"
    told = (f"{each[0]} to {each[-1]} in {mode}" for mode, each in spread.items())
    return f"It ends at {' and '.join(told)}: no search in train mode matched what was shared"


def _client_rows() -> list[tuple[str, Row]]:
    """Return the attacks done on clients, each by the words of its row."""
    part, found = _ways(EXPERIMENTS["clients"])["ours"], []
    for name in dict.fromkeys(entry.row for entry in part.entries):
        entries = rows_of(part, name)
        for attack in attacks_of(entries):
            if (made := attack_row(entries, STORE, attack)) is not None:
                found.append((f"{name}, `{attack}`", made))
    return found


def _beyond_luck() -> str:
    """Name the rows of batches that find more than luck."""
    rows = sum(row.largest_update > 1 for _, row in _client_rows())
    told = [
        f"{name} ({row.lineup}, p {p if p.startswith('<') else f'= {p}'})"
        for name, row, value in clients_beyond_luck()
        for p in (p_value(value),)
    ]
    return (
        f"Of the {rows} rows of batches these are shown to find more than luck, over updates and "
        f"with Holm's correction for all of them: {'; '.join(told)}."
    )


def _controls(cells: Sequence[Audited]) -> str:
    """Say what the positive controls of attacks on clients have."""
    found: dict[str, dict[str, bool]] = {}
    for cell in cells:
        case = STORE.case(cell)
        assert case is not None
        for row in case.rows:
            if (row.kind, row.truth) == ("positive", "used"):
                works = row.verdict.p_identified < EACH
                found.setdefault(cell.attack, {})[row.lineup] = works
    told = [
        f"`{attack}` {' or '.join(sorted(each))}"
        + "".join(
            f" ({lineup} is no more than luck)" for lineup, works in each.items() if not works
        )
        for attack, each in found.items()
    ]
    return (
        "Positive controls, single images of an untrained lenet, have rank 1 for "
        f"{', '.join(told)}. An attack whose control is no more than luck says nothing of a row."
    )


def _failed() -> list[str]:
    """Say which attacks on clients failed, and why."""
    return [
        f"{name}: of {row.n} images {row.failures}. They count as not found, which says nothing of "
        "what the update holds."
        for name, row in _client_rows()
        if row.failed
    ]


def _untaught(part: Part) -> str:
    """Name the trainings that end with no more than constant answers have, or little more."""
    told = []
    for row in dict.fromkeys(entry.row for entry in part.entries):
        entries = rows_of(part, row)
        luck = max(1 / CLASSES[entry.cell.data] for entry in entries)
        right = accuracies(entries, STORE)
        told += [f"{row} ({value:.1%})" for value in right if value < LEARNED * luck]
    return (
        "Did not learn, with less than "
        f"{LEARNED:g} times the accuracy of a constant answer: {', '.join(told)}. What defenses "
        "cost such trainings may be a matter of their learning rate."
    )


def _part_of_the_training_images(part: Part) -> str:
    """Say how little a trained network saw, and what its shams reach."""
    cells = [entry.cell for entry in part.entries if isinstance(entry.cell, Audited)]
    trained = [cell for cell in cells if cell.training.epochs and STORE.done(cell)]
    right = {STORE.result(cell)["accuracy"] for cell in trained}
    told = ", ".join(f"{value:.1%}" for value in sorted(right))
    lines = [
        f"The trained network has {told} accuracy: it saw a part of the training images "
        "(`DEVIATIONS.md`, Tiny ImageNet). What holds of one trained on all of them is not told.",
        "Updates of one image whose label is known, batch norm in evaluation mode, one training.",
    ]
    for cell in trained:
        case = STORE.case(cell)
        assert case is not None
        for row in case.rows:
            if (row.kind, row.truth) == ("sham", "used"):
                p = above_chance(row.identified, row.n, 1 / row.candidates)
                lines.append(
                    f"The sham of `{cell.attack}` has {row.lineup}, which chance gives as often "
                    f"or more often in {p:.1%} of cases: {row.n} images are few."
                )
    return "\n".join(f"- {line}" for line in lines)


@dataclass(frozen=True)
class Beside:
    """Rank 1 under a defense beside that without, on the same images."""

    row: str
    accuracy: float
    hits: int
    only_none: int  # images with rank 1 without a defense alone
    only_defense: int
    p: float  # exact McNemar, corrected
    p_hybrid: float | None  # against the hybrid, corrected; None of the hybrid


@dataclass(frozen=True)
class Paired:
    """The raced attack on the same images without a defense and under each."""

    images: int
    none: int
    none_accuracy: float
    defenses: Sequence[Beside]

    @property
    def apart(self) -> list[Beside]:
        """Return the defenses that differ from none."""
        return [each for each in self.defenses if each.p < LEVEL]

    @property
    def gradient(self) -> list[Beside]:
        """Return the defenses but for the hybrid."""
        return [each for each in self.defenses if each.p_hybrid is not None]

    @property
    def hybrid(self) -> Beside:
        """Return the hybrid."""
        return next(each for each in self.defenses if each.p_hybrid is None)

    @property
    def apart_from_hybrid(self) -> int:
        """Count the gradient defenses that differ from the hybrid."""
        return sum(each.p_hybrid is not None and each.p_hybrid < LEVEL for each in self.defenses)

    def told(self) -> list[str]:
        """Return the table, and what follows from it."""
        body = [["none", f"{100 * self.none_accuracy:.1f}", f"{self.none}/{self.images}", *"----"]]
        body += [
            [
                each.row,
                f"{100 * each.accuracy:.1f}",
                f"{each.hits}/{self.images}",
                str(each.only_none),
                str(each.only_defense),
                f"{each.p:.2g}",
                "-" if each.p_hybrid is None else f"{each.p_hybrid:.2g}",
            ]
            for each in self.defenses
        ]
        head = ["defense", "accuracy %", "rank 1 of `raced`", "only none has it"]
        head += ["only the defense has it", "p against none", "p against the hybrid"]
        return [
            f"*On the {self.images} images that all have, as it should be; the raced attacks know "
            "the gradient defenses, and not the hybrid:*",
            table(head, body),
            f"p are of exact McNemar tests, with Holm's correction for {len(self.defenses)} tests "
            f"against none and for {len(self.gradient)} against the hybrid. "
            f"{_listed([each.row for each in self.apart])} from none. The hybrid is apart from "
            f"{self.apart_from_hybrid or 'none'} of the {len(self.gradient)} gradient defenses. "
            "One training and one attacker seed each; the cells of gradient defenses have no sham.",
        ]


@cache
def paired() -> Paired:
    """Compare the raced attack under each defense with that without and under the hybrid."""
    part = _ways(EXPERIMENTS["table-defenses"])["ours"]
    firsts: dict[str, dict[int, bool]] = {}
    for row, cell in part.entries:
        if isinstance(cell, Audited) and cell.attack.startswith(STRONGEST):
            case = STORE.case(cell)
            assert case is not None, f"{cell.key} is missing"
            firsts[row] = ranked_first(case, cell.attack)
    shared = sorted(set.intersection(*({*first} for first in firsts.values())))
    found = {row: [first[image] for image in shared] for row, first in firsts.items()}
    right = {row: accuracies(rows_of(part, row), STORE)[0] for row in found}
    none, hybrid = found.pop(NONE), found[HYBRID]
    ordered = sorted(found, key=lambda row: -sum(found[row]))
    tests = [mcnemar(none, found[row]) for row in ordered]
    adjusted = holm([p for _, _, p in tests])
    others = [row for row in ordered if row != HYBRID]
    beside = holm([mcnemar(hybrid, found[row])[2] for row in others])
    against = dict(zip(others, beside, strict=True))
    defenses = [
        Beside(row, right[row], sum(found[row]), *test[:2], p, against.get(row))
        for row, test, p in zip(ordered, tests, adjusted, strict=True)
    ]
    return Paired(len(shared), sum(none), right[NONE], defenses)


def _listed(rows: Sequence[str]) -> str:
    names = " and ".join(f"`{row}`" for row in rows)
    return f"{names} differ{'s' * (len(rows) == 1)}" if rows else "None differs"


def missing() -> str:
    """Return the section of what is not measured yet."""
    body, optional = [], set()
    for experiment in EXPERIMENTS.values():
        left: dict[str, Cell] = {}
        told = {}
        for part in _ways(experiment).values():
            cells = {entry.cell.key: entry.cell for entry in part.entries}
            absent = {key: cell for key, cell in cells.items() if not STORE.done(cell)}
            optional |= {key for key, cell in absent.items() if cell.data in OPTIONAL_DATA}
            some = {key: each for key, each in absent.items() if each.data not in OPTIONAL_DATA}
            told[part.way] = f"{len(some)} of {len(cells)}" if some else "-"
            left |= some
        if left:
            seconds = whole([*left.values()])
            ways = (told.get(way, "-") for way in VARIANTS)
            body.append([experiment.id, experiment.claim, *ways, f"{seconds / 60:.0f}"])
    head = ["experiment", "claim", *(f"cells {way_words(way)}" for way in VARIANTS)]
    claims = [each.name for each in decisions().values() if each.verdict == MISSING]
    parts = [
        "## Not measured yet",
        "Cells are shared between experiments, so the minutes do not add up "
        "(`gradveil reproduce --status`):",
        table([*head, "GPU minutes, estimated"], body),
    ]
    notes = [f"Without a verdict: {', '.join(claims)}."] if claims else []
    if optional:
        notes.append(
            f"{len(optional)} further cells need {' and '.join(OPTIONAL_DATA)}, whose official "
            "files were not at hand."
        )
    notes += [
        "Attacks that look through the policy (`raced+transform-guessed`) on trained models: they "
        "know more, so the hybrid's rates are those of the attacks named beside them.",
        "The tables marked † again, with line-ups.",
    ]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in notes)])
