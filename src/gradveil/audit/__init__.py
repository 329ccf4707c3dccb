"""The audit: attack the gradients of real images, beside blind guesses and a model where the attack is known to work."""

from gradveil.audit.jobs import AuditJob
from gradveil.audit.records import Record, read_records
from gradveil.audit.results import AuditResult, Row
from gradveil.audit.runs import audit

__all__ = ["AuditJob", "AuditResult", "Record", "Row", "audit", "read_records"]
