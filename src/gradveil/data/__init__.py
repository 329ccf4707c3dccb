"""Datasets in their official layouts, checked, decoded once, and mapped into memory."""

from gradveil.data.base import Dataset
from gradveil.data.download import fetch
from gradveil.data.files import FileCheck, Verification
from gradveil.data.images import Images
from gradveil.data.registry import catalog, find_root, load, verify

__all__ = [
    "Dataset",
    "FileCheck",
    "Images",
    "Verification",
    "catalog",
    "fetch",
    "find_root",
    "load",
    "verify",
]
