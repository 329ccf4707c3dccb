"""A grid of audits as tables: what is left of each defence, every attacker's figures, and the rest in words."""

from collections.abc import Sequence

from rich.table import Table

from gradveil.audits import GridResult, Part, Row
from gradveil.audits.cases import END
from gradveil.audits.results import NO_BETTER, TRUTHS
from gradveil.report.layouts import Fitted
from gradveil.report.tables import best_blind, number, positive_words, spread

RESULTS = ("defense", "accu-\nracy", "strongest attacker", "PSNR\ndB", "over\nblind", "SSIM", "identi-\nfied")
COLUMNS = ("defense", "attacker", "PSNR dB", "over\nblind", "SSIM", "identi-\nfied")
TITLES = {"used": "Every attacker, against the images that were used", "original": "Every attacker, against the original images"}
DEFENSE, ATTACKER = 14, 23  # letters of "clean gradient", and of the longest name of an attack


def grid_tables(result: GridResult) -> list[Table]:
    """The defences' results; every attacker against the used images; and against the originals where a defence changes images."""
    changed = [part for part in result.parts if len(part.audit.truths) > 1]
    tables = [results_table(result), grid_table(result.parts, "used")]
    return [*tables, grid_table(changed, "original")] if changed else tables


def results_table(result: GridResult) -> Table:
    """One row for each defence: its strongest attacker, by identification, then by dB over blind."""
    settings = result.settings
    facts = f"{settings['model']} on {settings['data']}, labels {settings['labels']}, seed {settings['seed']}"
    made = Fitted(f"What is left of each defense: {facts}", RESULTS, {0: DEFENSE, 2: ATTACKER})
    for part in result.parts:
        row = part.audit.strongest
        against = "\n (original image)" if row.truth != TRUTHS[0] else ""
        made.row(name(part), accuracy(part), row.attack + against, number(row.psnr.mean, ".1f"), *_scores(row))
    return made


def grid_table(parts: Sequence[Part], truth: str) -> Table:
    """Defences by attackers, the strongest in bold; below each defence its best blind guess."""
    made = Fitted(TITLES[truth], COLUMNS, {0: DEFENSE, 1: ATTACKER})
    for part in parts:
        lines = iter(name(part).split("\n"))
        rows = [row for row in part.audit.rows if row.truth == truth]
        best = part.audit.strongest
        for row in (row for row in rows if row.kind == "attack"):
            style = "bold" if (row.attack, row.truth) == (best.attack, best.truth) else ""
            made.row(next(lines, ""), row.attack + _knows(part, row.attack), spread(row.psnr, ".1f"), *_scores(row), style=style)
        blind = best_blind(rows)
        made.row("\n".join(lines), blind.attack, spread(blind.psnr, ".1f"), *_scores(blind), style="dim")
        if truth == TRUTHS[0]:
            for row in (row for row in rows if row.kind == "positive"):
                made.row("", f"positive: {row.attack}", spread(row.psnr, ".1f"), *_scores(row), style="dim")
        made.add_section()
    return made


def grid_in_words(result: GridResult) -> list[str]:
    """The controls, what the clean rows mean, models that are not what a reader expects, and what was left out."""
    labels = {"known": "the labels", "inferred": "the labels it inferred"}[result.settings["labels"]]
    lines = [
        "Strongest: the attacker that identifies most images, of equal ones the one with the most dB over blind.",
        f"Each attacker knows the model, what was shared and {labels}; what else it is told stands below its name. ≤: {NO_BETTER}.",
    ]
    first = result.parts[0].audit
    lines += [positive_words(row) for row in first.rows if (row.kind, row.truth) == ("positive", "used")]
    said: dict[str, list[str]] = {}
    for part in result.parts:
        for word in _part_words(part):
            said.setdefault(word, []).append(plainly(part))
    everywhere = len(result.parts)
    return lines + [f"{'All' if 1 < everywhere == len(names) else '; '.join(names)}: {word}" for word, names in said.items()]


def name(part: Part) -> str:
    """Of a case, on up to three lines."""
    lines = [part.case.defense]
    if part.case.clean:
        lines.append("clean gradient")
    if part.case.step is not None:
        lines.append(f"step {part.case.step}" + (f" ({part.step})" if part.case.step == END and part.step is not None else ""))
    return "\n".join(lines)


def accuracy(part: Part) -> str:
    """Marked where the model was trained under something else."""
    if part.trained is None:
        return "-"
    return f"{part.trained.accuracy:.1%}" + ("" if part.trained.under == part.case.defense else "*")


def _part_words(part: Part) -> list[str]:
    settings, found = part.audit.settings, part.trained
    words = []
    if part.case.clean:
        words.append("as published: the defense acts in training only, and the clean gradient is attacked.")
    if found is not None and found.under != part.case.defense:
        words.append(f"* the accuracy is that of a model trained under {found.under or 'what its file does not say'}.")
    if part.case.checkpoint is None:
        words.append("the model is untrained.")
    elif found is None:
        words.append("the checkpoint is of the plain model, so what the defense adds to it is untrained, and its accuracy unknown.")
    failed = {row.attack: row.failed for row in part.audit.rows if row.failed and row.truth == "used" and row.kind == "attack"}
    words += [f"{attack} failed on {count} image(s), which count as tested." for attack, count in failed.items()]
    return words + [f"left out: {attack}: {reason.removeprefix('attack ')}." for attack, reason in settings.get("left_out", {}).items()]


def plainly(part: Part) -> str:
    """On one line."""
    return name(part).replace("\n", ", ")


def _knows(part: Part, attack: str) -> str:
    _, _, more = str(part.audit.settings.get("knows", {}).get(attack, "labels")).partition(", ")
    return "".join(f"\n + {one}" for one in more.split(", ") if one)


def _scores(row: Row) -> list[str]:
    mark = f"{row.identified}/{row.n}" + (" ≤" if NO_BETTER in row.flags else "  ")
    return [number(row.over_blind.mean, "+.1f"), number(row.ssim.mean, ".3f"), mark]
