"""The search for policies that leak little and cost little accuracy, confirmed by audits."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradveil.search.job import SearchJob
    from gradveil.search.results import SearchResult, TriedPolicy
    from gradveil.search.run import run_search, search_policies

__all__ = ["SearchJob", "SearchResult", "TriedPolicy", "run_search", "search_policies"]

_HOMES = {
    "SearchJob": "job",
    "SearchResult": "results",
    "TriedPolicy": "results",
    "run_search": "run",
    "search_policies": "run",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    """Import a name when it is first asked for: most modules here need few of the others."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gradveil.search' has no attribute {name!r}")
    return getattr(import_module(f"gradveil.search.{_HOMES[name]}"), name)
