"""Verdicts on the papers' claims, each with the figure that decides it and its 95% interval."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradveil.audits.records import Record
from gradveil.audits.results import Row
from gradveil.papers.beyond import END, SINGLE, RealClients
from gradveil.papers.catalog import EXPERIMENTS
from gradveil.papers.cells import Trained
from gradveil.papers.experiments import (
    HYBRID,
    NONE,
    OPTIONAL_DATA,
    STRONGEST,
    AttackTable,
    DefenseTable,
    Entry,
    PolicyTable,
)
from gradveil.papers.plan import Part
from gradveil.papers.precode import (
    GRID,
    PRECODE_ROWS,
    PrecodeAccuracy,
    PrecodeReconstructions,
)
from gradveil.papers.published import claim, published
from gradveil.papers.records import Records
from gradveil.papers.searched import Searched
from gradveil.papers.summaries import correlation_table, lowest, overlap
from gradveil.papers.tables import (
    FAR_RANK,
    accuracies,
    attack_records,
    attack_row,
    attacks_of,
    count_first,
    count_tested,
    rank_one,
    rank_tests,
    rows_of,
    told_by_gradients,
)
from gradveil.papers.tuned import TUNED
from gradveil.papers.verdicts import (
    FAILS,
    HOLDS,
    IN_PART,
    INFEASIBLE,
    MISSING,
    POINT,
    UNTOLD,
    Rank,
    accuracy_loss,
    decide_better,
    decide_fewer,
    decide_infeasible,
    decide_less,
    decide_loss,
    decide_overlap,
    decide_search,
    together,
    welch,
)
from gradveil.scores.lineup import FAR
from gradveil.search.comparisons import Comparison, saturated
from gradveil.search.job import SEMI_TRAINED
from gradveil.stats import difference, mean_interval, sign_test, summary

SIDE = 0.0125  # level of a test of one direction, of two stages

Share = tuple[int, int]
"""Images with rank 1, of how many."""

Firsts = tuple[Share | None, Share | None]
"""Images with rank 1, of how many: by the line-up, and by that with the most room."""


@dataclass(frozen=True)
class Decision:
    """A verdict on a claim, with the figures that decide it."""

    name: str
    claim: str
    verdict: str
    figures: tuple[str, ...]


@dataclass(frozen=True)
class Evidence:
    """The parts of the experiments by id and way, and the records."""

    parts: Mapping[tuple[str, str], Part]
    records: Records

    @classmethod
    def of(cls, parts: Sequence[Part], records: Records) -> "Evidence":
        """Return the evidence of some parts."""
        return cls({(part.experiment.id, part.way): part for part in parts}, records)

    def entries(self, experiment: str, row: str, way: str = "ours") -> list[Entry]:
        """Return the cells of a row of an experiment."""
        return rows_of(self.parts.get((experiment, way)), row)

    def result(self, experiment: str, row: str) -> Any:
        """Return the result of a row's single cell; None where it is not done."""
        found = self.entries(experiment, row)
        return self.records.result(found[0].cell) if found else None


def protects(evidence: Evidence, tables: Sequence[str], name: str, text: str) -> Decision:
    """Decide on policy tables whether the hybrid makes the strongest attack infeasible."""
    verdicts, figures = [], []
    for table in tables:
        experiment = EXPERIMENTS[table]
        assert isinstance(experiment, PolicyTable)
        none, hybrid = (
            attack_row(evidence.entries(table, row), evidence.records, STRONGEST)
            for row in (NONE, experiment.hybrid)
        )
        if hybrid is None or not hybrid.candidates:
            verdicts.append(MISSING)
            continue
        bare = None if none is None else (none.identified, none.n)
        chance = 1 / hybrid.candidates
        verdicts.append(decide_infeasible(hybrid.identified, hybrid.n, chance, bare))
        beside = "" if none is None else f" against {rank_one(none)} without a policy"
        figures.append(
            f"{table}: `{STRONGEST}` has rank 1 for {rank_one(hybrid)}{beside}, chance {chance:.0%}"
            f"{_to_originals(evidence, table, experiment.hybrid)}"
        )
    return Decision(name, text, together(verdicts), tuple(figures))


