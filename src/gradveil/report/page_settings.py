"""The last section of the page: settings, digests, versions, and the command to run again."""

from collections.abc import Callable, Mapping, Sequence

from gradveil.audits import AuditResult, CaseResult
from gradveil.report.markup import Html, element, joined
from gradveil.report.provenance import case_lines, command, is_spied, search_command, settings_lines
from gradveil.search import SearchResult


def settings_section(
    runs: Mapping[str, AuditResult],
    search: SearchResult | None,
    name_of: Callable[[CaseResult], str],
) -> Html:
    """Return the settings of all runs and cases, each with the command that makes it again."""
    parts: list[Html | None] = []
    if search is not None:
        parts += [_command(search_command(search)), _pairs(settings_lines(search.settings))]
    for name, run in runs.items():
        parts.append(element("h3", name) if len(runs) > 1 else None)
        if search is None:
            parts += [
                _command(command(run), is_spied(run)),
                _scored(run),
                _pairs(settings_lines(run.settings)),
            ]
        for case in run.cases:
            inner = _pairs(case_lines(case))
            parts.append(element("details", element("summary", name_of(case)), inner))
    return joined(parts)


def _command(again: str | None, spied: bool = False) -> Html:
    if again is None:
        words = "It was made of Python objects: make the same call again with these settings."
        if spied:
            words = (
                "It attacked updates that a spy kept: train with the same settings again, or "
                "attack what the spy kept by gradveil audit --flower."
            )
        return element("p", words)
    copy = element("button", "Copy", type="button", class_="copy")
    return element("div", element("pre", again, tabindex="0"), copy, class_="command")


def _scored(run: AuditResult) -> Html | None:
    """Say what a command with policies as text leaves out."""
    if not run.settings.get("scored"):
        return None
    words = (
        "Policies stand here as text. Name the policies.toml of their search in their place: it "
        "tells which images the search has used, and without it other images are drawn."
    )
    return element("p", words)


def _pairs(lines: Sequence[tuple[str, str]]) -> Html:
    rows = [
        element("tr", element("th", name, scope="row"), element("td", value))
        for name, value in lines
    ]
    return element("div", element("table", *rows, class_="pairs"), class_="scroll")
