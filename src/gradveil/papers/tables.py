"""Tables of the experiments: what was published, beside ours as published and as it should be."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from statistics import median

from gradveil.attacks import find
from gradveil.attacks.distances import Cosine
from gradveil.audits.records import Record, by_update
from gradveil.audits.results import CaseResult, Row, make_row
from gradveil.audits.stage import GRADIENTS
from gradveil.papers.cells import Audited, Trained
from gradveil.papers.experiments import STANDARD, Entry
from gradveil.papers.measurements import Correlated, Layers, Lines, Singles
from gradveil.papers.plan import Part
from gradveil.papers.published import SOURCES, figure
from gradveil.papers.records import Records
from gradveil.papers.searched import Searched
from gradveil.papers.summaries import measurement_lines
from gradveil.scores.lineup import FAR
from gradveil.search.comparisons import AGAINST, CONTROLS, Comparison, confirmation, control
from gradveil.search.comparisons import compare as compare_audits
from gradveil.stats import Summary, holm

FAR_RANK = f"rank_{FAR}"
APART = 10**9  # between the numbers of images of two cells that are pooled
NOTHING = "-"  # in a table: there is none, or it is not measured
BOTH = "both ways"  # of a row whose cells are the same in both


@dataclass(frozen=True)
class Table:
    """A table of an experiment: what it shows, its head with units, and its rows."""

    title: str
    head: list[str]
    body: list[list[str]]


def attacks_of(entries: Iterable[Entry]) -> list[str]:
    """Return the attacks of some cells, each once."""
    return [*dict.fromkeys(e.cell.attack for e in entries if isinstance(e.cell, Audited))]


def attack_records(
    entries: Sequence[Entry], records: Records, attack: str, kind: str = "attack"
) -> list[Record]:
    """Return the records of an attack on some cells, pooled; empty where none is done."""
    found: list[Record] = []
    chosen = [e.cell for e in entries if isinstance(e.cell, Audited) and e.cell.attack == attack]
    for number, cell in enumerate(chosen):
        case = records.case(cell)
        name = attack if kind == "attack" else None
        for record in () if case is None else case.of(kind, name):
            # Images of two cells are different victims, even where they have the same number.
            update = record.image if record.update is None else record.update
            shift = APART * number
            found.append(replace(record, image=record.image + shift, update=update + shift))
    return found


def attack_row(
    entries: Sequence[Entry],
    records: Records,
    attack: str,
    *,
    truth: str = "used",
) -> Row | None:
    """Return the figures of an attack on some cells; None where none is done."""
    found = attack_records(entries, records, attack)
    return make_row(found, truth) if found else None


def told_by_gradients(entries: Sequence[Entry], records: Records) -> Row:
    """Return the gradient line-up on some cells: candidates ranked by their own gradients."""
    found = attack_records(entries, records, STANDARD, "ceiling")
    return make_row([record for record in found if record.attack == GRADIENTS], "used")


def accuracies(entries: Sequence[Entry], records: Records) -> list[float]:
    """Return the test accuracies of the trainings among some cells that are done."""
    found = (records.result(e.cell) for e in entries if isinstance(e.cell, Trained))
    return [float(each["accuracy"]) for each in found if each is not None]


def count_tested(entries: Sequence[Entry], records: Records) -> int:
    """Return the number of test images of a training among some cells that is done."""
    found = (records.result(e.cell) for e in entries if isinstance(e.cell, Trained))
    return next(int(each["test_images"]) for each in found if each is not None)


def rows_of(part: Part | None, row: str) -> list[Entry]:
    """Return the cells of a row."""
    return [] if part is None else [entry for entry in part.entries if entry.row == row]


def compare(ways: Mapping[str, Part], records: Records) -> list[Table]:
    """Return the tables of an experiment, of those rows that are measured."""
    part = next(iter(ways.values()))
    if any(isinstance(e.cell, Lines | Layers | Singles | Correlated) for e in part.entries):
        found = [_measurements(ways, records)]
    elif any(isinstance(e.cell, Searched) for e in part.entries):
        found = _searches(part, records)
    else:
        found = [_beside_published(ways, records), *_lineups(ways, records)]
    return [table for table in found if table.body]


def way_words(way: str) -> str:
    """Write a way of running an experiment."""
    return "as published" if way == "published" else "as it should be"


def _names(ways: Mapping[str, Part]) -> list[str]:
    """Return the rows of an experiment, each once."""
    return [*dict.fromkeys(entry.row for part in ways.values() for entry in part.entries)]


def _tidy(title: str, head: Sequence[str], body: Sequence[Sequence[str]], always: int = 1) -> Table:
    """Return a table without the columns that are empty; `always` are the first, which stay."""
    kept = [k for k in range(len(head)) if k < always or any(cells[k] for cells in body)]
    rows = [[cells[k] or NOTHING for k in kept] for cells in body]
    return Table(title, [head[k] for k in kept], rows)


def _beside_published(ways: Mapping[str, Part], records: Records) -> Table:
    """Show PSNR and accuracy as published and ours, a column for each; accuracy alone else."""
    names, table = _names(ways), next(iter(ways.values())).experiment.table
    columns: dict[str, list[str]] = {}
    known = dict.fromkeys(names, False)
    for unit, quantity in (("PSNR dB", "psnr"), ("accuracy %", "acc")):
        if table is None and quantity == "psnr":
            continue
        ours = {
            way: [_of_row(rows_of(part, name), records, quantity) for name in names]
            for way, part in ways.items()
        }
        if not any(any(cells) for cells in ours.values()):
            continue
        for cells in ours.values():
            known |= {name: True for name, cell in zip(names, cells, strict=True) if cell}
        for source in () if table is None else SOURCES:
            theirs = [_published(str(table), name, source, quantity) for name in names]
            columns[f"{unit}, {source}"] = theirs
        first, *others = ours.values()
        if others and all(cells == first for cells in others):
            columns[f"{unit}, ours {BOTH}"] = first
        else:
            columns |= {f"{unit}, ours {way_words(way)}": ours[way] for way in ours}
    body = [
        [name, *(cells[k] for cells in columns.values())]
        for k, name in enumerate(names)
        if known[name]
    ]
    usual = {attacks[0] for part in ways.values() for attacks in _attacks(part) if attacks}
    told = usual.pop() if len(usual) == 1 else "the row's attack"
    title = "Test accuracy, a figure for each training"
    if any(head.startswith("PSNR") for head in columns):
        title = f"PSNR of {told}, mean ± standard deviation, and test accuracy"
    return _tidy(title, ["case", *columns], body)


def _attacks(part: Part) -> list[list[str]]:
    """Return the attacks of each row of an experiment."""
    return [attacks_of(rows_of(part, name)) for name in _names({part.way: part})]


def _of_row(entries: Sequence[Entry], records: Records, quantity: str) -> str:
    """Write the PSNR of a row's first attack, or the accuracies of its trainings."""
    if quantity == "acc":
        return ", ".join(f"{100 * value:.1f}" for value in accuracies(entries, records))
    attacks = attacks_of(entries)
    row = attack_row(entries, records, attacks[0]) if attacks else None
    return "" if row is None else _level(row.psnr)


