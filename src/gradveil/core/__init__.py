"""Types, errors, seeds and files that every other part needs. Importing it loads no torch."""

from gradveil.core.errors import GradveilError, unknown

__all__ = ["GradveilError", "unknown"]
