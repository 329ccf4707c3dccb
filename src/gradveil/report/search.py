"""A search as tables: the policies kept, the front, and the confirming audits; and the rest of it in words."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from gradveil.audits import AuditResult, Row
from gradveil.audits.results import NO_BETTER
from gradveil.report.audit import best_blind, number, spread
from gradveil.report.layout import Fitted
from gradveil.search import Found, SearchResult
from gradveil.search.confirm import read
from gradveil.search.results import Quantity

HEADS = {
    "over_blind": "over blind, dB",
    "ssim": "SSIM",
    "identified": "identified",
    "privacy": "S_pri",
    "accuracy": "S_acc",
}
COLUMNS = ("", "n", "PSNR dB", "blind\ndB", "over\nblind", "SSIM", "identi-\nfied", "")
TRUTHS = {"used": "against the images used", "original": "against the originals"}


def search_tables(result: SearchResult) -> list[Table]:
    """The policies kept, the front where there is one, and one table of audits for each model."""
    settings = result.settings
    by = (
        f" by {HEADS[settings['rank_by']]}"
        if settings.get("rank_by", "over_blind") != "over_blind"
        else ""
    )
    facts = f"{settings['model']} on {settings['data']}, score {settings['score']}{by}, sampler {settings['sampler']}, seed {settings['seed']}"
    made = [policies_table(f"Policies kept: {facts}", result.kept)]
    if result.front:
        made.append(
            policies_table(
                "The front of leakage against accuracy: no other policy is better in both",
                result.front,
            )
        )
    audits = read(result.out, result.confirmed)
    return made + [confirmation_table(model, found) for model, found in audits.items()]


def policies_table(title: str, policies: Sequence[Found]) -> Table:
    """Means with their standard errors; n, which is the same for all, in the heads."""
    names = sorted(policies[0].quantities, key=list(HEADS).index)
    heads = [f"{HEADS[name]}\nn {policies[0].quantities[name].n}" for name in names]
    made = Fitted(title, ("", "policy", "trial", *heads), {1: 14})
    for rank, one in enumerate(policies, start=1):
        cells = [_quantity(one.quantities[name], share=name == "identified") for name in names]
        made.row(str(rank), str(one.policy), str(one.number), *cells)
    return made


def confirmation_table(model: str, audits: Mapping[str, AuditResult]) -> Table:
    """Each row's attack beside the best blind guess at the same images, and the best blind guess where no policy is used."""
    settings = audits["none"].settings
    attack = next(iter(settings["attacks"]))
    made = Fitted(
        f"Confirmed by {attack}, {model} {settings['model']}",
        COLUMNS,
        {len(COLUMNS) - 1: 10, 0: 17},
    )
    for truth, words in TRUTHS.items():
        made.row(words, style="italic")
        for name, audit in audits.items():
            rows = [row for row in audit.rows if row.truth == truth]
            (attacked,) = (row for row in rows if row.kind == "attack")
            made.row(*_cells(name, attacked, best_blind(rows)), style="bold")
        blind = best_blind([row for row in audits["none"].rows if row.truth == truth])
        made.row(*_cells(blind.attack, blind, blind))
        for row in (
            row
            for row in audits["none"].rows
            if (row.kind, row.truth) == ("positive", truth) and truth == "used"
        ):
            made.row(*_cells(f"positive: {row.attack}", row, blind))
        made.add_section()
    return made


def search_in_words(result: SearchResult) -> list[str]:
    """How many trials came to what, what a race saved, the hybrid, what was less than usual, and what the audits say."""
    counts = ", ".join(
        f"{result.states(state)} {state}"
        for state in ("scored", "inaccurate", "dropped")
        if result.states(state)
    )
    lines = [
        f"{len(result.trials)} policies drawn: {counts} (accuracy threshold {result.settings['threshold']:g})."
    ]
    lines.append(
        "The policies kept are scored on the images they were chosen by, and so look better than they are; the audits use other images."
    )
    if result.saving:
        saved = result.saving
        lines.append(
            f"The race dropped {saved.dropped} policies, {saved.unjudged} of them before their accuracy was scored: leakage was scored on "
            f"{saved.scored} of {saved.all} images ({saved.share:.1%} saved)."
        )
    lines.append(
        f"Hybrid: {result.hybrid}." if result.hybrid else f"No hybrid: {result.no_hybrid}."
    )
    return [*lines, *(f"Note: {note}." for note in result.notes), *result.words]


def _cells(name: str, row: Row, blind: Row) -> list[str]:
    flags = [flag for flag in row.flags if flag != NO_BETTER] + (
        ["≤blind"] if NO_BETTER in row.flags else []
    )
    return [
        name,
        str(row.n),
        spread(row.psnr),
        number(blind.psnr.mean),
        number(row.over_blind.mean, "+.2f"),
        number(row.ssim.mean, ".3f"),
        f"{row.identified / row.n:.1%}",
        "\n".join(flags),
    ]


def _quantity(found: Quantity, share: bool) -> str:
    error = "" if found.error is None else f" ± {found.error:{'.1%' if share else '.2g'}}"
    return f"{found.mean:{'.1%' if share else '.4g'}}{error}"
