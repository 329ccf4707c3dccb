"""The audit's folder: whose it is, and how its pictures are kept."""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gradveil.audits.records import RECORDS
from gradveil.core.errors import GradveilError
from gradveil.core.files import write_bytes, write_text

if sys.platform != "win32":
    import fcntl

SETTINGS = "settings.json"
IMAGES = "images"
PICTURES = "pictures"
SHORT = 60  # letters of a setting that a message can show


def slug(name: str) -> str:
    """A name as part of a file's."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", name)


def images_path(out: Path, kind: str, attack: str, chunk: int) -> Path:
    return out / IMAGES / f"{'positive-' if kind == 'positive' else ''}{slug(attack)}-{chunk:04d}.safetensors"


def save_images(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """uint8 tensors, whole or not at all."""
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_bytes(path, save(plain, metadata={"gradveil": json.dumps(dict(facts))}))


def load_images(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads((file.metadata() or {})["gradveil"])  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise GradveilError(f"{path} is missing or damaged ({type(error).__name__}): audit into another --out") from None


def read_settings(out: Path) -> dict[str, Any]:
    path = out / SETTINGS
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        raise GradveilError(f"{out} holds no audit: there is no {SETTINGS} in it") from None
    except (OSError, ValueError, TypeError):
        raise GradveilError(f"{path} is no JSON object of settings: choose another --out") from None


def refuse_other(out: Path, wanted: Mapping[str, Any]) -> None:
    """An error if the folder holds anything but this very audit. Nothing is written."""
    if out.exists() and not out.is_dir():
        raise GradveilError(f"{out} is a file: choose another --out, a folder")
    if not (out / SETTINGS).is_file():
        if out.is_dir() and any(not entry.name.endswith(".part") for entry in out.iterdir()):
            raise GradveilError(f"{out} is not empty and holds no audit: choose another --out")
        return
    found, here = read_settings(out), json.loads(json.dumps(wanted))
    other = sorted(key for key in here.keys() | found.keys() if here.get(key) != found.get(key))
    if other:
        changes = ", ".join(_change(key, found.get(key), here.get(key)) for key in other)
        raise GradveilError(f"{out} holds an audit with other settings ({changes}): choose another --out")


def _change(key: str, there: object, here: object) -> str:
    short = max(len(str(there)), len(str(here))) <= SHORT
    return f"{key} {there} there, {here} here" if short else f"other {key}"


def claim(out: Path, wanted: Mapping[str, Any]) -> None:
    """Make the folder this audit's own, and rid it of files that a killed run was writing."""
    for unfinished in [*out.glob(".*.part"), *out.glob("*/.*.part")]:
        unfinished.unlink(missing_ok=True)
    if not (out / SETTINGS).is_file():
        write_text(out / SETTINGS, json.dumps(dict(wanted), indent=2, sort_keys=True) + "\n")


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """While no other process audits into the claimed folder. The lock goes with the process, however it ends."""
    with (out / SETTINGS).open("rb") as file:
        if sys.platform != "win32":  # which has no such lock
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise GradveilError(f"another process is auditing into {out}: wait for it, or choose another --out") from None
        yield


def release(out: Path) -> None:
    """After a failure: give the folder back, unless it holds records."""
    if (out / RECORDS).exists() and (out / RECORDS).stat().st_size:
        return
    for path in (*out.glob(f"{IMAGES}/*.safetensors"), out / RECORDS, out / SETTINGS):
        path.unlink(missing_ok=True)
    for folder in (out / IMAGES, out):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
