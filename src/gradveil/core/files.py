"""Files on disk: which may be read or written, and writing that leaves a whole file or none.

Every file of the package is written here. A path that a user names may lead through links, as
`runs -> /disk/runs` does; what lies in a job's folder may not lead out of it (`refuse_ways_out`).
"""

import errno
import glob
import gzip
import hashlib
import os
import stat
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.text import on_one_line, shortened

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a link",
}
LONGEST = 300  # letters of a text from outside that a message shows
DEEPEST = 100  # folders in a path
NAME = 100  # letters of a file's name that its temporary file repeats: systems allow about 255
BLOCK = 1 << 16  # bytes read at once from the end of a file
SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""A link is not followed, and a FIFO not waited for, whatever `check_writable` saw before."""


class MissingFileError(GradveilError):
    """No file has this path."""


class WriteError(GradveilError):
    """A file cannot be written, as on a full disk."""


def shown(text: object, longest: int = LONGEST) -> str:
    """Return a text from outside for a message: printable, on one line, cut in the middle.

    Letters that cannot be printed become escapes such as `\\n`.
    """
    return on_one_line(shortened(str(text), longest))


def regular_file(path: Path) -> os.stat_result:
    """Return the state of a regular file, links followed; refuse anything else.

    A FIFO would let its reader wait for ever, a device may never end: neither is opened.
    """
    try:
        state = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(f"no file at {shown(path)}") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise GradveilError(f"cannot read {shown(path)}: {_reason(error)}") from None
    if not stat.S_ISREG(state.st_mode):
        raise GradveilError(f"cannot read {shown(path)}: it is {_kind(state)}, no regular file")
    return state


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a regular file; one of more than `most` bytes is refused, not read."""
    size = regular_file(path).st_size
    if size > most:
        raise GradveilError(f"cannot read {shown(path)}: it has {size:,} bytes, at most {most:,}")
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise GradveilError(f"cannot read {shown(path)}: {_reason(error)}") from None
    if len(data) > most:  # it grew meanwhile, or is one of the files that the kernel makes up
        raise GradveilError(f"cannot read {shown(path)}: it has more than {most:,} bytes")
    return data


def read_gzipped(path: Path, most: int) -> bytes:
    """Return the content of a file that gzip has packed; refuse more than `most` bytes."""
    regular_file(path)
    try:
        with gzip.open(path) as file:
            data = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise GradveilError(f"cannot read {shown(path)}: {shown(error)}") from None
    if len(data) > most:
        raise GradveilError(f"cannot read {shown(path)}: it unpacks to more than {most:,} bytes")
    return data


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[Path]:
    """Give a temporary path in the same folder that becomes `path` when the block ends well.

    It vanishes when the block fails. `path` may be new, a regular file, or a link to a regular
    file in the same folder: then that file is replaced and the link stays. Devices, FIFOs, folders
    and other links are refused before anything is written: a link may have come with a folder from
    elsewhere, and must not choose which file of the user is lost. A full disk becomes a
    `GradveilError` too. `mode` is that of the file; by default the user's mask decides.
    """
    temporary: Path | None = None
    try:
        target = _replaceable(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(
            dir=target.parent, prefix=f".{target.name[:NAME]}.", suffix=".part"
        )
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o666 & ~_umask() if mode is None else mode)
        temporary.replace(target)
    except OSError as error:
        raise _explained(error, path) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def remove_unfinished(folder: Path, patterns: Iterable[str]) -> None:
    """Remove the temporary files of `replacing` that killed processes left in the folder.

    Nobody else may be writing there: whoever calls this holds a lock.
    """
    for pattern in patterns:
        for path in folder.glob(pattern):
            if not (path.is_dir() or path.parent.is_symlink()):
                path.unlink(missing_ok=True)


