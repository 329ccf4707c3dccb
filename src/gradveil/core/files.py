"""Files that are either whole or not there: written beside their place, then renamed."""

import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder that becomes `path` when the block ends well, and vanishes when it does not.

    A disk that is full or a place that cannot be written becomes a `GradveilError`.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        raise _explained(error, path) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _explained(error: OSError, path: Path) -> GradveilError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return GradveilError(
            f"no space left on the disk while writing {path}: nothing was kept of it; free some space and run again"
        )
    if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        return GradveilError(
            f"cannot write {path}: {error.strerror}; a file stands where a folder should, or the reverse"
        )
    return GradveilError(f"cannot write {path}: {error.strerror or error}; choose another folder")


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256, in hexadecimal digits."""
    hashed = hashlib.sha256()
    for name, value in tensors.items():
        hashed.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        hashed.update(
            value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return hashed.hexdigest()
