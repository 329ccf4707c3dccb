"""The figures of the documentation: the table of an audit, and sentences on what was measured."""

import io
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from gradveil.audits.attackers import MATCHED
from gradveil.papers.beyond import EARLY
from gradveil.papers.experiments import HYBRID, NONE, STANDARD, STRONGEST
from gradveil.papers.figures import FINAL_STEP
from gradveil.papers.verdicts import UNTOLD
from gradveil.report.audit import case_tables
from results import batches, exact, federated, findings, reproduce, scores, searches
from results.records import ROOT, audit, row

README = ROOT / "README.md"
ATTACKS = (STANDARD, STRONGEST)
AUDIT, SEARCH, MEASURED = "tutorials/audit.md", "tutorials/search.md", "measured.md"
METHOD, THREATS = "method.md", "threat-models.md"
COUNTED = r"\d[\d,]* of \d[\d,]*\d"  # what a figure of a count looks like
REASONED = (
    "0 of 59",  # pictures that bound what an attack identifies by 5%
    "18 of 20",  # a test in tests/search/test_race.py
)
"""Counts in the documentation that are no measurements on record."""

BEGIN, END = "<!-- made by make results -->\n", "<!-- end -->"
WIDTH = 110  # columns: every figure, and each name on one line


def pages() -> dict[Path, str]:
    """Return README and the pages of the documentation, as they are."""
    paths = (README, *sorted((ROOT / "docs").rglob("*.md")))
    return {path: path.read_text(encoding="utf-8") for path in paths}


def with_figures(texts: Mapping[Path, str]) -> dict[Path, str]:
    """Return the pages with the table of their audit, and check the figures of their sentences."""
    made = dict(texts)
    folder = ROOT / "docs"
    for name, text in ((AUDIT, f"```\n{block()}```\n"), (MEASURED, held())):
        before, rest = made[folder / name].split(BEGIN)
        _, after = rest.split(END)
        made[folder / name] = f"{before}{BEGIN}{text}{END}{after}"
    known = {
        README: [*first_audit(), *why_ranked_so(), *what_searches_found(), *searches.race_words()],
        folder / MEASURED: [*sentence(), *over_training(), " ".join(held().split())],
        folder / SEARCH: [*why_ranked_so(), *what_searches_found(), *searches.race_words()],
        folder / METHOD: gray(),
        folder / THREATS: threats(),
    }
    for path, text in made.items():
        words, parts = " ".join(text.split()), known.get(path, [])
        for part in parts:
            if part not in words:
                raise SystemExit(f"{path.name} does not say {part!r}, as the records do")
        for count in re.findall(COUNTED, words):
            if count not in " ".join([*parts, *REASONED]):
                raise SystemExit(f"{path.name} says {count!r}, and no record does")
    return made


def held() -> str:
    """Return the findings of RESULTS.md as a list, each with the section that it comes from."""
    lines = re.sub(r"\[([^]]+)\]\(#[^)]+\)", r"*\1*", findings.section()).splitlines()[1:]
    fill = textwrap.TextWrapper(100, subsequent_indent="  ", break_on_hyphens=False).fill
    wrapped = map(fill, lines)
    return "\n".join(wrapped) + "\n"


def gray() -> list[str]:
    """Return what a gray picture scores beside the published attack, as the method must have it."""
    case = audit("trained-60-epochs").cases[0]
    assert case.defense == NONE
    flat, attacked = row(case, "blind: grey", "blind"), row(case, STANDARD)
    return [
        f"On {flat.n} test pictures of CIFAR-100 a plain gray picture scores {flat.psnr.mean:.1f} "
        f"dB, and the published attack on a trained model {attacked.psnr.mean:.1f} dB"
    ]