def _to_originals(evidence: Evidence, table: str, hybrid: str) -> str:
    """Tell rank 1 among the images before crop, flip and policy, which decides nothing here."""
    both = [
        attack_row(evidence.entries(table, row), evidence.records, STRONGEST, truth="original")
        for row in (hybrid, NONE)
    ]
    told = [rank_one(each) for each in both if each is not None and each.candidates]
    return f" (among the images before the policy {' against '.join(told)})" if told else ""


def defeats_attacks(evidence: Evidence) -> Decision:
    """Decide whether the hybrid makes each attack infeasible that works without it."""
    table = EXPERIMENTS["table2"]
    assert isinstance(table, AttackTable)
    verdicts, figures = [], []
    for attack in table.attacks:
        none, hybrid = (
            attack_row(evidence.entries("table2", f"{attack}, {name}"), evidence.records, attack)
            for name in ("none", "hybrid")
        )
        if none is None or hybrid is None or not hybrid.candidates:
            verdicts += [] if attack in table.slow else [MISSING]
        else:
            chance, bare = 1 / hybrid.candidates, (none.identified, none.n)
            verdicts.append(decide_infeasible(hybrid.identified, hybrid.n, chance, bare))
            figures.append(
                f"`{attack}` has rank 1 for {rank_one(hybrid)} with the hybrid against "
                f"{rank_one(none)} without"
            )
        if told := _psnr_change(evidence, attack):
            figures.append(told)
    return Decision("claim 2", claim(2), together(verdicts), tuple(figures))


def _psnr_change(evidence: Evidence, attack: str) -> str:
    """Write by how much the hybrid changes the PSNR of an attack as published, image by image."""
    none, hybrid = (_psnr(evidence, f"{attack}, {name}", attack) for name in ("none", "hybrid"))
    both = sorted(none.keys() & hybrid.keys())
    found = mean_interval(summary([hybrid[k] - none[k] for k in both])) if both else None
    if found is None:
        return ""
    return f"PSNR of {attack} as published {found[0]:+.1f} to {found[1]:+.1f} dB"


def _psnr(evidence: Evidence, row: str, attack: str) -> dict[int, float]:
    entries = evidence.entries("table2", row, "published")
    found = attack_records(entries, evidence.records, attack)
    return {each.image: each.scores["used"]["psnr"] for each in found if each.ok}


def costs_nothing(
    evidence: Evidence, name: str, text: str, pairs: Sequence[tuple[str, str, str]]
) -> Decision:
    """Decide on (experiment, row without, row with) whether a defense costs at most a point.

    One training of each cannot tell: trainings differ by more than their test images do.
    """
    verdicts, figures = [], []
    for experiment, without, with_it in pairs:
        bare, defended = (
            accuracies(evidence.entries(experiment, row), evidence.records)
            for row in (without, with_it)
        )
        if not bare or not defended:
            verdicts += [] if without.startswith(OPTIONAL_DATA) else [MISSING]
            continue
        tested = count_tested(evidence.entries(experiment, without), evidence.records)
        lost, low, high = accuracy_loss(bare, defended, tested)
        several = min(len(bare), len(defended)) >= 2
        verdicts.append(decide_loss(low, high) if several else UNTOLD)
        planned = [
            sum(isinstance(entry.cell, Trained) for entry in evidence.entries(experiment, row))
            for row in (without, with_it)
        ]
        verdicts += [MISSING] * (planned != [len(bare), len(defended)])
        over = (
            f"{len(bare)} and {len(defended)} trainings"
            if several
            else f"{tested:,} images, one training each"
        )
        figures.append(
            f"{with_it} loses {100 * lost:z.1f} ({100 * low:.1f} to {100 * high:.1f}) points of "
            f"accuracy, over {over}"
        )
    return Decision(name, text, together(verdicts), tuple(figures))


