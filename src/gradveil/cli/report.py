"""gradveil report: the page of a run, or of several, with tables, figures and a verdict."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradveil.cli import options
from gradveil.cli.options import examples, say
from gradveil.core.errors import GradveilError

if TYPE_CHECKING:
    from gradveil.audits import Threshold

EXAMPLES = examples(
    "gradveil report runs/audit",
    "gradveil report runs/a runs/b --out compared --save table.tex --save leakage.pdf",
    "gradveil report runs/audit --thresholds thresholds.toml",
    "gradveil report runs/audit --certify psnr=15 --delta 0.05",
)


def report_command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of audits, assessments, searches or federated trainings.",
            metavar="RUN...",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="The report's folder. Default: the run's; gradveil-report for several."
        ),
    ] = None,
    thresholds: options.Thresholds = None,
    with_pictures: options.WithPictures = False,
    certify: Annotated[
        str | None,
        typer.Option(
            help="psnr=15, ssim=0.5 or lineup: the page bounds the share of images reconstructed "
            "so well. Default: lineup."
        ),
    ] = None,
    delta: options.Delta = None,
    gamma: options.Gamma = None,
    save: Annotated[
        list[Path] | None,
        typer.Option(
            "--save",
            help="Also write a figure (.png, .pdf, .svg) or a table (.tex, .csv). Several times "
            "for several.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Write index.html, verdict.json and audit.csv of a run, or of several side by side.

    The status is 1 where a threshold is broken, else 0.
    """
    from gradveil.report.verdict import verdict_words
    from gradveil.report.write import write_report  # torch takes seconds to import

    made = write_report(
        runs,
        out=out,
        thresholds=thresholds,
        with_pictures=with_pictures,
        save=save or (),
        certify=read_certify(certify, delta, gamma),
    )
    answers = [line for run in made.decision.plain()["runs"] for line in _lines(run)]
    files = [f"wrote {path}" for path in made.files.values()]
    plain: dict[str, Any] = {"files": made.files, "verdict": made.decision.plain()}
    if certify is not None:
        plain["certificates"] = {
            run: {name: each.plain() for name, each in found.items()}
            for run, found in made.certificates.items()
        }
    say(plain, as_json, [*answers, *verdict_words(made.decision), *made.certified, "", *files])
    if made.passed is False:
        raise typer.Exit(1)


def read_certify(text: str | None, delta: float | None, gamma: float | None) -> "Threshold | None":
    """Read the options --certify, --delta and --gamma; None without the first."""
    from gradveil.audits import Threshold

    if text is not None:
        return Threshold.parse(text, delta, gamma)
    for name, value in (("delta", delta), ("gamma", gamma)):
        if value is not None:
            raise GradveilError(
                f"--{name} {value:g} without --certify: give the threshold too, such as "
                "--certify psnr=15"
            )
    return None


def _lines(run: dict[str, object]) -> list[str]:
    sentences = run["answer"]
    assert isinstance(sentences, list)
    return [*([f"{run['run']}:"] if run["run"] else []), *map(str, sentences)]
