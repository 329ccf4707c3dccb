"""The audit: attack what clients share, beside blind guesses and an easy model as controls."""

from gradveil.audits.certificates import Certificate, Threshold, certify
from gradveil.audits.job import AuditJob, Case, make_cases, name_attacks
from gradveil.audits.records import Record, read_records
from gradveil.audits.results import AuditResult, CaseResult, Row
from gradveil.audits.run import audit, run_audit

__all__ = [
    "AuditJob",
    "AuditResult",
    "Case",
    "CaseResult",
    "Certificate",
    "Record",
    "Row",
    "Threshold",
    "audit",
    "certify",
    "make_cases",
    "name_attacks",
    "read_records",
    "run_audit",
]