def _published(table: str, row: str, source: str, quantity: str) -> str:
    value, std = (figure(table, row, source, name) for name in (quantity, "std"))
    if value is None:
        return ""
    if quantity == "acc":
        return f"{value:.1f}"
    return f"{value:.2f}" + (f" ± {std:.2f}" if std else "")


def _level(psnr: Summary) -> str:
    """Write a PSNR as mean ± standard deviation; empty where there is none."""
    wide = "" if psnr.std is None else f" ± {psnr.std:.2f}"
    return "" if psnr.mean is None else f"{psnr.mean:.2f}{wide}"


def _lineups(ways: Mapping[str, Part], records: Records) -> list[Table]:
    """Show each attack with its line-up, the controls beside it, and its likeness, by way.

    A way whose rows all stand in another's is not shown.
    """
    bodies = {
        way: [
            [name, attack, *cells]
            for name in _names({way: part})
            for attack in attacks_of(rows_of(part, name))
            if (cells := _attacked(rows_of(part, name), records, attack, part.experiment.distanced))
        ]
        for way, part in ways.items()
    }
    found = []
    for number, (way, body) in enumerate(bodies.items()):
        others = [(k, rows) for k, rows in enumerate(bodies.values()) if k != number]
        if not any(
            all(row in rows for row in body) and (rows != body or k > number) for k, rows in others
        ):
            same = {row[1] for _, rows in others for row in rows if row in body}
            found.append(_lineup_table(way, body, same))
    return found


