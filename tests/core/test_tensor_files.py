"""Sizes of tensors and arrays are compared before memory is taken, and no pickle is run."""

import json
import os
import resource
import struct
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gradveil.core.errors import GradveilError
from gradveil.core.tensor_files import (
    load_pickled,
    plain_tensor,
    read_npz,
    read_safetensors,
    safetensors_header,
    unpickle,
)

GIB = 1 << 30


@contextmanager
def at_most_more(size: int) -> Iterator[None]:
    """Taking more than this many bytes of address space fails within the block."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:  # noqa: PTH123
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def npy(shape: tuple[int, ...], data: bytes = b"", descr: str = "<f4") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text + b"\n" + data


def zipped(path: Path, members: dict[str, bytes | int]) -> Path:
    """A number stands for so many zeros."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in members.items():
            with archive.open(name, "w", force_zip64=True) as member:
                if isinstance(content, bytes):
                    member.write(content)
                else:
                    for _ in range(content >> 20):
                        member.write(bytes(1 << 20))
    return path


def test_arrays_come_back(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(6.0).reshape(2, 3), y=np.zeros((0, 2), np.int8))
    np.savez_compressed(tmp_path / "b.npz", z=np.array(3.5))
    found = read_npz(tmp_path / "a.npz")
    assert found["x"].tolist() == [[0, 1, 2], [3, 4, 5]] and found["y"].shape == (0, 2)
    assert read_npz(tmp_path / "b.npz")["z"] == 3.5


def test_an_archive_that_would_unpack_to_more_than_the_bound_is_refused_unread(
    tmp_path: Path,
) -> None:
    head = npy((GIB // 4 * 3,))
    path = zipped(tmp_path / "x.npz", {"w.npy": 8 << 20})
    with pytest.raises(GradveilError, match=r"x\.npz is refused: it would unpack to 8,388,608"):
        read_npz(path, most=1 << 20)
    data = bytearray(path.read_bytes())  # its directory now declares 3 GiB
    size = data.rindex(struct.pack("<L", 8 << 20))
    data[size : size + 4] = struct.pack("<L", 3 * GIB)
    path.write_bytes(data)
    for read in (read_npz, load_pickled):
        with at_most_more(GIB // 2), pytest.raises(GradveilError, match="unpack to 3,221,225,472"):
            read(path)
    lying = zipped(tmp_path / "y.npz", {"w.npy": head + bytes(100)})
    with (
        at_most_more(GIB // 2),
        pytest.raises(GradveilError, match=r"w\.npy has .* bytes, 3,221,225,\d+ by its header"),
    ):
        read_npz(lying)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"no array", "cannot be read as .npz: w.npy"),
        (npy((2,), b"x" * 7), "w.npy has .* bytes"),
        (npy((1,), b"x" * 8, "|O"), "Python objects"),
        (npy((-1,), b""), "by its header"),
        (npy((2,), bytes(8)).replace(b"}", b" "), "cannot be read as .npz: w.npy"),
    ],
)
def test_a_damaged_array_is_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    with pytest.raises(GradveilError, match=says) as caught:
        read_npz(zipped(tmp_path / "x.npz", {"w.npy": content}))
    assert "\n" not in str(caught.value) and "x.npz" in str(caught.value)


@pytest.mark.parametrize("letters", [1_001, 100_000 // 2])
def test_a_long_name_is_refused(tmp_path: Path, letters: int) -> None:
    zipped(tmp_path / "x.npz", {"a" * letters: npy((0,))})
    save_file({"module." * (letters // 7 + 1): torch.zeros(1)}, tmp_path / "x.safetensors")
    for read, name in ((read_npz, "x.npz"), (read_safetensors, "x.safetensors")):
        with pytest.raises(GradveilError, match=rf"{name}: a tensor's name has [\d,]+ letters"):
            read(tmp_path / name)


def header(path: Path, content: object, data: bytes = b"", length: int | None = None) -> Path:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def test_a_header_is_read_without_the_tensors(tmp_path: Path) -> None:
    path = header(tmp_path / "x", {"w": ENTRY, "__metadata__": {"a": "b"}}, bytes(8))
    found = safetensors_header(path)
    assert found.metadata == {"a": "b"} and found.tensors["w"].shape == [2]
    assert read_safetensors(path)[0]["w"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("content", "length", "says"),
    [
        (b"", None, "truncated"),
        ({"w": ENTRY}, 1 << 62, "a header of .* bytes in a file of"),
        ({"w": ENTRY | {"data_offsets": [0, 9]}}, None, "w ends beyond the file"),
        ({"w": ENTRY | {"data_offsets": [8, 0]}}, None, "w ends beyond the file"),
        ({"w": ENTRY | {"shape": [-2]}}, None, "expected int >= 0"),
        ({"w": ENTRY | {"shape": "2"}}, None, "expected array, got str"),
        ({"w": ENTRY | {"shape": [1 << 40]}}, None, "is no whole safetensors file"),
        ({"w": ENTRY | {"dtype": "F99"}}, None, "is no whole safetensors file"),
        ({"w": 3}, None, "expected object, got int"),
        ({"w": ENTRY, "__metadata__": {"a": 1}}, None, "__metadata__.*expected str, got int"),
        (b'{"w": ' + b"[" * 100_000, None, "nested 100001 deep"),
    ],
)
def test_a_header_that_lies_is_one_line(
    tmp_path: Path, content: object, length: int | None, says: str
) -> None:
    with pytest.raises(GradveilError, match=says) as caught:
        read_safetensors(header(tmp_path / "x.st", content, bytes(8), length))
    assert str(caught.value).startswith(f"{tmp_path}/x.st is no whole safetensors file")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


class Large:
    """A few bytes that ask for a gigabyte."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return bytearray, (GIB,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_cannot_ask_for_memory_or_code(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=zipped)
    assert load_pickled(path)["w"].tolist() == [1, 1]
    for content, asked in ((Large(), "bytearray"), (os.getcwd, "getcwd")):
        torch.save({"w": content}, path, _use_new_zipfile_serialization=zipped)
        with at_most_more(GIB // 2), pytest.raises(GradveilError, match=rf"refused: .*{asked}"):
            load_pickled(path)


class Called:
    """A pickle that calls something: a name that is none, of many letters."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.getcwd, ()


@pytest.mark.parametrize("name", [b"x" * 100_000, b"os\n" + b"x" * 100_000])
def test_a_name_of_many_letters_in_a_pickle_is_refused_at_once(tmp_path: Path, name: bytes) -> None:
    """Torch searches its error's text in a time that grows with the square of its length."""
    path = tmp_path / "x.pt"
    torch.save(Called(), path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    assert data.count(b"cposix\ngetcwd") == 1
    path.write_bytes(data.replace(b"cposix\ngetcwd", b"c" + name + b"\ngetcwd"))
    began = time.process_time()
    with pytest.raises(GradveilError, match=r"x\.pt is refused: it asks for .*x"):
        load_pickled(path)
    with pytest.raises(GradveilError, match=r"x\.pt is refused: it asks for .*x"):
        unpickle(path.read_bytes(), path)
    assert time.process_time() - began < 2


def test_what_is_no_dense_tensor_of_numbers_is_told_apart() -> None:
    dense = torch.ones(2, 2)
    assert plain_tensor(dense) and plain_tensor(nn.Parameter(dense)) and plain_tensor(dense.T)
    for other in (
        dense.to_sparse(),
        dense.to("meta"),
        dense.to(torch.complex64),
        dense.tolist(),
        None,
    ):
        assert not plain_tensor(other)
    assert not plain_tensor(dense.to(torch.float8_e5m2))
