"""Arguments and files that no user means well with, for every command of the program."""

import io
import os
import socket
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

ESCAPES = "\x1b]0;title\x07\x1b[31m\x9b2J\u202eabc\rhidden"
NOT_UTF8 = os.fsdecode(b"\xff\xfe")

TEXTS = (
    *("", " ", ESCAPES, "a\nerror: none", NOT_UTF8, "x" * 100_000, "[bold]b[/]", "<b>&", "%s{0}"),
    *(
        "../../x",
        "none",
        "-",
        "--",
        "\u0663",
        "a" + ".a" * 50_000,
        ":",
        "a:b",
        "os:system",
        "9" * 5_000,
    ),
)
NUMBERS: tuple[str, ...] = (
    "-1",
    "0",
    "9" * 5_000,
    "99999999999999999999",
    "nan",
    "inf",
    "1e400",
    "",
    "\u0663",
    "1_0",
)
DEFENSES = (
    *("precode:k=1000000000", "precode:modules=1000000000", "random:count=100000000"),
    *(",then,".join(["clip:1"] * 2_000), "+".join(["3-1-7"] * 100_000), "-".join(["3"] * 100_000)),
    *("(" * 50_000, "3" + "-" * 100_000, "prune:" + "9" * 5_000, "prune:0.5," * 20_000),
    *("gaussian:1e400", "dp:norm=nan,multiplier=1", "dropout:1e-400", "a.b:C(" + "[" * 1_000),
    *("clip:1" + ",then," * 50_000, "policy:3,augment=" + ESCAPES, "soteria:" + NOT_UTF8),
)
POLICIES = ("+".join(["3-1-7"] * 100_000), "-".join(["3"] * 100_000), "translate_x(" + "9" * 5_000)
URLS = (
    *("sqlite://", "sqlite:///:memory:", "sqlite:////dev/full", "x://", "postgresql://u:secret@/"),
    *("sqlite:///" + "x" * 5_000, "mysql+pymysql://a:b@c/d", "://" + ESCAPES, "sqlite:///fifo"),
)


def make_files(folder: Path) -> list[str]:
    """Fill a folder with what is no file, or no such file; the names lie in it."""
    make_photos(folder / "photos")
    names = ["fifo", "socket", "folder", "empty", "link", "loop", "deep"]
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        here = Path.cwd()
        os.chdir(folder)  # the path of a socket may have about 100 letters
        bound.bind("socket")
        os.chdir(here)
    (folder / "folder").mkdir()
    (folder / "empty").touch()
    (folder / "link").symlink_to("/dev/zero")
    (folder / "loop").symlink_to("loop")
    (folder / "deep").write_bytes(b"[" * 100_000)
    huge = [("png", huge_png()), ("bmp", huge_bmp()), ("npz", bomb()), ("txt", b"9" * 5_000)]
    for suffix, data in huge:
        (folder / f"huge.{suffix}").write_bytes(data)
    lies = struct.pack("<Q", 2**62) + b"{}"
    shape = b'{"a": {"dtype": "F32", "shape": [999999999999], "data_offsets": [0, 3999999999996]}}'
    (folder / "lies.safetensors").write_bytes(lies)
    (folder / "shape.safetensors").write_bytes(struct.pack("<Q", len(shape)) + shape)
    names += [f"huge.{suffix}" for suffix, _ in huge] + ["lies.safetensors", "shape.safetensors"]
    keys = "format = 'gradveil policies 1'\na" + ".a" * 100_000 + " = 1\n"
    (folder / "dots.toml").write_text(keys)
    long = "+".join(["3-1-7"] * 100_000)
    policies = f"format = 'gradveil policies 1'\nbest = '{long}'\n[[policy]]\npolicy = '3'\n"
    (folder / "long.toml").write_text(policies)
    for name in (ESCAPES, NOT_UTF8):
        (folder / f"{name}.toml").write_text("best = ")
    names += ["dots.toml", "long.toml", f"{ESCAPES}.toml", f"{NOT_UTF8}.toml"]
    for suffix in (".toml", ".safetensors", ".npz", ".pt", ".png"):
        os.mkfifo(folder / f"fifo{suffix}")
        (folder / f"folder{suffix}").mkdir()
        (folder / f"link{suffix}").symlink_to("/dev/zero")
        (folder / f"deep{suffix}").write_bytes(b"[" * 100_000)
        names += [f"{kind}{suffix}" for kind in ("fifo", "folder", "link", "deep")]
    return names