def shallow_layers(evidence: Evidence) -> Decision:
    """Decide whether the hybrid lowers the likeness of gradients in shallow layers most."""
    none, hybrid = (evidence.result("exp8", row) for row in (NONE, HYBRID))
    if none is None or hybrid is None:
        return Decision("claim 5", claim(5), MISSING, ())
    falls, figures = [], []
    for layer, values in none["layers"].items():
        middle, low, high = welch(values["last"], hybrid["layers"][layer]["last"])
        falls.append((middle, low, high))
        figures.append(
            f"{layer}: cosine without minus with the hybrid {middle:.2f} ({low:.2f} to {high:.2f})"
        )
    shallow, deep = falls[:2], falls[2:]
    less = max(middle for middle, _, _ in deep) < min(middle for middle, _, _ in shallow)
    if all(low > 0 for _, low, _ in shallow):
        verdict = HOLDS if less else IN_PART
    else:
        verdict = FAILS if any(high < 0 for _, _, high in shallow) else UNTOLD
    return Decision("claim 5", claim(5), verdict, tuple(figures))


def later_rise(evidence: Evidence) -> Decision:
    """Decide whether GradSim half way from noise to the image is lower with the policy."""
    text = EXPERIMENTS["exp1"].claim
    result = evidence.result("exp1", "lines")
    if result is None:
        return Decision("figure 1", text, MISSING, ())
    middle, bare = result["points"] // 2, result["lines"][NONE]
    name, with_it = next(item for item in result["lines"].items() if item[0] != NONE)
    n = evidence.entries("exp1", "lines")[0].cell.n
    fall = bare["mean"][middle] - with_it["mean"][middle]
    half = 1.96 * float(np.hypot(bare["std"][middle], with_it["std"][middle])) / n**0.5
    verdict = HOLDS if fall > half else FAILS if fall < -half else UNTOLD
    figure = (
        f"half way, GradSim without minus with {name}: {fall:.3f} ({fall - half:.3f} to "
        f"{fall + half:.3f}), {n} images"
    )
    if (others := _lower_than_none(evidence)) is None:
        return Decision("figure 1", text, verdict, (figure,))
    below, count = others
    if verdict == HOLDS and 2 * below < count:
        verdict = IN_PART
    beside = f"of {count} random policies, {below} have a lower S_pri than none"
    return Decision("figure 1", text, verdict, (figure, beside))


def _lower_than_none(evidence: Evidence) -> tuple[int, int] | None:
    """Return how many random policies have a lower S_pri than none, and of how many."""
    single, random = evidence.result("exp9", "singles"), evidence.result("exp10", "correlation")
    if single is None or random is None:
        return None
    rule = next(iter(random["privacy"]))
    bare = np.mean(single["values"][rule][NONE])
    scores = [np.mean(values) for values in random["privacy"][rule].values()]
    return sum(score < bare for score in scores), len(scores)


def best_transformations(evidence: Evidence, experiment: str, name: str, least: int) -> Decision:
    """Decide whether the paper's five best transformations are ours."""
    text = EXPERIMENTS[experiment].claim
    result = evidence.result(experiment, "singles")
    if result is None:
        return Decision(name, text, MISSING, ())
    figures, verdicts = [], []
    for rule, values in result["values"].items():
        found, low, high = overlap(values)
        verdicts.append(decide_overlap(low, high, least))
        figures.append(
            f"{found} ({low} to {high}) of five by the rule of the {rule}: "
            f"{', '.join(lowest(values))}"
        )
    return Decision(name, text, verdicts[0], tuple(figures))


def score_foretells(evidence: Evidence) -> Decision:
    """Decide whether S_pri rises with PSNR as the paper has it."""
    result = evidence.result("exp10", "correlation")
    if result is None:
        return Decision("claim 7", claim(7), MISSING, ())
    rule, _, _, r, low, high = correlation_table(result)[0]
    paper = float(published()["correlation"]["paper"])
    if low > 0:
        verdict = HOLDS if high >= paper else IN_PART
    else:
        verdict = FAILS if high < paper else UNTOLD
    victims = len(next(iter(result["attack"].values()))["psnr"])
    figure = (
        f"Pearson's r of S_pri (rule of the {rule}) and PSNR over {len(result['attack'])} "
        f"policies, {victims} images each: {r:.2f} ({low:.2f} to {high:.2f}, over policies and "
        f"images); paper {paper}"
    )
    figure += _as_published(evidence)
    return Decision("claim 7", claim(7), verdict, (figure,))


