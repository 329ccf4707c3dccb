"""The base of every other part: types, errors, files, seeds, progress, imports by name."""

from gradveil.core.errors import GradveilError, unknown
from gradveil.core.types import Batch

__all__ = ["Batch", "GradveilError", "unknown"]
