"""What every other part stands on: types, errors, seeds, files. Importing it loads no torch."""

from gradveil.core.errors import GradveilError, unknown

__all__ = ["GradveilError", "unknown"]