def _as_published(evidence: Evidence) -> str:
    """Write what the same correlation is as the published code has it, where that is done."""
    for entry in evidence.entries("exp10", "correlation", "published"):
        if (result := evidence.records.result(entry.cell)) is not None:
            _, _, _, r, low, high = correlation_table(result)[0]
            return f"; run as published {r:.2f} ({low:.2f} to {high:.2f})"
    return ""


def best_defense(evidence: Evidence) -> Decision:
    """Decide whether the hybrid beats all other defenses, in rank 1 and in accuracy."""
    table = EXPERIMENTS["table-defenses"]
    assert isinstance(table, DefenseTable)
    worst: dict[str, tuple[int, int]] = {}
    right: dict[str, float] = {}
    for row in table.rows:
        entries = evidence.entries(table.id, row)
        rows = [attack_row(entries, evidence.records, attack) for attack in attacks_of(entries)]
        found = [each for each in rows if each is not None and each.candidates]
        if found:
            most = max(found, key=lambda each: each.identified / each.n)
            worst[row] = (most.identified, most.n)
        if values := accuracies(entries, evidence.records):
            right[row] = values[0]
    others = [row for row in worst if row not in (HYBRID, NONE)]
    if HYBRID not in worst or HYBRID not in right or not others:
        return Decision("defenses", table.claim, MISSING, ())
    wanted = [row for row in table.rows if row != NONE]
    verdicts = [MISSING for row in wanted if row not in worst or row not in right]
    for row in others:
        if row in right:
            gap = difference(*worst[HYBRID], *worst[row], level=0.975)
            tested = count_tested(evidence.entries(table.id, row), evidence.records)
            _, low, high = accuracy_loss([right[row]], [right[HYBRID]], tested)
            verdicts.append(decide_better((gap.low, gap.high), (low, high)))
    figures = [
        f"{row}: rank 1 for {hits}/{n}, accuracy {right.get(row, float('nan')):.1%}"
        for row, (hits, n) in worst.items()
    ]
    rule = (
        "rank 1 is on the shared gradient, of the stronger of two attacks; a gradient defense's "
        "raced attack knows it, the hybrid's does not"
    )
    return Decision("defenses", table.claim, together(verdicts), (*figures, rule))


def search_finds(evidence: Evidence) -> Decision:
    """Decide whether the policies of searches leak less than none and than random, by rank 1."""
    experiment = EXPERIMENTS["searches"]
    part = evidence.parts.get((experiment.id, "ours"))
    verdicts, figures = [], []
    for entry in () if part is None else part.entries:
        assert isinstance(entry.cell, Searched)
        rows = evidence.records.confirmed(entry.cell).get(SEMI_TRAINED)
        if rows is None:
            verdicts.append(MISSING)
            continue
        name = "hybrid" if "hybrid" in rows else "single"
        tests = rank_tests(rows, name)
        verdicts.append(decide_search([*tests.values()]))
        told = ", ".join(
            f"{other} {test.theirs:.0%} ({_sides(test)})" for other, test in tests.items()
        )
        ours = tests["none"].ours
        flat = "; saturated: it separates nothing" if any(map(saturated, tests.values())) else ""
        figures.append(f"{entry.row}: `{rows[name].defense}` {ours:.0%} with rank 1, {told}{flat}")
    if figures:
        figures.append(
            "p is one-sided, of fewer images or more, and not corrected; the attack does not know "
            "the policy"
        )
    return Decision("searches", experiment.claim, together(verdicts), tuple(figures))


def _sides(test: Comparison) -> str:
    """Write the p-value of the side on which the images lie."""
    side = "more" if test.more < test.less else "fewer"
    return f"p = {min(test.less, test.more):.2g} of {side}"


