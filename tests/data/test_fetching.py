"""Downloads from a server on the loopback: whole, resumed, broken off, wrong, refused."""

import gzip
import hashlib
import io
import struct
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gradveil.core.errors import GradveilError
from gradveil.data import fetch
from gradveil.data.base import Dataset
from gradveil.data.cifar import CIFAR100
from gradveil.data.download import ATTEMPTS, fetched
from gradveil.data.fashion_mnist import FASHION_MNIST
from gradveil.data.files import File


@dataclass
class Server:
    """What it serves, how it fails, and what it was asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    breaks: int = 0  # how many answers end halfway
    ranges: bool = True
    status: int = 0  # answer only this
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        name, span = handler.path.lstrip("/"), handler.headers.get("Range")
        self.asked.append((name, span))
        data, start = self.files[name], 0
        if self.status:
            handler.send_error(self.status)
            return
        if span and self.ranges:
            start = int(span.removeprefix("bytes=").rstrip("-"))
            if start >= len(data):
                handler.send_error(416)
                return
        handler.send_response(206 if start else 200)
        handler.send_header("Content-Length", str(len(data) - start))
        handler.end_headers()
        end = len(data)
        if self.breaks:
            self.breaks -= 1
            end = (start + len(data)) // 2
        handler.wfile.write(data[start:end])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.answer(self)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        http.shutdown()
        thread.join()


@pytest.fixture
def fashion(server: Server) -> Dataset:
    """Fashion-MNIST with two images a file, at the test's own server."""
    files = []
    for file in FASHION_MNIST.files:
        name = Path(file.path).name
        shape = (2, 28, 28) if "images" in name else (2,)
        raw = struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape) + hashlib.shake_128(
            name.encode()
        ).digest(1568 if "images" in name else 2)
        data = server.files[name] = gzip.compress(raw)
        files.append(
            File(file.path, hashlib.md5(data).hexdigest(), len(data), f"{server.url}/{name}")
        )
    return replace(FASHION_MNIST, files=tuple(files))


def test_all_files_are_fetched_checked_and_reported(
    server: Server, fashion: Dataset, tmp_path: Path
) -> None:
    seen: list[tuple[str, int, int | None]] = []
    state = fetched(fashion, tmp_path, lambda *step: seen.append(step))
    assert state.ok and len(server.asked) == 4 and not list(tmp_path.rglob("*.part"))
    assert {name: done for name, done, total in seen if done == total} == {
        name: len(data) for name, data in server.files.items()
    }
    assert fashion.pixels(tmp_path, "test")[0].shape == (2, 1, 28, 28)


def test_what_is_there_is_not_fetched_again(
    server: Server, fashion: Dataset, tmp_path: Path
) -> None:
    fetched(fashion, tmp_path)
    server.asked.clear()
    assert fetched(fashion, tmp_path).ok and not server.asked
    (tmp_path / fashion.files[1].path).write_bytes(b"damaged")
    assert fetched(fashion, tmp_path).ok and [name for name, _ in server.asked] == [
        Path(fashion.files[1].path).name
    ]


def test_a_broken_connection_goes_on_where_it_stopped(
    server: Server, fashion: Dataset, tmp_path: Path
) -> None:
    server.breaks = 2
    assert fetched(fashion, tmp_path, wait=0).ok
    name, size = Path(fashion.files[0].path).name, fashion.files[0].size
    assert size is not None
    spans = [span for asked, span in server.asked if asked == name]
    assert spans[:2] == [None, f"bytes={size // 2}-"] and len(spans) == 3


def test_a_partial_file_of_an_earlier_run_is_resumed(
    server: Server, fashion: Dataset, tmp_path: Path
) -> None:
    server.breaks = 100
    with pytest.raises(
        GradveilError, match=r"the connection ended after \d+ of \d+ bytes; run again to go on"
    ):
        fetched(fashion, tmp_path, wait=0)
    (part,) = tmp_path.rglob("*.part")
    held, server.breaks = part.stat().st_size, 0
    server.asked.clear()
    assert held > 0 and fetched(fashion, tmp_path).ok and server.asked[0][1] == f"bytes={held}-"


def test_a_server_without_ranges_sends_the_file_anew(
    server: Server, fashion: Dataset, tmp_path: Path
) -> None:
    server.breaks, server.ranges = 1, False
    assert fetched(fashion, tmp_path, wait=0).ok


@pytest.mark.parametrize("extra", [0, 7])
def test_a_stale_partial_file_is_thrown_away(
    server: Server, fashion: Dataset, tmp_path: Path, extra: int
) -> None:
    part = tmp_path / f"{fashion.files[0].path}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(
        b"x" * (100 if not extra else len(server.files[Path(fashion.files[0].path).name]) + extra)
    )
    assert fetched(fashion, tmp_path, wait=0).ok


