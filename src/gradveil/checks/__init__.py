"""The doctor: what an audit would meet, said before it starts. Each check is a small function."""

from gradveil.checks.doctor import CHECKS, before_audit, diagnose, self_check
from gradveil.checks.subject import Diagnosis, Finding, Subject

__all__ = [
    "CHECKS",
    "Diagnosis",
    "Finding",
    "Subject",
    "before_audit",
    "diagnose",
    "self_check",
]