def larger_resist(evidence: Evidence) -> Decision:
    """Decide whether larger images resist the attack that finds most of them, at each stage.

    They do not where any attack must find more than is allowed; else all attacks must be done.
    """
    experiment = EXPERIMENTS["larger"]
    part = evidence.parts.get((experiment.id, "ours"))
    stages = [*dict.fromkeys(entry.row for entry in part.entries)] if part else []
    verdicts, figures = [], []
    for stage in stages:
        entries = evidence.entries(experiment.id, stage)
        rows = {each: attack_row(entries, evidence.records, each) for each in attacks_of(entries)}
        known = {name: row for name, row in rows.items() if row is not None}
        found = [
            decide_infeasible(r.identified, r.n, 1 / r.candidates, None) for r in known.values()
        ]
        every = len(known) == len(rows) and together(found)
        verdicts.append(FAILS if FAILS in found else every or MISSING)
        right = next(
            (
                evidence.records.result(e.cell)["accuracy"]
                for e in entries
                if evidence.records.done(e.cell)
            ),
            None,
        )
        beside = "" if right is None else f", accuracy {right:.1%}"
        figures += [f"{stage}{beside}, `{name}`: {rank_one(row)}" for name, row in known.items()]
    return Decision("larger", experiment.claim, together(verdicts), tuple(figures))


def clients_hide(evidence: Evidence) -> Decision:
    """Decide whether batches, train mode and local steps hide images that single ones show.

    It holds of a kind of client where the best of all attacks can find at most `INFEASIBLE` of the
    images, and fewer than of single ones, at the same stage of training. It holds in part where it
    finds fewer, but may find more than that. Both are by bounds over updates. The line-up by
    gradients decides nothing: whoever knows all else of an update tells every image of it, unless
    noise is added. Nor does an attack that failed on all images.
    """
    experiment = EXPERIMENTS["clients"]
    assert isinstance(experiment, RealClients)
    part = evidence.parts.get((experiment.id, "ours"))
    names = [*dict.fromkeys(entry.row for entry in part.entries)] if part else []
    verdicts, figures = [], []
    single: Row | None = None
    for name in names:
        entries = evidence.entries(experiment.id, name)
        made = {each: attack_row(entries, evidence.records, each) for each in attacks_of(entries)}
        rows = [row for row in made.values() if row is not None and row.candidates]
        if len(rows) < len(made):
            single = None if name.endswith(SINGLE) else single
            verdicts.append(MISSING)
            continue
        ended = [row for row in rows if row.failed < row.n]
        most = max(ended, key=lambda row: row.identified / row.n, default=None)
        firsts = _firsts(evidence, experiment.id, name)
        figure = f"{name}: " + ", ".join(
            f"`{each}` {_shares(firsts[each]) or 'failed on all images'}" for each in firsts
        )
        if name.endswith(SINGLE):
            single = most
        else:
            less = MISSING if single is None else UNTOLD
            if single is not None and most is not None:
                less = decide_fewer(_rank(most), _rank(single))
            hidden = most is not None and most.identified_bounds[1] <= INFEASIBLE
            verdicts.append(IN_PART if less == HOLDS and not hidden else less)
            told = told_by_gradients(entries, evidence.records)
            figure += f"; with all else of an update known, gradients tell {rank_one(told)}"
        figures.append(figure)
    setting = experiment.setting
    rule = (
        f"rank 1 of all attacks, in brackets with {FAR} pixels of room where recorded; an update "
        f"counts once. Told of {setting.model} on {setting.data} alone, and of these attacks: what "
        "they do not find, others may"
    )
    notes = (rule,) if figures else ()
    return Decision("clients", experiment.claim, together(verdicts), (*figures, *notes))


def _rank(row: Row) -> Rank:
    return row.identified / row.n, row.identified_bounds


