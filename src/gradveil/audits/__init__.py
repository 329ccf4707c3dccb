"""The audit: attack the gradients of real images, beside blind guesses and a model where the attack is known to work."""

from gradveil.audits.cases import Case, GridJob
from gradveil.audits.certificates import Certificate, Threshold, certify
from gradveil.audits.grids import GridResult, Part, grid
from gradveil.audits.jobs import AuditJob
from gradveil.audits.records import Record, read_records
from gradveil.audits.results import AuditResult, Row
from gradveil.audits.runs import audit

__all__ = [
    "AuditJob",
    "AuditResult",
    "Case",
    "Certificate",
    "GridJob",
    "GridResult",
    "Part",
    "Record",
    "Row",
    "Threshold",
    "audit",
    "certify",
    "grid",
    "read_records",
]
