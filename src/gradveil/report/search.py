"""A search as tables, of its policies and its confirming audits, and in sentences."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from gradveil.audits import Row
from gradveil.audits.results import NO_BETTER
from gradveil.report.audit import chosen_blind, number, spread
from gradveil.report.layout import Fitted
from gradveil.search import SearchResult, TriedPolicy
from gradveil.search.comparisons import CONTROLS, Confirmation, control
from gradveil.search.confirm import read_audits
from gradveil.search.results import HEADS, policy_cells

COLUMNS = (
    "",
    "n",
    "line-\nup",
    "95%",
    "sham",
    "knows\ndraws",
    "noisy\ntruth",
    "gra-\ndients",
    "PSNR dB",
    "blind\ndB",
    "over\nblind",
    "SSIM",
    "",
)
EXTRAS = (7, 6, 5, 4)  # the controls of the line-up, which stand in the sentences too
TRUTHS = {"used": "against images used", "original": "against originals"}


def search_tables(result: SearchResult) -> list[Table]:
    """Tables of the policies kept, of the front where there is one, and of each model's audits."""
    settings = result.settings
    rank_by = settings.get("rank_by", "over_blind")
    by = f" by {HEADS[rank_by]}" if rank_by != "over_blind" else ""
    facts = (
        f"{settings['model']} on {settings['data']}, score {settings['score']}{by}, "
        f"sampler {settings['sampler']}, seed {settings['seed']}"
    )
    made = [policies_table(f"Policies kept: {facts}", result.kept)]
    if result.front:
        title = "The front of leakage against accuracy: no other policy is better in both"
        made.append(policies_table(title, result.front))
    audits = read_audits(result.out, result.confirmed)
    model = settings["model"]
    return made + [confirmation_table(f"{of} {model}", rows) for of, rows in audits.items()]


def policies_table(title: str, policies: Sequence[TriedPolicy]) -> Table:
    """A table of policies: means with their standard errors, and n in the heads."""
    heads, rows = policy_cells(policies)
    made = Fitted(title, heads, {1: 14})
    for cells in rows:
        made.row(*cells)
    return made


def confirmation_table(model: str, audits: Mapping[str, Confirmation]) -> Table:
    """A table of the audits of one model, by the row's name.

    Each attack stands beside the best blind guess at the same images and, where there is room,
    rank 1 of sham, of the guess that knows the draws, and of both ceilings. The last rows are the
    best blind guess without a policy, and the positive control.
    """
    none = audits["none"]
    gives = {len(COLUMNS) - 1: 10, 0: 17}
    made = Fitted(f"Confirmed by {none.attack}, {model}", COLUMNS, gives, EXTRAS)
    for truth, words in TRUTHS.items():
        made.row(words, style="italic")
        for name, audit in audits.items():
            rows = [row for row in audit.rows if row.truth == truth]
            (attacked,) = (row for row in rows if row.kind == "attack")
            shown = [control(audit, each, truth) for each in CONTROLS]
            made.row(*_cells(name, attacked, chosen_blind(rows), shown), style="bold")
        blind = chosen_blind([row for row in none.rows if row.truth == truth])
        made.row(*_cells(blind.attack, blind, blind))
        if truth == "used":
            for row in none.rows:
                if (row.kind, row.truth) == ("positive", truth):
                    made.row(*_cells(f"positive: {row.attack}", row, blind))
        made.add_section()
    return made


def search_in_words(result: SearchResult) -> list[str]:
    """Sentences on the trials, the race, the hybrid, what was less than usual, and the audits."""
    counts = ", ".join(
        f"{result.states(state)} {state}"
        for state in ("scored", "inaccurate", "dropped")
        if result.states(state)
    )
    threshold = result.settings["threshold"]
    lines = [
        f"{len(result.trials)} policies drawn: {counts} (inaccurate: a score below {threshold:g}).",
        "The policies kept are scored on the images they were chosen by, and so look better than "
        "they are; the audits use other images.",
    ]
    if result.saving:
        saved = result.saving
        lines.append(
            f"The race dropped {saved.dropped} policies, {saved.unjudged} of them before their "
            f"accuracy was scored: leakage was scored on {saved.scored} of {saved.all} images "
            f"({saved.share:.1%} saved)."
        )
    lines.append(
        f"Hybrid: {result.hybrid}." if result.hybrid else f"No hybrid: {result.no_hybrid}."
    )
    return [*lines, *(f"Note: {note}." for note in result.notes), *result.words]


def _cells(
    name: str, row: Row, blind: Row, controls: Sequence[Row | None] = ()
) -> list[str | Sequence[str]]:
    flags = ["≤blind" if flag == NO_BETTER else flag for flag in row.flags]
    return [
        name,
        str(row.n),
        row.lineup,
        row.interval,
        *(["-" if each is None else each.lineup for each in controls] or [""] * len(CONTROLS)),
        spread(row.psnr),
        number(blind.psnr.mean),
        number(row.over_blind.mean, "+.2f"),
        number(row.ssim.mean, ".3f"),
        flags,
    ]