def threats() -> list[str]:
    """Return the figures on threat models that the documentation must have."""
    near, far = reproduce.second_training()
    stages = reproduce.stages()
    before, after = (
        "{} of {}".format(*max(found, key=lambda each: each[0] / each[1]))
        for found in (
            [(h, n) for name in ATTACKS for at, h, n in stages[NONE, name] if at == step]
            for step in (0, FINAL_STEP)
        )
    )
    return [
        *clients(),
        f"`{MATCHED}` found {batches.both(MATCHED, 'train')} pictures of CIFAR-100 before and",
        f"{batches.both(MATCHED, 'eval')} in eval mode",
        f"The published attack, with {batches.iterations()} of its iterations, found "
        f"{batches.both(STANDARD, 'train')} in train mode",
        f"{federated.singles()} in the updates of a Flower app",
        f"found {before} before training and {after} at the end of it",
        f"of a second training {near}, and {far} where reconstructions may lie 8 pixels off",
        f"{exact.recovered('fashion-mnist-untrained', 'none', 32)} pictures in batches of 32",
        f"{exact.recovered('cifar100-untrained', 'none', 16)} in batches of 16 on CIFAR-100",
        f"{exact.told('cifar100-flower-untrained', 8)} in batches of 8 on CIFAR-100",
        f"{exact.told('fashion-mnist-flower-trained', 8)} on Fashion-MNIST after training",
        f"{federated.eights()} pictures were found, over {federated.updates(8)} updates each",
        f"{federated.beside_guess('cifar100')} on CIFAR-100",
        f"{federated.beside_guess('fashion-mnist')}, {federated.luck('fashion-mnist')}",
        f"{federated.told_by_gradients('cifar100')} on CIFAR-100 and "
        f"{federated.told_by_gradients('fashion-mnist')} on Fashion-MNIST",
    ]


def clients() -> list[str]:
    """Return the figures on batches of resnet20-4 that the documentation must have."""

    def found(kind: str, stage: str = "untrained") -> str:
        return reproduce.client(f"{stage}, {kind} mode")[0]

    eights, large = (
        reproduce.client(f"untrained, batch {size}, 1 step, train mode")[1] for size in (8, 32)
    )
    beyond = {name for name, _, _ in reproduce.clients_beyond_luck()}
    assert beyond == {
        *(f"untrained, batch 8, 1 step, eval mode, `{attack}`" for attack in ATTACKS),
        f"trained, batch 8, 4 steps, train mode, `{STRONGEST}`",
    }, f"{beyond} find more than luck; mend {THREATS}"
    return [
        f"the best of two or three attacks found {found('batch 1, 1 step, eval')} single pictures",
        f"it found {found('batch 8, 1 step, eval')} in eval mode and "
        f"{found('batch 8, 1 step, train')} in train mode, and after four local steps "
        f"{found('batch 8, 4 steps, eval')} and {found('batch 8, 4 steps, train')}, where a guess "
        f"finds {eights}",
        f"in batches of 32, {found('batch 32, 1 step, eval')} and "
        f"{found('batch 32, 1 step, train')}, where a guess finds {large}",
        f"Only the {found('batch 8, 1 step, eval')} are shown to be more than luck",
        f"`{STRONGEST}` alone was tried: in train mode it found "
        f"{found('batch 8, 4 steps, train', 'trained')} in batches of 8 after four local steps, "
        f"more than luck, where a guess finds {eights}, and "
        f"{found('batch 32, 1 step, train', 'trained')} in batches of 32, which luck may give",
        "which candidate is the right one, "
        + reproduce.client_told("untrained, batch 8, 1 step, train mode"),
    ]


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
        f"The published attack picks {weak.identified} of {weak.n}",
        f"`--attack raced` {strong.identified} of {strong.n}",
        f"line-ups of {plain.settings['candidates']} pictures",
        f"{sham.identified} of {sham.n})",
        f"chance {100 / plain.settings['candidates']:.0f}%",
        f"under the paper's policy {hybrid.defense} `raced` finds {defended.identified} of "
        f"{defended.n}:",
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
        every = [stages[NONE, attack] for attack in ATTACKS]
        return f"{max(hits / n for each in every for at, hits, n in each if at == step):.0%}"

    first, middle, last = (told(STANDARD, step) for step in (0, 50, FINAL_STEP))
    return [
        f"after step 50: {best(50)}, {best(500)} and {best(FINAL_STEP)} at",
        f"Before training the published attack picks {first} images",
        f"after 50 steps {middle}, at the end of 60 epochs {last}",
        f"`raced` finds more, {told(STRONGEST, FINAL_STEP)}",
        f"it finds less ({told(STRONGEST, 0)})",
        f"trainings of {EARLY} epochs",
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


def what_searches_found() -> list[str]:
    """Return what audits of recorded searches came to, as the documentation must have it."""
    probe, published = (reproduce.searched(row) for row in ("the probe", "S_pri, as published"))
    assert all(probe[name] == published[name] for name in ("none", "random"))
    verdict = reproduce.decisions()["searches"].verdict
    assert verdict.startswith(UNTOLD), f"searches: {verdict}; mend README and the tutorial"
    return [
        f"the hybrid found so has rank 1 for {probe['hybrid']} pictures, crop and flip alone for "
        f"{probe['none']}, and ten random policies for {probe['random']}; the hybrid by S_pri for "
        f"{published['hybrid']}"
    ]
