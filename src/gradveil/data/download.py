"""Downloading the official files.

A download goes on where it stopped, is tried again when the connection breaks, and is kept only
when the checksum is right.
"""

import errno
import http.client
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path

from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.files import check_writable, opened, write_all
from gradveil.core.locks import held
from gradveil.data.base import Dataset
from gradveil.data.files import File, Verification, check, unpack
from gradveil.data.images import SPLITS
from gradveil.data.registry import find_root, find_source

Progress = Callable[[str, int, int | None], None]
"""(file, bytes so far, total bytes if known) -> None."""

ATTEMPTS = 5
TIMEOUT = 30.0  # seconds
READ_BYTES = 1 << 18  # at a time

# Errors of this machine's disk, which another attempt would not mend.
LOCAL = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EISDIR,
}


def fetch(name: str, root: Path | None = None, progress: Progress | None = None) -> Verification:
    """Download the missing files of a data set and verify it, telling `progress` on the way."""
    source = find_source(name)
    if not isinstance(source, Dataset):
        raise GradveilError(f"{name} is a folder of your own: there is nothing to fetch")
    return fetched(source, find_root(root), progress)


def fetched(
    dataset: Dataset, root: Path, progress: Progress | None = None, *, wait: float = 1.0
) -> Verification:
    """Fetch and verify a data set; `wait` seconds before a second attempt, then twice as long."""
    state = dataset.verify(root)
    if not state.ok:
        if not dataset.downloads:
            raise GradveilError(
                f"{dataset.name} has no open download: "
                f"get it from {dataset.home} and place {', '.join(dataset.layout)} in {root}"
            )
        with held(root, _wait_for):  # of two processes one downloads
            for file in dataset.downloads:
                if not check(root, file).ok:
                    _download(dataset, file, root, progress or _quiet, wait)
        if dataset.archive:
            unpack(root, dataset.archive)
    for split in SPLITS:
        dataset.sources(root, split)  # unpacks an archive that was there already
    return dataset.verify(root)


def _wait_for(holder: str) -> None:
    warnings.warn(f"{holder} is downloading: waiting for it", GradveilWarning, stacklevel=2)


def _quiet(_name: str, _done: int, _total: int | None) -> None:
    return None


def _download(dataset: Dataset, file: File, root: Path, progress: Progress, wait: float) -> None:
    target = root / file.path
    part = target.with_name(f"{target.name}.part")
    for path in (target, part):
        check_writable(path)
    problem = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(wait * 2 ** (attempt - 1))
        try:
            resumed = _transfer(file, part, progress)
            state = check(root, File(f"{file.path}.part", file.md5, file.size))
            if state.ok:
                part.replace(target)
                return
            part.unlink()
            problem = f"the download is {state.problem}"
            if not resumed:  # a fresh download that differs will differ again
                break
        except urllib.error.HTTPError as error:
            problem = f"the server answered {error.code} {error.reason}"
            error.close()
            if error.code < 500:
                break
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in LOCAL:
                raise GradveilError(
                    f"cannot write {part}: {error.strerror}; the part so far is kept"
                ) from error
            problem = str(error)
    raise _unreachable(dataset, file, root, problem)


def _transfer(file: File, part: Path, progress: Progress) -> bool:
    """Append the rest of the server's file to the partial one; tell whether that went on."""
    assert file.url is not None
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(file.url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        error.close()  # nothing is left to send: the checksum tells whether the file is whole
        return True
    with response:
        resumed: bool = response.status == http.client.PARTIAL_CONTENT
        length = response.headers.get("Content-Length")
        done = done if resumed else 0
        total = done + int(length) if length else None
        with opened(part) as out:
            out.truncate(done)
            out.seek(done)
            while chunk := response.read(READ_BYTES):
                write_all(out, chunk)
                done += len(chunk)
                progress(Path(file.path).name, done, total)
    if total is not None and done < total:
        raise ConnectionError(f"the connection ended after {done} of {total} bytes")
    return resumed


def _unreachable(dataset: Dataset, file: File, root: Path, problem: str) -> GradveilError:
    wanted = ", ".join(f"{entry.url} as {root / entry.path}" for entry in dataset.downloads)
    return GradveilError(
        f"cannot download {file.url}: {problem}; run again to go on, or place by hand {wanted}"
    )
