"""A Flower app's folder, or what runs here: protection that is named there and does not protect.

The app is read and never run. What its files do not settle is said to be so, and never called well.
"""

import ast
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gradveil.checks.app_code import (
    App,
    Call,
    Imported,
    Module,
    Site,
    Value,
    last_name,
    read_module,
)
from gradveil.checks.deployment import NAMES as OF_A_START
from gradveil.checks.deployment import (
    Started,
    check_started,
    judged_of,
    read_started,
    running,
)
from gradveil.checks.subject import Diagnosis, Finding
from gradveil.core.errors import GradveilError
from gradveil.core.files import read_bytes, shown

RUNNING = "running"
LARGEST = 1 << 20  # bytes of a file that is read
MOST_FILES = 1_000
LEFT_OUT = {".git", ".venv", "venv", "node_modules", "__pycache__", "build", "dist"}
SCRIPTS = (".py", ".sh", ".bash", ".yml", ".yaml", ".service", ".toml", ".mk")
STARTERS = re.compile(r"(.*\.)?(Dockerfile|Containerfile|Procfile|Makefile|justfile)(\..*)?", re.I)
RUNNERS = ("system", "popen", "Popen", "run", "call", "check_call", "check_output", "getoutput")
"""Functions of os and subprocess that take a program as one string."""

MADE = ("defend", "guard", "LocalDpMod")
"""Mods that are made by a call."""

READY = ("fixedclipping_mod", "adaptiveclipping_mod", "secagg_mod", "secaggplus_mod")
"""Mods that are functions."""

CENTRAL = re.compile(r"DifferentialPrivacy(Server|Client)Side(Fixed|Adaptive)Clipping")
NAMES = (
    "local DP's sensitivity",
    "central DP",
    "mods of the whole app",
    "defense never reached",
    "node authentication",
    "TLS",
)
OF_CODE = NAMES[:4]


def check_app(folder: Path | str) -> Diagnosis:
    """Look for protection in a Flower app's folder that does not protect, and say what to do."""
    root = Path(folder)
    if not root.is_dir():
        raise GradveilError(f"flower app {shown(root)}: there is no such folder")
    modules: list[Module] = []
    starts: list[Started] = []
    unread: list[str] = []
    files, more = _files(root)
    for path in files:
        name = path.relative_to(root).as_posix()
        try:
            data = read_bytes(path, LARGEST)
            if path.suffix == ".py":
                modules.append(read_module(name, data))
            else:
                starts += read_started(name, data)
        except (GradveilError, SyntaxError, ValueError, MemoryError, RecursionError):
            unread.append(name)
    app = App(modules)
    unread += app.too_deep
    skipped = [f"{name}, which cannot be read" for name in unread]
    skipped += [f"{more} files beyond the first {MOST_FILES}, which are not read"] if more else []
    starts += _started_by(app)
    found = [*_local_dp(app), *_central(app), *_whole_app(app), *_never_reached(app)]
    found += check_started(starts)
    judged = set(NAMES)
    if not any(call.name == "ClientApp" for call in app.calls):
        judged -= set(OF_CODE)
        skipped.append(f"{', '.join(OF_CODE)}: no file here makes a ClientApp")
    judged -= set(OF_A_START)
    judged |= (there := judged_of(starts))
    if absent := ", ".join(name for name in OF_A_START if name not in there):
        does = "starts" if there else "starts or connects to"
        skipped.append(f"{absent}: no file here {does} a SuperLink")
    # A file that was not read may hold what decides a check; code may start processes too.
    lost = set(NAMES) if more or any(name.endswith(".py") for name in unread) else set()
    lost |= set(OF_A_START) if unread else set()
    if lost & judged:
        names = ", ".join(name for name in NAMES if name in lost & judged)
        skipped.append(f"{names}: not all files could be read")
        judged -= lost
    return _diagnosis(found, judged, skipped)


def check_running() -> Diagnosis:
    """Look at the SuperLinks and SuperNodes that run on this machine, and at Flower's connections.

    The connections are those of config.toml in FLWR_HOME, by default ~/.flwr.
    """
    starts, skipped = running(LARGEST)
    judged = judged_of(starts)
    if absent := ", ".join(name for name in OF_A_START if name not in judged):
        skipped.append(f"{absent}: no flower-superlink or flower-supernode is seen to run here")
    return _diagnosis([*check_started(starts)], judged, skipped)


