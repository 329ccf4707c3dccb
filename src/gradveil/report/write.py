"""Everything that people take away from runs: the page, verdict.json, tables and figures."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradveil.audits import AuditResult, Certificate, Threshold
from gradveil.core.boundary import public
from gradveil.core.cell_files import CELL
from gradveil.core.errors import GradveilError, kind_of
from gradveil.core.files import remove_unfinished, shown, unfinished, write_text
from gradveil.core.formats import AssessmentFile, ThresholdsFile
from gradveil.core.job_folder import SETTINGS
from gradveil.core.locks import alone, held
from gradveil.core.reading import read_json
from gradveil.federated.job import AUDITS
from gradveil.report.certificates import certificates_in_words, certify_cases
from gradveil.report.curves import Curves
from gradveil.report.figures import draw_leakage
from gradveil.report.page import Page
from gradveil.report.pictures import SUFFIXES
from gradveil.report.tables import csv_text, latex_text
from gradveil.report.verdict import VERDICT, Decision, decide, read_thresholds
from gradveil.search import SearchResult
from gradveil.search.confirm import CONFIRM, read_confirmed
from gradveil.search.job import RESULT

PAGE = "index.html"
CSV = "audit.csv"
SEVERAL = "gradveil-report"  # the folder of a report on several runs
ASSESSED = "audit"  # the audit's folder in that of an assessment
ADVICE = "assessment.json"  # the result of an assessment
REPORTING = "working in"  # whatever it does: it may be an audit that has not ended
TEXTS = {".csv": csv_text, ".tex": latex_text}


@dataclass(frozen=True)
class Report:
    """A report that was written: its files by name, and what the thresholds came to.

    `certificates` are those that were asked for, by the name of the run and of the case.
    """

    page: Path
    files: dict[str, Path]
    decision: Decision
    certificates: dict[str, dict[str, Certificate]] = field(default_factory=dict)
    certified: tuple[str, ...] = ()  # the same in sentences

    @property
    def passed(self) -> bool | None:
        """Whether all thresholds hold; None without any."""
        return self.decision.passed


@public
def write_report(
    runs: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    thresholds: str | Path | None = None,
    with_pictures: bool = False,
    save: Sequence[str | Path] = (),
    certify: str | Threshold | None = None,
) -> Report:
    """Write index.html, verdict.json and audit.csv of a run, or of several side by side.

    A run is the folder of an audit, an assessment, a search, or a federated training, whose audited
    rounds stand side by side. The folder of a cell beside it, which `gradveil reproduce` recorded,
    adds its curves of gradients. The files lie in the run's folder; those of several runs in `out`,
    by default `gradveil-report`. `thresholds` is a TOML file that the run is decided by. Pictures
    of a user's own images are shown only `with_pictures`; those of published data sets always.
    `certify`, such as psnr=15, is the threshold of the page's certificates, by default rank 1 in
    the line-up. Each path of `save` gets a figure (.png, .pdf, .svg) or a table (.tex, .csv).
    """
    asked = None if thresholds is None else read_thresholds(Path(thresholds))
    paths = _paths(save, "save")
    for path in paths:
        check_suffix(path)
    folders = [Path(runs)] if isinstance(runs, str | Path) else _paths(runs, "runs")
    if not folders:
        raise GradveilError("no run was named: give the folder of an audit or of a search")
    threshold = Threshold.parse(certify) if isinstance(certify, str) else certify
    cells = [folder for folder in folders if (folder / CELL).is_file()]
    curves = [Curves.read(folder) for folder in cells]
    folders = [folder for folder in folders if folder not in cells]
    if not folders:
        raise GradveilError(
            f"{shown(cells[0])} holds a cell alone: give the folder of an audit or a search too"
        )
    target = folders[0] if len(folders) == 1 else Path(SEVERAL)
    folders = [run for folder in folders for run in _audits_in(folder)]
    search = None
    results = {}
    for name, folder in zip(_names(folders), folders, strict=True):
        results[name], search = _read(folder)
    found = search if len(folders) == 1 else None
    advice = _advice(folders[0]) if len(folders) == 1 else []
    return write_files(
        _corrected(results),
        target if out is None else Path(out),
        asked,
        found,
        with_pictures,
        paths,
        threshold=threshold,
        curves=curves,
        advice=advice,
    )


def write_files(
    results: dict[str, AuditResult],
    out: Path,
    thresholds: ThresholdsFile | None = None,
    search: SearchResult | None = None,
    with_pictures: bool = False,
    save: Sequence[Path] = (),
    *,
    threshold: Threshold | None = None,
    curves: Sequence[Curves] = (),
    advice: Sequence[str] = (),
) -> Report:
    """Write the files of audits that have been read, by the names of their runs.

    `advice` is that of an assessment.
    """
    decision = decide(results, thresholds)
    page = Page(results, decision, search, with_pictures, threshold, curves, advice)
    texts = {
        CSV: csv_text(page.runs),
        VERDICT: json.dumps(decision.plain(), indent=1, allow_nan=False) + "\n",
        PAGE: page.html(),
    }
    # Processes that share a search end it together, and each writes the same page.
    with held(out, lambda _: None) if search is not None else alone(out, REPORTING):
        remove_unfinished(out, [unfinished(out / name) for name in texts])
        for name, text in texts.items():
            write_text(out / name, text)
    for path in save:
        if path.suffix.lower() in TEXTS:
            write_text(path, TEXTS[path.suffix.lower()](page.runs))
        else:
            draw_leakage(page.runs, path)
    files = {name: out / name for name in texts} | {str(path): path for path in save}
    certificates, words = _certified(results, threshold)
    return Report(out / PAGE, files, decision, certificates, words)


def _corrected(results: dict[str, AuditResult]) -> dict[str, AuditResult]:
    """Return the audits with their p-values corrected for those of all others of the page too."""
    tests = {
        name: [p for case in result.cases[:1] for p in (*case.p_values, *case.others)]
        for name, result in results.items()
    }
    return {
        name: result.beside([p for other in tests if other != name for p in tests[other]])
        for name, result in results.items()
    }


def _certified(
    results: dict[str, AuditResult], threshold: Threshold | None
) -> tuple[dict[str, dict[str, Certificate]], tuple[str, ...]]:
    """Return the certificates of each run by their cases, and in sentences."""
    if threshold is None:
        return {}, ()
    found, words = {}, []
    count = sum(result.count for result in results.values())
    for name, result in results.items():
        made = {case.name: each for case, each in certify_cases(result, threshold, count)}
        found[name] = made
        words += [f"{name}:"] if name else []
        words += certificates_in_words(made, result.cases[0])
    return found, tuple(words)


def _paths(values: object, name: str) -> list[Path]:
    """Return the paths of an argument that takes a list of them, or refuse it."""
    if not isinstance(values, list | tuple):
        raise GradveilError(f"{name}: {kind_of(values)}; expected a path, or a list of paths")
    for value in values:
        if not isinstance(value, str | Path):
            raise GradveilError(f"{name}: {kind_of(value)} in the list; expected paths")
    return [Path(value) for value in values]


def check_suffix(path: Path) -> None:
    """Refuse a path whose suffix names no format that can be written."""
    if path.suffix.lower() not in (*SUFFIXES, *TEXTS):
        raise GradveilError(
            f"{shown(path)}: its suffix names no format; choose from "
            f"{', '.join((*SUFFIXES, *TEXTS))}"
        )


def _names(folders: Sequence[Path]) -> list[str]:
    """Name runs by their folders, by as many parts of the path as tell them apart.

    A single run has no name: its files say the same wherever its folder lies.
    """
    if len(folders) == 1:
        return [""]
    absolute = [folder.absolute() for folder in folders]
    for count in range(1, max(len(path.parts) for path in absolute) + 1):
        names = ["/".join(path.parts[-count:]) for path in absolute]
        if len({*names}) == len(names):
            return names
    raise GradveilError(f"{shown(folders[0])}: a run is named twice")


def _audits_in(folder: Path) -> list[Path]:
    """Return the audits of a federated training's rounds; the folder itself where it has none."""
    return sorted(path.parent for path in (folder / AUDITS).glob(f"*/{SETTINGS}")) or [folder]


def _read(folder: Path) -> tuple[AuditResult, SearchResult | None]:
    """Read an audit, also that of an assessment, or a search with its confirming audits."""
    if (folder / RESULT).is_file():
        search = SearchResult.read(folder)
        return read_confirmed(folder, search.confirmed), search
    if (folder / CONFIRM / SETTINGS).is_file():
        SearchResult.read(folder)  # it has not ended, and says so
    if _is_assessment(folder):
        return AuditResult.read(folder / ASSESSED), None
    return AuditResult.read(folder), None


def _is_assessment(folder: Path) -> bool:
    return all((folder / part / SETTINGS).is_file() for part in (".", ASSESSED))


def _advice(folder: Path) -> list[str]:
    """Return the advice of an assessment that has ended; nothing for any other folder."""
    if not _is_assessment(folder) or not (folder / ADVICE).is_file():
        return []
    return read_json(folder / ADVICE, AssessmentFile).advice
