"""The doctor: what an audit would meet, said before it starts. Each check is one small function of a case."""

from gradveil.checks.cases import Case
from gradveil.checks.diagnosis import CHECKS, before_audit, diagnose
from gradveil.checks.findings import Finding
from gradveil.checks.self_checks import self_check

__all__ = ["CHECKS", "Case", "Finding", "before_audit", "diagnose", "self_check"]
