"""The doctor: what an audit would meet, said before it starts. Each check is one small function of a case."""

from gradveil.checks.doctor import CHECKS, before_audit, diagnose, self_check
from gradveil.checks.subject import Finding, Subject

__all__ = ["CHECKS", "Finding", "Subject", "before_audit", "diagnose", "self_check"]
