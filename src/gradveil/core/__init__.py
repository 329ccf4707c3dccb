"""What every other part stands on: types, errors, seeds, files."""

from gradveil.core.errors import GradveilError, unknown
from gradveil.core.types import Batch

__all__ = ["Batch", "GradveilError", "unknown"]
