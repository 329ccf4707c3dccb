"""A Flower app's folder: protection that is named there and does not protect.

The app is read and never run: what its files say in literals is judged, the rest is left alone.
"""

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gradveil.checks.subject import Diagnosis, Finding
from gradveil.core.errors import GradveilError
from gradveil.core.files import read_bytes, shown

LARGEST = 1 << 20  # bytes of a file that is read
MOST_FILES = 1_000
SCRIPTS = (".sh", ".bash", ".yml", ".yaml", ".service")
LEFT_OUT = {".git", ".venv", "venv", "node_modules", "__pycache__", "build", "dist"}
DEFENSES = ("defend",)
CENTRAL = re.compile(r"DifferentialPrivacy(Server|Client)Side(Fixed|Adaptive)Clipping")
NAMES = (
    *("local DP's sensitivity", "central DP", "mods of the whole app"),
    *("defense never reached", "node authentication"),
)


@dataclass(frozen=True)
class Call:
    """A call in a file: its name's last part, its arguments, and where it stands."""

    name: str
    node: ast.Call
    where: str

    def number(self, place: int, keyword: str) -> float | None:
        """Return a literal number among the arguments; None where it is no literal."""
        nodes = [each.value for each in self.node.keywords if each.arg == keyword]
        nodes += self.node.args[place : place + 1]
        for node in nodes:
            try:
                value = ast.literal_eval(node)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                return None
            return float(value) if isinstance(value, int | float) else None
        return None


def check_app(folder: Path | str) -> Diagnosis:
    """Look for protection in a Flower app's folder that does not protect, and say what to do."""
    root = Path(folder)
    if not root.is_dir():
        raise GradveilError(f"flower app {shown(root)}: there is no such folder")
    calls: list[Call] = []
    skipped: list[str] = []
    for path in _files(root, (".py",)):
        try:
            tree = ast.parse(read_bytes(path, LARGEST))
        except (GradveilError, SyntaxError, ValueError, MemoryError, RecursionError):
            skipped.append(f"{path.relative_to(root)}, which cannot be read")
            continue
        calls += _calls(tree, str(path.relative_to(root)))
    found = [
        *_local_dp(calls),
        *_central(calls),
        *_whole_app(calls),
        *_never_reached(calls),
        *_authentication(root),
    ]
    silent = [name for name in NAMES if name not in {each.name for each in found}]
    return Diagnosis(tuple(found), tuple(silent), tuple(skipped))


def _files(root: Path, endings: tuple[str, ...]) -> list[Path]:
    found = []
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root).parts
        if path.suffix in endings and not LEFT_OUT.intersection(inside) and path.is_file():
            found.append(path)
    return found[:MOST_FILES]


def _calls(tree: ast.AST, file: str) -> Iterator[Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield Call(_last_name(node.func), node, f"{file}, line {node.lineno}")


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _local_dp(calls: list[Call]) -> Iterator[Finding]:
    """Find noise for a smaller sensitivity than clipping to that norm leaves."""
    for call in calls:
        if call.name != "LocalDpMod":
            continue
        clip, sensitivity = call.number(0, "clipping_norm"), call.number(1, "sensitivity")
        epsilon, delta = call.number(2, "epsilon"), call.number(3, "delta")
        if clip is None or sensitivity is None or sensitivity >= clip:
            continue
        said = ""
        if epsilon and delta and 0 < delta < 1.25:
            scale = math.sqrt(2 * math.log(1.25 / delta)) / epsilon
            said = (
                f": the noise has a deviation of {sensitivity * scale:.2g}, and epsilon "
                f"{epsilon:g} needs {clip * scale:.2g} or more"
            )
        yield Finding(
            "error",
            NAMES[0],
            f"{call.where}: updates are clipped to a norm of {clip:g}, and the noise is made for a "
            f"sensitivity of {sensitivity:g}{said}",
            "set sensitivity to the clipping norm, or to twice that where a client's data may be "
            "exchanged",
        )


def _central(calls: list[Call]) -> Iterator[Finding]:
    for call in calls:
        if CENTRAL.fullmatch(call.name):
            yield Finding(
                "warning",
                NAMES[1],
                f"{call.where}: {call.name} adds its noise on the server, which has seen every "
                "update before: it protects from those who get the model, not from the server",
                "to protect from the server, act in the client: gradveil.federated.defend, or "
                "LocalDpMod",
            )


def _whole_app(calls: list[Call]) -> Iterator[Finding]:
    for call in calls:
        mods = _mods(call.node)
        if call.name == "ClientApp" and mods:
            names = ", ".join(_last_name(_function(each)) or "a mod" for each in mods)
            yield Finding(
                "note",
                NAMES[2],
                f"{call.where}: messages of evaluation and queries pass through {names} too",
                "give mods to @app.train(mods=[...]) where they are for updates alone",
            )


def _never_reached(calls: list[Call]) -> Iterator[Finding]:
    """Find a defense that is made while no list of mods holds it, nor any name or other value."""
    mods = [each for call in calls for each in _mods(call.node)]
    by_name = [each for each in mods if not isinstance(each, ast.Call)]
    if by_name:  # it may be one of these
        return
    for call in calls:
        if call.name in DEFENSES and not any(call.node is each for each in mods):
            yield Finding(
                "error",
                NAMES[3],
                f"{call.where}: {call.name}(...) is made, and no list of mods in the app holds it, "
                "so updates leave as they are",
                "give it to the training function: @app.train(mods=[...])",
            )


def _mods(node: ast.Call) -> list[ast.expr]:
    for keyword in node.keywords:
        if keyword.arg == "mods":
            value = keyword.value
            return list(value.elts) if isinstance(value, ast.List | ast.Tuple) else [value]
    return []


def _function(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node


def _authentication(root: Path) -> Iterator[Finding]:
    """Find commands that start a SuperLink which any node may join."""
    for path in _files(root, SCRIPTS):
        try:
            text = read_bytes(path, LARGEST).decode(errors="replace")
        except GradveilError:
            continue
        text = re.sub(r"\\\n", " ", text)
        for number, line in enumerate(text.splitlines(), start=1):
            command = line.partition("#")[0]
            if "flower-superlink" not in command or "--enable-supernode-auth" in command:
                continue
            open_to = "without TLS " if "--insecure" in command else ""
            yield Finding(
                "warning",
                NAMES[4],
                f"{path.relative_to(root)}, line {number}: the SuperLink starts {open_to}without "
                "node authentication, so anybody who reaches it can join, and read the model",
                "start it with --enable-supernode-auth and certificates, and register the keys of "
                "its nodes",
            )
