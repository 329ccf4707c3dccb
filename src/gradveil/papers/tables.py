"""Tables of the experiments: what was published, beside ours as published and as it should be."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gradveil.audits.records import Record
from gradveil.audits.results import CaseResult, Row, make_row
from gradveil.papers.cells import Audited, Trained
from gradveil.papers.experiments import STANDARD, Entry, PolicyTable
from gradveil.papers.measurements import Correlated, Layers, Lines, Singles
from gradveil.papers.plan import Part
from gradveil.papers.published import SOURCES, figure
from gradveil.papers.records import Records
from gradveil.papers.searched import Searched
from gradveil.papers.summaries import measurement_lines
from gradveil.scores.lineup import FAR
from gradveil.search.comparisons import AGAINST, Comparison, confirmation
from gradveil.search.comparisons import compare as compare_audits
from gradveil.stats import clopper_pearson

FAR_RANK = f"rank_{FAR}"
APART = 10**9  # between the numbers of images of two cells that are pooled


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


def compare(ways: Mapping[str, Part], records: Records) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of an experiment's table; no rows where nothing is done."""
    part = next(iter(ways.values()))
    if any(isinstance(e.cell, Lines | Layers | Singles | Correlated) for e in part.entries):
        return _compare_measurements(ways, records)
    if any(isinstance(e.cell, Searched) for e in part.entries):
        return _compare_searches(part, records)
    return _compare_rows(ways, records)


def _compare_rows(ways: Mapping[str, Part], records: Records) -> tuple[list[str], list[list[str]]]:
    first = next(iter(ways.values()))
    experiment = first.experiment
    names = [*dict.fromkeys(entry.row for part in ways.values() for entry in part.entries)]
    head = ["row"]
    if experiment.table is not None:
        head += [f"{source}: PSNR, accuracy" for source in SOURCES]
    for way in ways:
        head += [f"{_way(way)}: PSNR dB, SSIM, n", "line-up", "to the original", "accuracy"]
    body, anything = [], False
    for name in names:
        cells = [name]
        if experiment.table is not None:
            cells += [_published(experiment.table, name, source) for source in SOURCES]
        for part in ways.values():
            measured = _measured(rows_of(part, name), records, experiment)
            anything |= any(measured)
            cells += measured
        body.append(cells)
    return _without_empty(head, body) if anything else (head, [])


