"""What shared gradients give away in collaborative learning, and the defences that stop it.

The jobs are functions here, `gradveil.audit(AuditJob(...), out)` and `gradveil.train(Job(...), out)`; the parts are in the packages below.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gradveil.audits import AuditJob, AuditResult, audit
    from gradveil.training import Job, Recipe, Trained, train
    from gradveil.transforms import Policy

__all__ = ["AuditJob", "AuditResult", "Job", "Policy", "Recipe", "Trained", "__version__", "audit", "train"]

_HOMES = {
    **dict.fromkeys(("AuditJob", "AuditResult", "audit"), "gradveil.audits"),
    **dict.fromkeys(("Job", "Recipe", "Trained", "train"), "gradveil.training"),
    "Policy": "gradveil.transforms",
}


def __getattr__(name: str) -> object:
    """Imported when first asked for: `import gradveil` itself loads neither torch nor Lightning."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gradveil' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