def _diagnosis(found: list[Finding], judged: set[str], skipped: list[str]) -> Diagnosis:
    judged -= {each.name for each in found}
    return Diagnosis(tuple(found), tuple(each for each in NAMES if each in judged), tuple(skipped))


def _files(root: Path) -> tuple[list[Path], int]:
    """Return the first files that are read, and how many there are beyond them."""
    found = []
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root).parts
        if _wanted(path) and not LEFT_OUT.intersection(inside) and path.is_file():
            found.append(path)
    return found[:MOST_FILES], max(len(found) - MOST_FILES, 0)


def _wanted(path: Path) -> bool:
    return path.suffix in SCRIPTS or STARTERS.fullmatch(path.name) is not None


def _started_by(app: App) -> Iterator[Started]:
    """Give the commands that the app's code has, as ["flower-superlink", …] or as one string."""
    for module in app.modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and (text := _command_text(node)):
                where = f"{module.file}, line {node.lineno}"
                yield from Started.commands(_words(text), where)
            if isinstance(node, ast.List | ast.Tuple):
                words = [
                    each.value if isinstance(each, ast.Constant) else "$" for each in node.elts
                ]
                where = f"{module.file}, line {node.lineno}"
                yield from Started.commands([str(each) for each in words], where)


def _command_text(call: ast.Call) -> str:
    """Return the string that a call starts a program by, or splits into words; else nothing."""
    if last_name(call.func) == "split" and isinstance(call.func, ast.Attribute):
        given: ast.expr | None = call.func.value
    elif last_name(call.func) in RUNNERS:
        given = call.args[0] if call.args else None
    else:
        given = None
    constant = given.value if isinstance(given, ast.Constant) else None
    return constant if isinstance(constant, str) else ""


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an open quotation
        return text.split()


def _local_dp(app: App) -> Iterator[Finding]:
    """Find noise for a smaller sensitivity than clipping to that norm leaves."""
    for call in app.calls:
        if call.name != "LocalDpMod":
            continue
        given = [
            call.argument(position, keyword)
            for position, keyword in enumerate(("clipping_norm", "sensitivity", "epsilon", "delta"))
        ]
        clip, sensitivity, epsilon, delta = (app.number(each, call.site) for each in given)
        if given[0] and given[1] and ast.dump(given[0]) == ast.dump(given[1]):
            continue  # one value for both, whatever it is
        if clip is None or sensitivity is None:
            names = {"its clipping norm": clip, "its sensitivity": sensitivity}
            unknown = " and ".join(name for name, value in names.items() if value is None)
            yield Finding(
                "warning",
                "local DP's sensitivity",
                f"{call.where}: LocalDpMod could not be judged: {unknown} cannot be read from the "
                "app's files",
                "see for yourself that sensitivity is the clipping norm or more when the app runs",
            )
        elif sensitivity < clip:
            said = ""
            if epsilon and delta and 0 < delta < 1.25:
                scale = math.sqrt(2 * math.log(1.25 / delta)) / epsilon
                said = (
                    f": the noise has a deviation of {sensitivity * scale:.2g}, and epsilon "
                    f"{epsilon:g} needs {clip * scale:.2g} or more"
                )
            yield Finding(
                "error",
                "local DP's sensitivity",
                f"{call.where}: updates are clipped to a norm of {clip:g}, and the noise is made "
                f"for a sensitivity of {sensitivity:g}{said}",
                "set sensitivity to the clipping norm, or to twice that where a client's data may "
                "be exchanged",
            )


def _central(app: App) -> Iterator[Finding]:
    for call in app.calls:
        if CENTRAL.fullmatch(call.name):
            yield Finding(
                "warning",
                "central DP",
                f"{call.where}: {call.name} adds its noise on the server, which has seen every "
                "update before: it protects from those who get the model, not from the server",
                "to protect from the server, act in the client: gradveil.federated.defend, or "
                "LocalDpMod",
            )


