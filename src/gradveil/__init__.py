"""What shared gradients give away in collaborative learning, and the defences that stop it.

The jobs are functions here, `gradveil.audit(AuditJob(...), out)` and `gradveil.train(Job(...), out)`; the search is
`gradveil.search.search(SearchJob(...), out)`, since the package has the name. The parts are in the packages below.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gradveil.audits import AuditJob, AuditResult, audit
    from gradveil.search import SearchJob, SearchResult
    from gradveil.training import Recipe, TrainingJob, TrainingResult, train
    from gradveil.transforms import Policy

__all__ = [
    "AuditJob",
    "AuditResult",
    "Policy",
    "Recipe",
    "SearchJob",
    "SearchResult",
    "TrainingJob",
    "TrainingResult",
    "__version__",
    "audit",
    "train",
]

_HOMES = {
    **dict.fromkeys(("AuditJob", "AuditResult", "audit"), "gradveil.audits"),
    **dict.fromkeys(("SearchJob", "SearchResult"), "gradveil.search"),
    **dict.fromkeys(("TrainingJob", "Recipe", "TrainingResult", "train"), "gradveil.training"),
    "Policy": "gradveil.transforms",
}


def __getattr__(name: str) -> object:
    """Imported when first asked for: `import gradveil` itself loads neither torch nor Lightning."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gradveil' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