def _lineup_table(way: str, body: list[list[str]], same: set[str]) -> Table:
    """Show the line-ups of a way; the attacks in `same` have the same cells in the other."""
    head = ["case", "attack", "chance", "n", "rank 1 (95%)", "sham", "guess", "bar"]
    head += [f"rank 1, {FAR} px", f"sham, {FAR} px", "PSNR dB", "SSIM", "distance (median)"]
    head += ["originals: rank 1 (95%)", "originals: PSNR dB"]
    title = f"Rank 1 in the line-up, and likeness to the image used, {way_words(way)}"
    if same:
        title += f" (the rows of {' and '.join(sorted(same))}: {BOTH})"
    where = head.index("chance")
    chances = {cells[where] for cells in body}
    if len(chances) == 1 and "" not in chances:
        title += f"; chance {chances.pop()}"
        body = [[*cells[:where], "", *cells[where + 1 :]] for cells in body]
    return _tidy(title, head, body)


def _attacked(
    entries: Sequence[Entry], records: Records, attack: str, distanced: bool
) -> list[str]:
    """Return the figures of an attack on some cells, by the head of `_lineup_table`."""
    made = attack_records(entries, records, attack)
    if not made:
        return []
    row, original = (make_row(made, truth) for truth in ("used", "original"))
    shams = attack_records(entries, records, attack, "sham")
    apart = original.psnr.mean is not None and original.psnr != row.psnr
    ranked = (f"{1 / row.candidates:.0%}", "", rank_one(row))
    return [
        *(ranked if row.candidates else ("", str(row.n), "")),
        *(_first(some) for some in (shams, *_guesses(entries, records, attack))),
        *(_first(some, FAR_RANK) for some in (made, shams)),
        _level(row.psnr),
        _ssim(row),
        median_distance(made) if distanced else "",
        rank_one(original) if apart and original.candidates else "",
        f"{original.psnr.mean:.2f}" if apart else "",
    ]


def _guesses(
    entries: Sequence[Entry], records: Records, attack: str
) -> tuple[list[Record], list[Record]]:
    """Return the records of the guess and of the bar beside an attack on some cells."""
    guesses: list[Record] = []
    bars: list[Record] = []
    for entry in entries:
        case = None
        if isinstance(entry.cell, Audited) and entry.cell.attack == attack:
            case = records.case(entry.cell)
        if case is not None and "guess" in case.settings:
            guesses += case.of("blind", case.settings["guess"]["used"])
            bars += case.of("bar")
    return guesses, bars


def median_distance(found: Sequence[Record]) -> str:
    """Write the median over updates of the cosine distance at which an attack ended.

    Empty where it minimizes another distance, or diverged on half of the updates or more.
    """
    distance = getattr(find(found[0].attack), "distance", None)
    if type(distance) is not Cosine:  # some kinds of it add to it
        return ""
    ended = [update[0].distance for update in by_update(found)]
    middle = median(inf if distance is None else distance for distance in ended)
    return f"{middle:.3f}" if isfinite(middle) else ""