def training_lowers(evidence: Evidence) -> Decision:
    """Decide whether the strongest attack finds fewer images at the end of training than before.

    Reconstructions of trained networks lie further off, so it must be so by either line-up, and at
    the end of both trainings. A comparison that the records do not hold is missing.
    """
    experiment = EXPERIMENTS["over-training"]
    verdicts, figures = [], []
    for row in (NONE, HYBRID):
        stages = [
            _firsts(evidence, experiment.id, f"{row}, {stage}")
            for stage in ("step 0", END, f"{END}, seed 1")
        ]
        before, *ends = map(_most_found, stages)
        verdicts += [
            MISSING if late is None or early is None else decide_less(late, early)
            for after in ends
            for late, early in zip(after, before, strict=True)
        ]
        figures += [
            f"{row}, `{attack}`: " + ", then ".join(_shares(stage[attack]) for stage in stages)
            for attack in (stages[0] if all(stages) else ())
        ]
    rule = (
        "rank 1 is given before training, then at the end of each of two trainings, in brackets "
        f"with {FAR} pixels of room where recorded; the stronger of two attacks at each stage is "
        "compared; before training one seed was attacked; updates of one image, eval mode"
    )
    notes = (rule,) if figures else ()
    return Decision("training", experiment.claim, together(verdicts), (*figures, *notes))


def tuning_gains(evidence: Evidence) -> Decision:
    """Decide whether a tuned attack finds more than the stronger of two others, on their images."""
    experiment = EXPERIMENTS["tuning"]
    verdicts, figures = [], []
    for row in ("step 0", END):
        entries = evidence.entries(experiment.id, row)
        made = {
            each: attack_records(entries, evidence.records, each) for each in attacks_of(entries)
        }
        if not all(made.values()):
            verdicts.append(MISSING)
            continue
        firsts = {
            name: {
                record.image: record.ok and record.scores["used"]["rank"] == 1 for record in some
            }
            for name, some in made.items()
        }
        mine = firsts.pop(TUNED)
        best = max(firsts, key=lambda name: sum(firsts[name].values()) / len(firsts[name]))
        both = [(mine[image], hit) for image, hit in firsts[best].items() if image in mine]
        gained = [int(ours) - int(theirs) for ours, theirs in both]
        more, fewer = (sign_test([sign * value for value in gained]) for sign in (1, -1))
        verdicts.append(HOLDS if more < SIDE else FAILS if fewer < SIDE else UNTOLD)
        ours, theirs = (sum(hits) for hits in zip(*both, strict=True))
        figures.append(
            f"{row}: tuned {ours}, `{best}` {theirs} of the same {len(both)}, p = {more:.2g}"
        )
    return Decision("tuning", experiment.claim, together(verdicts), tuple(figures))


def _firsts(evidence: Evidence, experiment: str, row: str) -> dict[str, Firsts]:
    """Return rank 1 of each attack on a row; empty where not all that are planned are done."""
    entries = evidence.entries(experiment, row)
    found = {name: attack_records(entries, evidence.records, name) for name in attacks_of(entries)}
    if not all(found.values()):
        return {}
    return {
        name: (_first_of(records, "rank"), _first_of(records, FAR_RANK))
        for name, records in found.items()
    }


def _first_of(records: Sequence[Record], rank: str) -> Share | None:
    hits = count_first(records, rank)
    return None if hits is None else (hits, len(records))


def _most_found(attacks: Mapping[str, Firsts]) -> Firsts:
    """Return the rank 1 of the strongest attack, by each line-up that all of them have."""
    near, far = ([firsts[which] for firsts in attacks.values()] for which in (0, 1))
    return _largest(near), _largest(far)


def _largest(shares: Sequence[Share | None]) -> Share | None:
    known = [share for share in shares if share is not None]
    if not known or len(known) < len(shares):
        return None
    return max(known, key=lambda share: share[0] / share[1])


def _shares(both: Firsts) -> str:
    near, far = ("" if each is None else f"{each[0]}/{each[1]}" for each in both)
    return f"{near} ({far})" if far else near