def test_a_whole_partial_file_needs_no_bytes_more(
    server: Server, fashion: Dataset, tmp_path: Path
) -> None:
    part = tmp_path / f"{fashion.files[0].path}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(server.files[Path(fashion.files[0].path).name])
    assert fetched(fashion, tmp_path, wait=0).ok


def test_a_wrong_file_is_not_kept(server: Server, fashion: Dataset, tmp_path: Path) -> None:
    name = Path(fashion.files[0].path).name
    server.files[name] = server.files[name][:-1] + b"?"
    with pytest.raises(
        GradveilError, match=f"cannot download {server.url}/{name}: the download is corrupted"
    ):
        fetched(fashion, tmp_path, wait=0)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()] and len(server.asked) == 1


@pytest.mark.parametrize(("status", "asked"), [(404, 1), (503, ATTEMPTS)])
def test_only_a_server_in_trouble_is_asked_again(
    server: Server, fashion: Dataset, tmp_path: Path, status: int, asked: int
) -> None:
    server.status = status
    with pytest.raises(GradveilError, match=f"the server answered {status}"):
        fetched(fashion, tmp_path, wait=0)
    assert len(server.asked) == asked


def test_without_a_network_the_error_says_what_to_place_where(
    fashion: Dataset, tmp_path: Path
) -> None:
    gone = replace(
        fashion,
        files=tuple(
            replace(file, url=f"http://127.0.0.1:9/{Path(file.path).name}")
            for file in fashion.files
        ),
    )
    with pytest.raises(GradveilError) as error:
        fetched(gone, tmp_path, wait=0)
    text = str(error.value)
    assert "\n" not in text and all(
        f"{file.url} as {tmp_path / file.path}" in text for file in gone.files
    )


def test_an_archive_is_fetched_and_unpacked_and_a_damaged_file_restored(
    server: Server, tmp_path: Path
) -> None:
    contents = {file.path: hashlib.sha512(file.path.encode()).digest() for file in CIFAR100.files}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as out:
        for name, data in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    server.files["x.tar.gz"] = packed.getvalue()
    assert CIFAR100.archive is not None
    archive = replace(
        CIFAR100.archive,
        file=File(
            "x.tar.gz", hashlib.md5(packed.getvalue()).hexdigest(), url=f"{server.url}/x.tar.gz"
        ),
    )
    files = tuple(File(path, hashlib.md5(data).hexdigest()) for path, data in contents.items())
    dataset = replace(CIFAR100, archive=archive, files=files)
    assert (
        fetched(dataset, tmp_path).ok
        and (tmp_path / "cifar-100-python/meta").read_bytes() == contents["cifar-100-python/meta"]
    )
    (tmp_path / "cifar-100-python/meta").write_bytes(b"damaged")
    assert fetched(dataset, tmp_path).ok and len(server.asked) == 1


def test_an_archive_alone_is_verified_and_unpacked_by_the_first_look(tmp_path: Path) -> None:
    assert CIFAR100.archive is not None
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as out:
        for file in CIFAR100.files:
            out.addfile(tarfile.TarInfo(file.path))
    md5 = hashlib.md5((tmp_path / "x.tar.gz").read_bytes()).hexdigest()
    dataset = replace(CIFAR100, archive=replace(CIFAR100.archive, file=File("x.tar.gz", md5)))
    state = dataset.verify(tmp_path)
    assert state.ok and "only the archive" in state.note
    assert all(path.is_file() for path in dataset.sources(tmp_path, "train"))


def test_a_set_without_an_open_address_says_where_to_get_it_and_how_to_place_it(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        GradveilError,
        match=r"no open download: get it from https://www\.kaggle\.com.*"
        r"medical-mnist/CXR/\*\.jpeg.* in ",
    ):
        fetch("medical-mnist", tmp_path)


def test_embedded_and_own_images_need_no_fetching(tmp_path: Path) -> None:
    assert fetch("fashion-mnist-mini", tmp_path).ok and not list(tmp_path.iterdir())
    with pytest.raises(GradveilError, match="folder of your own"):
        fetch(f"folder:{tmp_path}")


def test_a_root_that_cannot_be_written_is_one_line(fashion: Dataset, tmp_path: Path) -> None:
    (tmp_path / "FashionMNIST").write_text("in the way")
    with pytest.raises(GradveilError, match="cannot write "):
        fetched(fashion, tmp_path, wait=0)
