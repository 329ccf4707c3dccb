"""Files of tensors and arrays: sizes are known before memory is taken, and nothing in them is run.

What a file declares is compared with what it holds: the shapes in a header with the bytes behind
it, the sizes in an archive with a bound, since a small archive may unpack to any size.
"""

import io
import math
import mmap
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
import torch
from msgspec import Meta, Struct
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, _weights_only_unpickler, nn

from gradveil.core.errors import GradveilError, one_line
from gradveil.core.files import regular_file, shown
from gradveil.core.reading import convert, parse_json
from gradveil.core.text import shortened

LONGEST_HEADER = 100 << 20  # bytes; the safetensors library allows no more either
LONGEST_NAME = 1_000  # letters
LEAST = 1 << 30  # bytes that any file may unpack to, where its reader gives no bound
GROWTH = 20  # times its own size that a larger file may unpack to
METADATA = "__metadata__"
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
# With it a pickle of a few bytes makes a bytearray of any length, also under `weights_only`.
_SIZED = re.compile(rb"c(?:__builtin__|builtins)\nbytearray\n")

Size = Annotated[int, Meta(ge=0)]


class TensorEntry(Struct, frozen=True):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[Size]
    data_offsets: tuple[Size, Size]


class Header(Struct, frozen=True):
    """What the header of a safetensors file says: its tensors by name, and texts of its writer."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]


def safetensors_header(path: Path) -> Header:
    """Read the header alone, and check it against the size of the file."""
    size = regular_file(path).st_size
    where = f"{shown(path)} is no whole safetensors file"
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LONGEST_HEADER):
                raise GradveilError(f"{where}: a header of {length:,} bytes in a file of {size:,}")
            data = file.read(length)
    except OSError as error:
        raise GradveilError(f"cannot read {shown(path)}: {error.strerror or error}") from None
    found = parse_json(data, dict[str, dict[str, Any]], where)
    metadata = convert(found.pop(METADATA, {}), dict[str, str], f"{where}: {METADATA}")
    tensors = convert(found, dict[str, TensorEntry], where)
    for name, entry in tensors.items():
        check_name(name, path)
        start, end = entry.data_offsets
        if not start <= end <= size - 8 - length:
            raise GradveilError(f"{where}: {shown(name)} ends beyond the file")
    return Header(tensors, metadata)


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors, on the CPU, and the texts of the writer."""
    header = safetensors_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in header.tensors}, header.metadata
    except Exception as error:  # the library has errors of several types for damage
        raise GradveilError(
            f"{shown(path)} is no whole safetensors file: {shown(one_line(error))}"
        ) from None


def read_npz(path: Path, most: int | None = None) -> dict[str, NDArray[Any]]:
    """Return the arrays by name, of at most `most` bytes: by default 1 GiB or 20 times the file."""
    most = _bound(path, most)
    with zipfile.ZipFile(path) as archive:
        _check_sizes(path, archive, most)
        for info in archive.infolist():
            check_name(info.filename, path)
            with archive.open(info) as member:
                _check_array(path, info, member)
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def read_array(data: bytes) -> NDArray[Any]:
    """Return the array of a .npy file in memory; ValueError if damaged or of Python objects."""
    wanted = array_bytes(io.BytesIO(data))
    if wanted != len(data):
        raise ValueError(f"it has {len(data):,} bytes, {wanted:,} by its header")
    return np.load(io.BytesIO(data), allow_pickle=False)  # type: ignore[no-any-return]


