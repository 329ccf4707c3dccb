"""Data sets in their official layouts, checked, decoded once, and mapped into memory."""

from gradveil.data.base import Dataset
from gradveil.data.download import fetch
from gradveil.data.files import Verification
from gradveil.data.images import Batches, Images
from gradveil.data.registry import catalog, find_root, load, verify

__all__ = [
    "Batches",
    "Dataset",
    "Images",
    "Verification",
    "catalog",
    "fetch",
    "find_root",
    "load",
    "verify",
]
