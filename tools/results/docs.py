"""The figures of the documentation: the table of an audit, and sentences on what was measured."""

import io
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from gradveil.papers.experiments import HYBRID, NONE, STANDARD, STRONGEST
from gradveil.papers.figures import FINAL_STEP
from gradveil.report.audit import case_tables
from results import reproduce, scores, searches
from results.records import ROOT, audit, row

README = ROOT / "README.md"
AUDIT, SEARCH, MEASURED = "tutorials/audit.md", "tutorials/search.md", "measured.md"
BEGIN, END = "<!-- made by make results -->\n```\n", "```\n<!-- end -->"
WIDTH = 110  # columns: every figure, and each name on one line


def pages() -> dict[Path, str]:
    """Return the pages that have figures, as they are."""
    return {
        path: path.read_text(encoding="utf-8")
        for path in (README, *(ROOT / "docs" / name for name in (AUDIT, SEARCH, MEASURED)))
    }


def with_figures(texts: Mapping[Path, str]) -> dict[Path, str]:
    """Return the pages with the table of their audit, and check the figures of their sentences."""
    made = dict(texts)
    folder = ROOT / "docs"
    before, rest = made[folder / AUDIT].split(BEGIN)
    _, after = rest.split(END)
    made[folder / AUDIT] = f"{before}{BEGIN}{block()}{END}{after}"
    for path, parts in (
        (README, [*first_audit(), *why_ranked_so(), *searches.race_words()]),
        (folder / MEASURED, [*sentence(), *over_training()]),
        (folder / SEARCH, [*why_ranked_so(), *searches.race_words()]),
    ):
        words = " ".join(made[path].split())
        for part in parts:
            if part not in words:
                raise SystemExit(f"{path.name} does not say {part!r}, as the records do")
    return made


def first_audit() -> list[str]:
    """Return the figures of the README's audit that it must have."""
    plain, pruned = audit("readme-defenses").cases
    usual, weak, strong = row(plain, STANDARD), row(pruned, STANDARD), row(pruned, "masked")
    assert usual.identified == usual.n
    return [
        f"Without a defense all {usual.n} pictures are picked out of line-ups of "
        f"{plain.settings['candidates']} ",
        f"under pruning {weak.identified} by `{STANDARD}`, and {strong.identified} by `masked`",
    ]


def block() -> str:
    """Return the table of the tutorial's audit, as an audit prints it in a terminal."""
    (case,) = audit("readme").cases
    (table,) = case_tables(case)
    console = Console(width=WIDTH, color_system=None, file=io.StringIO())
    with console.capture() as printed:
        console.print(table)
    lines = [line.rstrip() for line in printed.get().splitlines()]
    first = next(number for number, line in enumerate(lines) if line.startswith(" "))
    return "".join(f"{line}\n" for line in lines[first:] if line.strip("─"))


def sentence() -> list[str]:
    """Return the figures on the trained models that the documentation must have."""
    plain, hybrid = audit("raced-60-epochs").cases
    weak, strong = row(plain, "adam-cosine"), row(plain, "raced")
    sham, defended = row(plain, "sham", "sham"), row(hybrid, "raced")
    return [
        f"the published attack picks {weak.identified} of {weak.n}",
        f"`--attack raced` {strong.identified} of {strong.n}",
        f"line-ups of {plain.settings['candidates']} pictures",
        f"{sham.identified} of {sham.n})",
        f"chance {100 / plain.settings['candidates']:.0f}%",
        f"under the paper's policy {hybrid.defense} `raced` finds {defended.identified} of "
        f"{defended.n}",
    ]


def over_training() -> list[str]:
    """Return the figures on the stages of a training that the documentation must have."""
    stages = reproduce.stages()

    def told(attack: str, step: int) -> str:
        found = []
        for defense in (NONE, HYBRID):
            ((hits, n),) = [(h, n) for at, h, n in stages[defense, attack] if at == step]
            found.append(f"{hits} of {n}")
        return " and ".join(found)

    def best(step: int) -> str:
        every = [stages[NONE, attack] for attack in (STANDARD, STRONGEST)]
        return f"{max(hits / n for each in every for at, hits, n in each if at == step):.0%}"

    first, middle, last = (told(STANDARD, step) for step in (0, 50, FINAL_STEP))
    return [
        f"after step 50: {best(50)}, {best(500)} and {best(FINAL_STEP)} at",
        f"before training the published attack picks {first} images",
        f"after 50 steps {middle}, at the end of 60 epochs {last}",
        f"`raced` finds more, {told(STRONGEST, FINAL_STEP)}",
        f"it finds less ({told(STRONGEST, 0)})",
    ]


def why_ranked_so() -> list[str]:
    """Return the figures on the search's objective that the documentation must have."""
    each = scores.foretold()
    ours, code, paper = (
        " and ".join(f"{r:.2f}" for r in each[item])
        for item in (scores.DEFAULT, scores.S_PRI, scores.WRITTEN)
    )
    assert all(0.005 < ratio < 0.02 for ratio in scores.costs(scores.WRITTEN))
    items = (scores.DEFAULT, scores.S_PRI, scores.WRITTEN)
    assert all(low < 0 < high for low, high in scores.intervals("semi-trained", items))
    return [
        f"the best of {len(each)} scores",
        f"({ours})",
        f"S_pri as the paper writes it has {paper} at about a hundredth of the cost",
        f"as its code computes it {code}",
        "on the semi-trained model the 95% interval of each of the three includes 0",
    ]