def rank_one(row: Row) -> str:
    """Write rank 1 as a count with its 95% interval over updates, or a dash without a line-up."""
    if not row.candidates:
        return "-"
    low, high = row.identified_bounds
    return f"{row.identified}/{row.n} ({100 * low:.0f} to {100 * high:.0f}%)"


def _first(found: Sequence[Record], rank: str = "rank") -> str:
    """Write rank 1 as `3/8`; empty where a record lacks it."""
    hits = count_first(found, rank)
    return "" if hits is None else f"{hits}/{len(found)}"


def count_first(found: Sequence[Record], rank: str = "rank") -> int | None:
    """Count the images that have rank 1, by the score of this name; None if a record lacks it."""
    ranks = [record.scores["used"].get(rank) for record in found if record.ok]
    return ranks.count(1) if ranks and None not in ranks else None


def _measurements(ways: Mapping[str, Part], records: Records) -> Table:
    """Show what measurements gave, a column for each way."""
    found: dict[str, dict[str, str]] = {}
    for way, part in ways.items():
        for entry in part.entries:
            for quantity, value in measurement_lines(entry, records):
                found.setdefault(quantity, {})[way] = value
    body = [[quantity, *(each.get(way, "") for way in ways)] for quantity, each in found.items()]
    return _tidy(
        "Measured, ± one standard deviation or with 95% intervals",
        ["quantity", *(f"ours {way_words(w)}" for w in ways)],
        body,
    )


def _searches(part: Part, records: Records) -> list[Table]:
    """Show the audits of searches with their controls, and the tests of their policies.

    p-values are corrected for all of the tests.
    """
    audits: list[list[str]] = []
    tests: list[tuple[list[str], Comparison]] = []
    for entry in part.entries:
        assert isinstance(entry.cell, Searched)
        for model, rows in records.confirmed(entry.cell).items():
            for name, case in rows.items():
                audit = confirmation(case)
                row = next(r for r in audit.rows if (r.kind, r.truth) == ("attack", "used"))
                where = [entry.row, model, name if name in AGAINST else case.defense]
                beside = (control(audit, each) for each in CONTROLS)
                guesses = case.of("blind", case.settings["guess"]["used"])
                audits.append(
                    [
                        *(*where, rank_one(row), _first(guesses)),
                        *("" if each is None else each.lineup for each in beside),
                        *(_level(row.psnr), _ssim(row)),
                    ]
                )
                found = {} if name in AGAINST else rank_tests(rows, name)
                tests += [([*where, other], test) for other, test in found.items()]
    adjusted = holm([p for _, test in tests for p in (test.less, test.more)])
    compared = [
        [*where, *(f"{p:.3g}" for p in adjusted[2 * k : 2 * k + 2])]
        for k, (where, _) in enumerate(tests)
    ]
    where = ["search", "model", "policy"]
    head = [*where, "rank 1 (95%)", "guess", *CONTROLS.values(), "PSNR dB", "SSIM"]
    return [
        _tidy("Audits of the policies, with their controls", head, audits, always=len(where)),
        Table(
            f"Exact sign tests of rank 1, with Holm's correction for these {len(adjusted)}",
            [*where, "against", "p of fewer", "p of more"],
            compared,
        ),
    ]


def _ssim(row: Row) -> str:
    """Write a mean SSIM; empty where there is none."""
    return "" if row.ssim.mean is None else f"{row.ssim.mean:.2f}"


def rank_tests(rows: Mapping[str, CaseResult], name: str) -> dict[str, Comparison]:
    """Compare rank 1 of a search's policy with that of none and of random policies."""
    found = {}
    for other in AGAINST:
        both = compare_audits(confirmation(rows[name]), confirmation(rows[other]))
        found[other] = next(test for test in both if test.measure == "lineup")
    return found