def array_bytes(file: IO[bytes]) -> int:
    """Count the bytes of a .npy file, header included, by its header; ValueError if damaged."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0
        shape, _, dtype = (read if version == (1, 0) else np.lib.format.read_array_header_2_0)(file)
    except Exception as error:  # a header is a Python literal: also errors of the tokenizer
        raise ValueError(one_line(error)) from None
    if dtype.hasobject:
        raise ValueError("an array of Python objects, which would have to be unpickled")
    return file.tell() + math.prod(shape) * dtype.itemsize


def load_pickled(path: Path, most: int | None = None) -> Any:
    """Return the content of a file of `torch.save`, on the CPU; `most` is as for `read_npz`.

    Anything but tensors and plain values is refused, and no code is run.
    """
    most = _bound(path, most)
    try:
        with path.open("rb") as file:
            return _unpickled(file, path, most)
    except OSError as error:
        raise GradveilError(f"cannot read {shown(path)}: {error.strerror or error}") from None


def unpickle(data: bytes, path: Path) -> Any:
    """Return the content of bytes of `torch.save`, read as `load_pickled` reads whole files."""
    return _unpickled(io.BytesIO(data), path, max(LEAST, GROWTH * len(data)))


def _unpickled(file: IO[bytes], path: Path, most: int) -> Any:
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                _check_sizes(path, archive, most)
                pickles = [name for name in archive.namelist() if name.endswith(".pkl")]
                texts = [archive.read(name) for name in pickles]
                sized = any(map(_SIZED.search, texts))
        elif isinstance(file, io.BytesIO):
            sized = bool(_SIZED.search(file.getbuffer()))
        else:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                sized = bool(_SIZED.search(text))
        if sized:
            raise GradveilError(f"{shown(path)} is refused: it asks for builtins.bytearray")
        file.seek(0)
        with _short_errors():
            return torch.load(file, map_location="cpu", weights_only=True)
    except GradveilError:
        raise
    except Exception as error:
        # Torch's own advice is to unpickle anyway, which would run the code in the file.
        asked = re.search(r"GLOBAL (\S+)", str(error))
        why = (
            f"it asks for {shown(asked[1])}"
            if asked
            else f"it is damaged or no torch file ({type(error).__name__})"
        )
        raise GradveilError(f"{shown(path)} is refused: {why}") from error


class _ShortError(pickle.UnpicklingError):
    """An error of torch's reader, whose text may quote the file."""

    def __init__(self, text: str) -> None:
        super().__init__(shortened(text, LONGEST_NAME))


@contextmanager
def _short_errors() -> Iterator[None]:
    """Let torch's reader raise short errors.

    `torch.load` searches their text by a pattern that takes the square of its length, hours where
    the file asks for a name of a million letters. There is no public way to prevent that.
    """
    module: Any = _weights_only_unpickler
    plain, module.UnpicklingError = module.UnpicklingError, _ShortError
    try:
        yield
    finally:
        module.UnpicklingError = plain


def plain_tensor(value: object) -> bool:
    """Tell whether it is a dense tensor on the CPU of a type that weights have."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_nested
        and value.device.type == "cpu"
        and value.dtype in DTYPES
    )


def check_name(name: str, path: Path) -> None:
    """Refuse a tensor's name that is too long."""
    if len(name) > LONGEST_NAME:
        raise GradveilError(
            f"{shown(path)}: a tensor's name has {len(name):,} letters, at most {LONGEST_NAME:,}"
        )


def _bound(path: Path, most: int | None) -> int:
    size = regular_file(path).st_size
    return max(LEAST, GROWTH * size) if most is None else most


def _check_sizes(path: Path, archive: zipfile.ZipFile, most: int) -> None:
    total = sum(info.file_size for info in archive.infolist())
    if total > most:
        raise GradveilError(
            f"{shown(path)} is refused: it would unpack to {total:,} bytes, at most {most:,} may be"
        )


def _check_array(path: Path, info: zipfile.ZipInfo, member: IO[bytes]) -> None:
    name = shown(info.filename)
    try:
        wanted = array_bytes(member)
    except ValueError as error:
        raise GradveilError(
            f"{shown(path)} cannot be read as .npz: {name}: {shown(error)}"
        ) from None
    if wanted != info.file_size:
        raise GradveilError(
            f"{shown(path)} cannot be read as .npz: {name} has {info.file_size:,} bytes,"
            f" {wanted:,} by its header"
        )