def _whole_app(app: App) -> Iterator[Finding]:
    for call in app.calls:
        value = _mods_of(call) if call.name == "ClientApp" else None
        mods = [] if value is None else [*_leaves(app, value, call.site)]
        if mods:
            yield Finding(
                "note",
                "mods of the whole app",
                f"{call.where}: messages of evaluation and queries pass through "
                f"{', '.join(each.title or 'a mod' for each in mods)} too",
                "give mods to @app.train(mods=[...]) where they are for updates alone",
            )


@dataclass(frozen=True, eq=False)
class Leaf:
    """An entry of a list of mods, as far as it could be followed.

    `node` is the call that makes it, `name` that of a function from elsewhere. `settled`: it
    cannot be another than that.
    """

    title: str
    node: ast.Call | None = None
    name: str = ""
    settled: bool = True


@dataclass(frozen=True, eq=False)
class Reached:
    """The mods that training passes through, those of other messages, and what is unsettled."""

    trained: list[Leaf]
    others: list[Leaf]
    unsettled: list[str]  # where lists of mods stand that could not be followed


def _reached(app: App) -> Reached:
    found = Reached([], [], [])
    for call in app.calls:
        value = _mods_of(call)
        if value is None:
            continue
        leaves = [*_leaves(app, value, call.site)]
        if call.name in ("train", "ClientApp"):
            found.trained.extend(leaves)
        elif call.name in ("evaluate", "query"):
            found.others.extend(leaves)
            continue
        else:  # any function may hand its mods on
            leaves = [Leaf(each.title, settled=False) for each in leaves]
        found.unsettled.extend(
            f"{each.title or 'a mod'} in {call.where}" for each in leaves if not each.settled
        )
    return found


def _never_reached(app: App) -> Iterator[Finding]:
    """Find a defense that is made or imported while no update passes through it."""
    reached = _reached(app)
    trained = {id(leaf.node) for leaf in reached.trained if leaf.node is not None}
    others = {id(leaf.node) for leaf in reached.others if leaf.node is not None}
    unsettled = ", ".join(reached.unsettled)
    for call in app.calls:
        if call.name not in MADE or id(call.node) in trained:
            continue
        if unsettled:
            yield Finding(
                "warning",
                "defense never reached",
                f"{call.where}: whether updates pass through {call.name}(...) could not be judged: "
                f"the app's files do not settle what {unsettled} is",
                "name the mods in the list: @app.train(mods=[...])",
            )
        elif id(call.node) in others:
            yield Finding(
                "error",
                "defense never reached",
                f"{call.where}: {call.name}(...) is made for evaluation or queries alone, so "
                "updates leave as they are",
                "give it to the training function: @app.train(mods=[...])",
            )
        else:
            yield Finding(
                "error",
                "defense never reached",
                f"{call.where}: {call.name}(...) is made, and no list of mods in the app holds it, "
                "so updates leave as they are",
                "give it to the training function: @app.train(mods=[...])",
            )
    yield from _unused(app, reached)
    yield from _unclipped(app, reached)
    yield from _unused_policies(app)


def _unused(app: App, reached: Reached) -> Iterator[Finding]:
    """Find a mod that is imported, and then neither made nor in a list of mods."""
    used = {call.name for call in app.calls} | {leaf.name for leaf in reached.trained}
    for module in app.modules:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ImportFrom) or reached.unsettled:
                continue
            ours = (node.module or "").split(".")[0] in ("flwr", "gradveil")
            for each in node.names if ours else ():
                if each.name in (*MADE, *READY) and each.name not in used:
                    yield Finding(
                        "warning",
                        "defense never reached",
                        f"{module.file}, line {node.lineno}: {each.name} is imported, and no "
                        "update passes through it",
                        "give it to the training function, @app.train(mods=[...]), or remove it",
                    )