def make_photos(folder: Path) -> None:
    """Write pictures of two classes, as a data set of the user."""
    for number, place in enumerate(("train/a", "train/b", "test/a", "test/b")):
        (folder / place).mkdir(parents=True)
        for shade in range(3):
            color = (80 * shade, 40 * number, 255 - 40 * shade)
            Image.new("RGB", (8, 8), color).save(folder / place / f"{shade}.png")


DEVICES = (
    "/dev/zero",
    "/dev/full",
    "/dev/null",
    "/proc/self/mem",
    "/proc/self/fd/0",
    "/",
    "x" * 5_000,
)


def huge_png() -> bytes:
    """A picture of 100,000 x 100,000 pixels by its header."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1_000)))


def huge_bmp() -> bytes:
    """A picture of 13,000 x 13,000 pixels by its header, below what Pillow refuses by itself."""
    head = struct.pack("<IiiHHIIiiII", 40, 13_000, 13_000, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + head


def bomb() -> bytes:
    """An archive of a few megabytes that would unpack to 4 GiB."""
    file = io.BytesIO()
    header = (
        b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'fortran_order': False, 'shape': (4294967296,), }"
    )
    head = header.ljust(127) + b"\n"
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a.npy", "w", force_zip64=True) as member,
    ):
        member.write(head)
        for _ in range(64):
            member.write(bytes(1 << 20))  # the header alone says more
    return file.getvalue()


@dataclass(frozen=True)
class Command:
    """A command with arguments that work: options by their kind of value."""

    words: tuple[str, ...]
    arguments: dict[str, tuple[str, str]]  # by option, "" for a bare argument: kind and value

    def line(self, changes: dict[str, str]) -> list[str]:
        """The words of the command line, with some values changed or added."""
        values = {option: value for option, (_, value) in self.arguments.items() if value}
        found = [*self.words]
        for option, value in (values | changes).items():
            found += [value] if not option else [option, value]
        return found


MODEL = {"--model": ("text", "mlp"), "--data": ("text", "folder:photos")}
SHARED = {"--seed": ("number", ""), "--device": ("text", "cpu"), "--data-root": ("path", "")}
COMMANDS = {
    "help": Command(("--help",), {"": ("text", "")}),
    "version": Command(("--version",), {"": ("text", "")}),
    "no command": Command((), {"": ("text", "nonsense")}),
    "defenses list": Command(("defenses", "list"), {"": ("text", "")}),
    "attacks list": Command(("attacks", "list"), {"": ("text", "")}),
    "policies list": Command(("policies", "list"), {"": ("text", "")}),
    "data list": Command(("data", "list"), SHARED),
    "data verify": Command(("data", "verify"), {"": ("data", "fashion-mnist-mini")} | SHARED),
    "data fetch": Command(("data", "fetch"), {"": ("data", "fashion-mnist-mini")} | SHARED),
    "policy show": Command(
        ("policy", "show"),
        {
            "": ("policy", "3-1-7"),
            "--image": ("path", ""),
            "--out": ("path", ""),
            "--seed": ("number", ""),
        },
    ),
    "train": Command(
        ("train",),
        MODEL
        | SHARED
        | {"--epochs": ("work", "1"), "--defense": ("defense", ""), "--out": ("path", "out")}
        | {
            "--fraction": ("number", "0.1"),
            "--save-at": ("text", ""),
            "--image-size": ("number", ""),
        }
        | {"--lr": ("number", ""), "--batch-size": ("number", ""), "--delta": ("number", "")},
    ),
    "audit": Command(
        ("audit",),
        MODEL
        | SHARED
        | {
            "--attack": ("text", "closed-form"),
            "--images": ("number", "1"),
            "--out": ("path", "out"),
        }
        | {"--defense": ("defense", ""), "--checkpoint": ("path", ""), "--steps": ("work", "")}
        | {
            "--run": ("path", ""),
            "--at": ("text", ""),
            "--certify": ("text", ""),
            "--first": ("number", ""),
        }
        | {"--batch-size": ("number", ""), "--labels": ("text", ""), "--split": ("text", "")}
        | {
            "--local-steps": ("work", ""),
            "--local-epochs": ("work", ""),
            "--local-batch-size": ("number", ""),
            "--client-momentum": ("number", ""),
            "--client-weight-decay": ("number", ""),
            "--client-optimizer": ("text", ""),
            "--local-lr": ("number", ""),
            "--image-size": ("number", ""),
            "--normalize": ("text", ""),
            "--channels": ("number", ""),
        },
    ),
    "assess": Command(
        ("assess",),
        MODEL
        | SHARED
        | {"--out": ("path", "out"), "--checkpoint": ("path", "missing.safetensors")}
        | {"--images": ("number", "2"), "--epochs": ("work", "1"), "--defense": ("defense", "")}
        | {"--lr": ("number", ""), "--budget": ("number", ""), "--most-loss": ("number", "")}
        | {"--batch-size": ("number", ""), "--labels": ("text", ""), "--normalize": ("text", "")},
    ),
    "doctor": Command(
        ("doctor",),
        MODEL
        | SHARED
        | {"--steps": ("work", "0"), "--checkpoint": ("path", ""), "--defense": ("defense", "")}
        | {"--batch-size": ("number", ""), "--labels": ("text", ""), "--attack": ("text", "")},
    ),
    "search": Command(
        ("search",),
        {"--model": ("text", "mlp"), "--data": ("text", "fashion-mnist-mini")}
        | SHARED
        | {"--out": ("path", "out"), "--checkpoint": ("path", "missing.safetensors")}
        | {"--trials": ("work", "2"), "--keep": ("number", "1"), "--storage": ("url", "")}
        | {"--attack": ("text", "dlg"), "--study": ("text", ""), "--engine": ("text", "")},
    ),
    "tune": Command(
        ("tune",),
        {"--model": ("text", "mlp"), "--data": ("text", "fashion-mnist-mini")}
        | SHARED
        | {"--out": ("path", "out"), "--checkpoint": ("path", "missing.safetensors")}
        | {"--images": ("work", "2"), "--trials": ("work", "1"), "--held-out": ("number", "1")}
        | {"--work": ("number", ""), "--budget": ("number", ""), "--defense": ("defense", "")}
        | {"--public": ("data", ""), "--space": ("text", ""), "--storage": ("url", "")}
        | {"--labels": ("text", ""), "--batch-size": ("number", ""), "--engine": ("text", "")}
        | {"--normalize": ("text", ""), "--channels": ("number", "")}
        | {"--client-optimizer": ("text", "")},
    ),
    "report": Command(
        ("report",),
        {
            "": ("path", "folder"),
            "--out": ("path", ""),
            "--thresholds": ("path", ""),
            "--save": ("path", ""),
        },
    ),
    "reproduce": Command(
        ("reproduce", "--list"),
        {
            "": ("text", ""),
            "--scale": ("text", ""),
            "--images": ("number", ""),
            "--seeds": ("number", ""),
            "--minutes": ("number", ""),
            "--at-once": ("number", ""),
            "--switch": ("text", ""),
            "--records": ("path", ""),
            "--out": ("path", ""),
            "--archive": ("path", ""),
            "--engine": ("text", ""),
        },
    ),
    "federate": Command(
        ("federate",),  # with too many clients: a simulation would take half a minute to start
        MODEL
        | SHARED
        | {"--clients": ("number", "1000000"), "--rounds": ("number", ""), "--out": ("path", "out")}
        | {"--split": ("text", ""), "--graph": ("text", ""), "--spy-rounds": ("text", "")}
        | {"--batch-size": ("number", ""), "--local-epochs": ("number", ""), "--lr": ("number", "")}
        | {"--fraction": ("number", ""), "--defense": ("defense", ""), "--attack": ("text", "")}
        | {"--checkpoint": ("path", "")},
    ),
    "reconstruct": Command(
        ("reconstruct",),
        MODEL
        | SHARED
        | {"--before": ("path", "empty"), "--after": ("path", "empty"), "--out": ("path", "out")}
        | {"--size": ("number", ""), "--local-lr": ("number", ""), "--steps": ("work", "1")},
    ),
}


def values(kind: str, files: list[str]) -> tuple[str, ...]:
    """The hostile values of one kind of option."""
    paths = (*files, *DEVICES)
    toml = tuple(name for name in files if name.endswith(".toml"))
    folders = tuple(f"folder:{name}" for name in (*files[:7], *DEVICES[:3]))
    return {
        "number": NUMBERS,
        "work": tuple(text for text in NUMBERS if len(text) != 20),  # which would take for ever
        "path": (*paths, *TEXTS),
        "policy": (*POLICIES, *TEXTS, *toml),
        "defense": (*DEFENSES, *TEXTS, *toml, *(f"{name}:best" for name in toml)),
        "data": (*TEXTS, *folders),
        "text": (*TEXTS, *folders),
        "url": (*URLS, *TEXTS),
    }[kind]