def unfinished(path: Path) -> str:
    """Return the pattern of the temporary files of `replacing` for this path, in its folder."""
    return f".{glob.escape(path.name[:NAME])}.*.part"


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8, whole or not at all."""
    write_bytes(path, text.encode())


def append_lines(path: Path, data: bytes) -> None:
    """Add lines to the end of a file, made if need be; they have reached the disk at the end.

    A line that a killed process left unfinished is cut off first, or the two would run together.
    Where the disk is full nothing is added.
    """
    try:
        with opened(path) as file:
            start = _cut_unfinished_line(file)
            try:
                write_all(file, data)
                os.fsync(file.fileno())
            except BaseException:
                os.ftruncate(file.fileno(), start)
                raise
    except OSError as error:
        raise _explained(error, path) from error


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a regular file, made if need be, for reading and writing without a buffer.

    It is written in place: where it may be replaced as a whole, use `replacing`.
    """
    try:
        target = _replaceable(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(target, os.O_RDWR | os.O_CREAT | SAFELY, 0o666)
    except OSError as error:
        raise _explained(error, path) from error
    with os.fdopen(handle, "rb+", buffering=0) as file:
        if not stat.S_ISREG((state := os.fstat(handle)).st_mode):
            raise _refused(path, f"it is {_kind(state)}; choose a file")
        yield file


def write_all(file: IO[bytes], data: bytes) -> None:
    """Write into a file without a buffer, which may take a part of the data at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _cut_unfinished_line(file: IO[bytes]) -> int:
    """Cut off what follows the last newline; return the file's end, and leave it there."""
    size = end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - BLOCK)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        end = start + newline + 1
        if newline >= 0:
            break
    if end < size:
        file.truncate(end)
    return file.seek(end)


def refuse_ways_out(folder: Path) -> None:
    """Refuse a folder in which anything leads out of it, or is a device, a FIFO or a socket.

    The folder itself may be a link: the user chose it. What lies in it may have come from
    elsewhere, and a link there, such as `images -> /home/me`, must not choose where files go.
    """
    root = os.path.realpath(folder)
    waiting = [folder]
    while waiting:
        # Another process of the same job may have removed a folder meanwhile.
        with suppress(FileNotFoundError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    target = os.path.realpath(entry)
                    if os.path.commonpath([root, target]) != root:
                        raise GradveilError(
                            f"{shown(entry.path)} is a link to {shown(target)}, and a job writes "
                            "only into its own folder: remove the link, or choose another --out"
                        )
                elif entry.is_dir():
                    waiting.append(Path(entry))
                elif not entry.is_file():
                    raise GradveilError(
                        f"{shown(entry.path)} is {_kind(entry.stat())}, no file of a job: remove "
                        "it, or choose another --out"
                    )


def check_writable(path: Path) -> None:
    """Refuse a path that `replacing` would refuse. Nothing is written."""
    try:
        _replaceable(path)
    except OSError as error:
        raise _explained(error, path) from None


def _replaceable(path: Path) -> Path:
    """Return the file that is to be replaced: the path, or what it links to."""
    if len(path.parts) > DEEPEST:
        raise _refused(path, f"it lies {len(path.parts)} folders deep, at most {DEEPEST} may be")
    try:
        state = path.lstat()
    except FileNotFoundError:
        return path
    except ValueError:
        raise _refused(path, "its name holds a zero byte") from None
    if stat.S_ISREG(state.st_mode):
        return path
    if stat.S_ISDIR(state.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISLNK(state.st_mode):
        raise _refused(path, f"it is {_kind(state)}; choose a file")
    target = Path(os.path.realpath(path))
    if target.is_file() and target.parent == Path(os.path.realpath(path.parent)):
        return target
    raise _refused(path, f"it is a link to {shown(target)}; choose a file, or remove the link")


def _refused(path: Path, why: str) -> WriteError:
    return WriteError(f"cannot write {shown(path)}: {why}")


def _kind(state: os.stat_result) -> str:
    return KINDS.get(stat.S_IFMT(state.st_mode), "no file")


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _explained(error: OSError, path: Path) -> WriteError:
    name = shown(path)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WriteError(
            f"no space left on the disk while writing {name}: free some space and run again;"
            " what is there is whole"
        )
    if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        return WriteError(
            f"cannot write {name}: {error.strerror}; a file stands where a folder should,"
            " or the reverse"
        )
    return WriteError(f"cannot write {name}: {error.strerror or error}; choose another folder")


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and values, in hexadecimal digits."""
    hashed = hashlib.sha256()
    for name, value in tensors.items():
        hashed.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        hashed.update(
            value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return hashed.hexdigest()