def _without_empty(
    head: list[str], body: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """Leave out columns and rows that say nothing yet."""
    kept = [k for k in range(len(head)) if any(cells[k] for cells in body)]
    rows = [[cells[k] for k in kept] for cells in body if any(cells[1:])]
    return [head[k] for k in kept], rows


def _way(way: str) -> str:
    return "ours as published" if way == "published" else "ours as it should be"


def _published(table: str, row: str, source: str) -> str:
    level, spread, right = (figure(table, row, source, q) for q in ("psnr", "std", "acc"))
    parts = [] if level is None else [f"{level:.2f}" + (f" ± {spread:.2f}" if spread else "")]
    return ", ".join(parts + ([] if right is None else [f"{right:.1f}%"]))


def _measured(entries: Sequence[Entry], records: Records, experiment: object) -> list[str]:
    """Return four texts: PSNR, SSIM and n; line-ups; to the original; accuracy."""
    levels, lineups, originals = [], [], []
    attacks = attacks_of(entries)
    usual = experiment.attack if isinstance(experiment, PolicyTable) else STANDARD
    for attack in attacks:
        row = attack_row(entries, records, attack)
        if row is None or row.psnr.mean is None:
            continue
        told = "" if len(attacks) == 1 or attack == usual else f"{attack}: "
        like = "-" if row.ssim.mean is None else f"{row.ssim.mean:.2f}"
        wide = "" if row.psnr.std is None else f" ± {row.psnr.std:.2f}"
        levels.append(f"{told}{row.psnr.mean:.2f}{wide}, {like}, {row.n}")
        lineups.append(told + rank_one(row) + _far(attack_records(entries, records, attack)))
        shams = attack_records(entries, records, attack, "sham")
        if shams:
            lineups.append(f"sham {make_row(shams, 'used').lineup}{_far(shams)}")
        other = attack_row(entries, records, attack, truth="original")
        if other is not None and other.psnr.mean is not None and other.psnr != row.psnr:
            originals.append(f"{told}{other.psnr.mean:.2f}, {rank_one(other)}")
    lineups += _guessed(entries, records, attacks[:1]) if lineups else []
    right = accuracies(entries, records)
    each = ", ".join(f"{100 * value:.1f}%" for value in right)
    return ["; ".join(levels), "; ".join(lineups), "; ".join(originals), each]


def _guessed(entries: Sequence[Entry], records: Records, attacks: Sequence[str]) -> list[str]:
    """Write rank 1 of the guess and of the bar beside an attack on some cells."""
    guesses: list[Record] = []
    bars: list[Record] = []
    for entry in entries:
        case = None
        if isinstance(entry.cell, Audited) and entry.cell.attack in attacks:
            case = records.case(entry.cell)
        if case is not None and "guess" in case.settings:
            guesses += case.of("blind", case.settings["guess"]["used"])
            bars += case.of("bar")
    found = [(name, some, count_first(some)) for name, some in (("guess", guesses), ("bar", bars))]
    return [f"{name} {hits}/{len(some)}" for name, some, hits in found if hits is not None]


def rank_one(row: Row) -> str:
    """Write rank 1 as a count with its exact 95% interval, or a dash without a line-up."""
    if not row.candidates:
        return "-"
    low, high = clopper_pearson(row.identified, row.n)
    return f"{row.identified}/{row.n} ({100 * low:.0f} to {100 * high:.0f}%)"


def _far(found: Sequence[Record]) -> str:
    """Write how many have rank 1 in the line-up with the most room, where all records say it."""
    hits = count_first(found, FAR_RANK)
    return "" if hits is None else f", {FAR} px: {hits}"


def count_first(found: Sequence[Record], rank: str = "rank") -> int | None:
    """Count the images that have rank 1, by the score of this name; None if a record lacks it."""
    ranks = [record.scores["used"].get(rank) for record in found if record.ok]
    return ranks.count(1) if ranks and None not in ranks else None


def _compare_measurements(
    ways: Mapping[str, Part], records: Records
) -> tuple[list[str], list[list[str]]]:
    body = []
    for way, part in ways.items():
        for entry in part.entries:
            body += [[_way(way), *line] for line in measurement_lines(entry, records)]
    return ["way", "quantity", "value"], body


SEARCHED = ["search", "model", "policy", "PSNR dB, SSIM, n", "line-up", "p of fewer, of more"]


def _compare_searches(part: Part, records: Records) -> tuple[list[str], list[list[str]]]:
    """Return a row for each audit of a search, with the tests of its policies against others."""
    body = []
    for entry in part.entries:
        assert isinstance(entry.cell, Searched)
        for model, rows in records.confirmed(entry.cell).items():
            for name, case in rows.items():
                row = next(r for r in case.rows if (r.kind, r.truth) == ("attack", "used"))
                tests = {} if name in AGAINST else rank_tests(rows, name)
                told = "; ".join(
                    f"{other}: {test.less:.2g}, {test.more:.2g}" for other, test in tests.items()
                )
                wide = "" if row.psnr.std is None else f" ± {row.psnr.std:.2f}"
                like = "-" if row.ssim.mean is None else f"{row.ssim.mean:.2f}"
                level = "-" if row.psnr.mean is None else f"{row.psnr.mean:.2f}{wide}"
                defense = name if name in AGAINST else case.defense
                figures = [f"{level}, {like}, {row.n}", rank_one(row)]
                body.append([entry.row, model, defense, *figures, told])
    return SEARCHED, body


def rank_tests(rows: Mapping[str, CaseResult], name: str) -> dict[str, Comparison]:
    """Compare rank 1 of a search's policy with that of none and of random policies."""
    found = {}
    for other in AGAINST:
        both = compare_audits(confirmation(rows[name]), confirmation(rows[other]))
        found[other] = next(test for test in both if test.measure == "lineup")
    return found
