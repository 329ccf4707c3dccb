"""The audit's folder: whose it is, and how its pictures are kept."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gradveil.audits.records import RECORDS
from gradveil.core.errors import GradveilError
from gradveil.core.files import write_bytes
from gradveil.core.job_folder import SETTINGS, Kind, locked, remove_empty
from gradveil.core.job_folder import claim as claim  # a part of this module too

IMAGES = "images"
PICTURES = "pictures"
AUDIT = Kind("an audit", "audit")


def slug(name: str) -> str:
    """A name as part of a file's."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", name)


def images_path(out: Path, kind: str, attack: str, chunk: int) -> Path:
    return (
        out
        / IMAGES
        / f"{'positive-' if kind == 'positive' else ''}{slug(attack)}-{chunk:04d}.safetensors"
    )


def save_images(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """uint8 tensors, whole or not at all."""
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_bytes(path, save(plain, metadata={"gradveil": json.dumps(dict(facts))}))


def load_images(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, json.loads((file.metadata() or {})["gradveil"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise GradveilError(
            f"{path} is missing or damaged ({type(error).__name__}): audit into another --out"
        ) from None


def read_settings(out: Path) -> dict[str, Any]:
    return AUDIT.read(out)


def refuse_other(out: Path, wanted: Mapping[str, Any]) -> None:
    """An error if the folder holds anything but this very audit. Nothing is written."""
    AUDIT.refuse_other(out, wanted)


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """While no other process audits into the claimed folder."""

    def refuse() -> None:
        raise GradveilError(
            f"another process is auditing into {out}: wait for it, or choose another --out"
        )

    with locked(out / SETTINGS, refuse):
        yield


def release(out: Path) -> None:
    """After a failure: give the folder back, unless it holds records."""
    if (out / RECORDS).exists() and (out / RECORDS).stat().st_size:
        return
    for path in (*out.glob(f"{IMAGES}/*.safetensors"), out / RECORDS, out / SETTINGS):
        path.unlink(missing_ok=True)
    remove_empty(out / IMAGES, out)