def _unclipped(app: App, reached: Reached) -> Iterator[Finding]:
    """Find central DP that counts on clients to clip, which they do not."""
    used = {leaf.name for leaf in reached.trained}
    for call in app.calls:
        match = CENTRAL.fullmatch(call.name)
        wanted = f"{match[2].lower()}clipping_mod" if match else ""
        if not match or match[1] != "Client" or wanted in used:
            continue
        if reached.unsettled:
            yield Finding(
                "warning",
                "defense never reached",
                f"{call.where}: whether clients clip, which {call.name} counts on, could not be "
                f"judged: the app's files do not settle what {', '.join(reached.unsettled)} is",
                f"see that @app.train(mods=[...]) holds {wanted}",
            )
        else:
            yield Finding(
                "error",
                "defense never reached",
                f"{call.where}: {call.name} counts on clients to clip, and updates pass through no "
                f"{wanted}: its guarantee does not hold",
                f"give {wanted} to the training function: @app.train(mods=[...])",
            )


def _unused_policies(app: App) -> Iterator[Finding]:
    """Find a policy for images that is made and never called."""
    for module in app.modules:
        for name, value in module.names.items():
            if not isinstance(value, ast.Call):
                continue
            made = app.resolve(value.func, Site(module, (module.names,)))
            ours = isinstance(made, Imported) and made.module.split(".")[0] == "gradveil"
            if not ours or last_name(value.func) != "policy" or _read(app, name):
                continue
            yield Finding(
                "error",
                "defense never reached",
                f"{module.file}, line {value.lineno}: the policy {name} is made and never called, "
                "so training uses images as they are",
                "call it on every batch in the training function, before the model",
            )


def _read(app: App, name: str) -> bool:
    """Tell whether any file reads or imports a name, or a module's attribute of that name."""
    for module in app.modules:
        for node in ast.walk(module.tree):
            match node:
                case ast.Name(id=found, ctx=ast.Load()) | ast.Attribute(attr=found):
                    if found == name:
                        return True
                case ast.alias(name=found) if found == name:
                    return True
    return False


def _mods_of(call: Call) -> ast.expr | None:
    """Return what a call is given as its mods."""
    return call.argument(1 if call.name == "ClientApp" else None, "mods")


def _leaves(app: App, node: ast.expr, site: Site, depth: int = 0) -> Iterator[Leaf]:
    """Give the entries of a list of mods, through names, sums, * and functions that return them."""
    title = last_name(node.func if isinstance(node, ast.Call) else node)
    found = app.resolve(node, site) if depth < 20 else None
    if found is None:
        yield Leaf(title, settled=False)
    elif isinstance(found, Imported):
        yield Leaf(title, name=found.name or "")
    else:
        yield from _parts(app, found, title, depth + 1)


def _parts(app: App, found: Value, title: str, depth: int) -> Iterator[Leaf]:
    nodes: list[ast.expr] = []
    match found.node:
        case ast.List(elts=nodes) | ast.Tuple(elts=nodes):
            pass
        case ast.Starred(value=inner):
            nodes = [inner]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            nodes = [left, right]
        case ast.Call() as call:
            made = app.returned(call, found.site)
            if made is not None:
                yield from _leaves(app, made.node, made.site, depth)
            else:
                yield Leaf(title, call, settled=_settled(app, call, found.site))
        case ast.FunctionDef() as function:  # a mod of the app's own, which may hand on to another
            yield Leaf(title, settled=not _mentions(app, function, found.site))
        case ast.Constant(value=None):
            pass
        case _:
            yield Leaf(title, settled=False)
    for node in nodes:
        yield from _leaves(app, node, found.site, depth)


def _settled(app: App, call: ast.Call, site: Site) -> bool:
    """Tell whether a call that makes a mod cannot hand on to a mod that is made elsewhere."""
    made = app.resolve(call.func, site)
    if isinstance(made, Value):
        return not _mentions(app, made.node, made.site)
    every = [*call.args, *(each.value for each in call.keywords)]
    plain = made is not None and all(isinstance(each, ast.Constant) for each in every)
    return plain or last_name(call.func) in MADE


def _mentions(app: App, value: ast.AST, site: Site) -> bool:
    """Tell whether a function or class names a mod that protects."""
    for node in ast.walk(value):
        found = app.resolve(node, site) if isinstance(node, ast.Name) else None
        if isinstance(found, Imported) and found.name in (*MADE, *READY):
            return True
        made = found.node if isinstance(found, Value) else None
        if isinstance(made, ast.Call) and last_name(made.func) in MADE:
            return True
    return False
