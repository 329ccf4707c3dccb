"""What gradveil audit runs and shows: one audit, or a grid of them, with exact statements where they were asked for."""

from pathlib import Path

from gradveil.audits import (
    AuditJob,
    Certificate,
    GridJob,
    GridResult,
    Threshold,
    audit,
    certify,
    grid,
)
from gradveil.cli.options import say
from gradveil.report.audit import (
    audit_tables,
    certificate_table,
    certificates_in_words,
    controls_in_words,
    grid_in_words,
    grid_tables,
    plainly,
)
from gradveil.report.pictures import draw_audit, draw_timeline


def run_single(
    job: AuditJob,
    threshold: Threshold | None,
    out: Path,
    root: Path | None,
    device: str,
    as_json: bool,
) -> None:
    result = audit(job, out, root=root, device=device)
    pictures = draw_audit(result)
    words, tables = controls_in_words(result), audit_tables(result)
    plain = {
        "out": out,
        "settings": result.settings,
        "rows": [row.plain() for row in result.rows],
        "notes": words,
        "pictures": pictures,
    }
    if threshold is not None:
        found = {result.defense: certify(result, threshold)}
        words += certificates_in_words(found, result)
        tables.append(certificate_table(found))
        plain["certificate"] = found[result.defense].plain()
    files = "\n".join(
        [f"records {out / 'records.jsonl'}", *(f"picture {path}" for path in pictures)]
    )
    say(plain, as_json, *tables, "\n".join(["", *words, "", files]))


def run_grid(
    job: GridJob,
    threshold: Threshold | None,
    out: Path,
    root: Path | None,
    device: str,
    as_json: bool,
) -> None:
    result = grid(job, out, root=root, device=device)
    pictures = [path for part in result.parts for path in draw_audit(part.audit)]
    pictures += [draw_timeline(result)] if job.at else []
    words, tables = grid_in_words(result), grid_tables(result)
    found = {} if threshold is None else _certificates(result, threshold)
    if found:
        words += certificates_in_words(found, result.parts[0].audit)
        tables.append(certificate_table(found))
    plain = {
        "out": out,
        "settings": result.settings,
        "parts": result.plain(),
        "notes": words,
        "pictures": pictures,
    }
    if found:
        plain["certificates"] = {name: one.plain() for name, one in found.items()}
    files = [f"records {out / part.case.folder / 'records.jsonl'}" for part in result.parts]
    shown = [f"picture {pictures[-1]}"] if job.at else []
    say(plain, as_json, *tables, "\n".join(["", *words, "", *files, *shown]))


def _certificates(result: GridResult, threshold: Threshold) -> dict[str, Certificate]:
    """The loss of accuracy is against the model of the same step that was trained and audited without a defence."""
    return {
        plainly(part): certify(
            part.audit, threshold, trained=part.own, baseline=result.baselines.get(part.case.step)
        )
        for part in result.parts
    }
