"""The search: draw policies, drop those that cost accuracy, keep those that leak least, and confirm them by an audit."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradveil.search.job import SearchJob
    from gradveil.search.results import Found, SearchResult
    from gradveil.search.run import search

__all__ = ["Found", "SearchJob", "SearchResult", "search"]

_HOMES = {"SearchJob": "job", "Found": "results", "SearchResult": "results", "search": "run"}


def __getattr__(name: str) -> object:
    """Imported when first asked for: a module of this package needs none of the others."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gradveil.search' has no attribute {name!r}")
    return getattr(import_module(f"gradveil.search.{_HOMES[name]}"), name)