def precode_protects(evidence: Evidence, way: str) -> Decision:
    """Decide whether PRECODE makes attacks infeasible: the plain one, or its breakers too."""
    experiment = EXPERIMENTS["precode-rec"]
    assert isinstance(experiment, PrecodeReconstructions)
    verdicts, figures = [], []
    for data, _ in experiment.data:
        for model in experiment.models:
            where = f"{data}, {model}"
            entries = evidence.entries(experiment.id, f"{where}, precode", way)
            rows = [attack_row(entries, evidence.records, each) for each in attacks_of(entries)]
            found = [each for each in rows if each is not None and each.candidates]
            if not found:
                verdicts += [] if data in OPTIONAL_DATA else [MISSING]
                continue
            most = max(found, key=lambda each: each.identified)
            bare = attack_row(
                evidence.entries(experiment.id, f"{where}, none", way), evidence.records, "iga"
            )
            beside = None if bare is None else (bare.identified, bare.n)
            verdicts.append(decide_infeasible(most.identified, most.n, 1 / most.candidates, beside))
            figures.append(f"{where}: `{most.attack}` {rank_one(most)}")
    if figures:
        figures.append("untrained models, without a sham")
    name = "PRECODE, attacked as published" if way == "published" else "PRECODE, with breakers"
    return Decision(name, experiment.claim, together(verdicts), tuple(figures))


def precode_grid(evidence: Evidence) -> Decision:
    """Decide whether k does not matter, and beta = 0.1 and several modules cost accuracy."""
    right = {}
    for row in GRID:
        if found := accuracies(evidence.entries("precode-grid", row), evidence.records):
            right[row] = found[0]
    usual = right.get("k = 256")
    same = [right[f"k = {k}"] for k in (64, 128, 512) if f"k = {k}" in right]
    costly = [right[row] for row in ("beta = 0.1", "2 modules", "3 modules") if row in right]
    text = EXPERIMENTS["precode-grid"].claim
    if usual is None or not same or not costly:
        return Decision("PRECODE's settings", text, MISSING, ())
    tested = count_tested(evidence.entries("precode-grid", "k = 256"), evidence.records)
    parts = []
    for value in same:
        _, low, high = accuracy_loss([usual], [value], tested)
        parts.append(
            HOLDS
            if low >= -POINT and high <= POINT
            else FAILS
            if low > POINT or high < -POINT
            else UNTOLD
        )
    for value in costly:
        _, low, high = accuracy_loss([usual], [value], tested)
        parts.append(HOLDS if low > 0 else FAILS if high < POINT else UNTOLD)
    figures = ", ".join(f"{row} {value:.1%}" for row, value in right.items())
    told = f"accuracies, of one training each: {figures}"
    return Decision("PRECODE's settings", text, together(parts), (told,))


def decide_all(parts: Sequence[Part], records: Records) -> list[Decision]:
    """Return the verdicts on the seven claims, the extensions and PRECODE's claims."""
    evidence = Evidence.of(parts, records)
    accuracy = EXPERIMENTS["precode-acc"]
    assert isinstance(accuracy, PrecodeAccuracy)
    pairs = [
        (accuracy.id, f"{data}, {model}, {NONE}", f"{data}, {model}, {PRECODE_ROWS[-1]}")
        for data in accuracy.data
        for model in accuracy.models
    ]
    return [
        protects(evidence, ("table1a", "table1b", "table1c", "table1d"), "claim 1", claim(1)),
        defeats_attacks(evidence),
        protects(evidence, ("table4a", "table4b"), "claim 3", claim(3)),
        costs_nothing(evidence, "claim 4", claim(4), [("table1a", NONE, HYBRID)]),
        shallow_layers(evidence),
        best_transformations(evidence, "exp9", "claim 6", 5),
        score_foretells(evidence),
        later_rise(evidence),
        best_defense(evidence),
        search_finds(evidence),
        larger_resist(evidence),
        clients_hide(evidence),
        training_lowers(evidence),
        tuning_gains(evidence),
        protects(evidence, ("table5",), "extension 1", EXPERIMENTS["table5"].claim),
        best_transformations(evidence, "ext2", "extension 2", 3),
        costs_nothing(evidence, "PRECODE's accuracy", accuracy.claim, pairs),
        precode_protects(evidence, "published"),
        precode_protects(evidence, "ours"),
        precode_grid(evidence),
    ]
