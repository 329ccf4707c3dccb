"""What a Flower deployment is started with: commands in files, connections, and processes.

The options are those of Flower 1.41: `flower-superlink`, `flower-supernode`, and the connections
of `flwr` in config.toml, which older apps have in pyproject.toml.
"""

import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from gradveil.checks.subject import Finding, Level
from gradveil.core.errors import GradveilError
from gradveil.core.files import read_bytes

SUPERLINK, SUPERNODE, CONNECTION = "SuperLink", "SuperNode", "connection"
PROGRAMS = {"flower-superlink": SUPERLINK, "flower-supernode": SUPERNODE}
IMAGE = re.compile(r"(?:.*/)?flwr/(superlink|supernode)(?:[:@].*)?")
MOST_MERGES = 12  # of a YAML file: a reader may need 2 to their number of steps
FLAGS = ("--insecure", "--enable-supernode-auth", "--simulation", "--enable-event-log")
"""Options without a value, beside those that begin with --disable or --allow."""

TELLING = ("echo", "printf", "which", "pgrep", "pkill", "grep")  # they start nothing
SIMULATED = (None, ":local:", ":local-in-memory:")  # addresses of simulations on this machine
LOOPBACK = ("127.", "localhost", "[::1]", "::1")
CONTAINER = {"image", "entrypoint", "command", "args"}
PROCESSES = Path("/proc")
NAMES = ("node authentication", "TLS")


@dataclass(frozen=True)
class Started:
    """A SuperLink or SuperNode and its options, or a connection of `flwr`, and where it stands.

    `unsettled` are words of the command that stand for others, such as $OPTIONS.
    """

    kind: str
    options: dict[str, str]
    where: str
    unsettled: tuple[str, ...] = ()

    @classmethod
    def commands(cls, words: Sequence[str], where: str) -> Iterator["Started"]:
        """Give what a command starts, through containers and shells too."""
        if words and words[0] in TELLING:
            return
        for position, word in enumerate(words):
            kind = _program(word)
            if kind is not None:
                yield cls._of(kind, words[position + 1 :], where)
                return
            if word == "-c" and position + 1 < len(words):
                for inner in _split(words[position + 1]):
                    yield from cls.commands(inner, where)

    @classmethod
    def _of(cls, kind: str, words: Sequence[str], where: str) -> "Started":
        options: dict[str, str] = {}
        unsettled, before = [], ""
        for word in words:
            if word.startswith("--"):
                name, _, value = word.partition("=")
                options[name] = value
                flag = name in FLAGS or name.startswith(("--disable", "--allow"))
                before = "" if flag or "=" in word else name
            elif before:
                options[before], before = word, ""
            elif word.startswith(("$", "`")):
                unsettled.append(word)
        return cls(kind, options, where, tuple(unsettled))


def _program(word: str) -> str | None:
    image = IMAGE.fullmatch(word)
    if image:
        return PROGRAMS[f"flower-{image[1]}"]
    return PROGRAMS.get(re.split("[/=]", word)[-1])


def read_started(name: str, data: bytes) -> list[Started]:
    """Return what a file of a deployment starts or connects to; the name says what it is."""
    text = data.decode(errors="replace").replace("\r\n", "\n")
    end = name.rpartition("/")[2].lower()
    if end.endswith(".toml"):
        try:
            return [*_connections(tomllib.loads(text), name)]
        except tomllib.TOMLDecodeError as error:
            raise GradveilError(f"{name}: {error}") from error
    if end.endswith((".yml", ".yaml")):
        if text.count("<<") > MOST_MERGES:
            raise ValueError("keys that merge others, each perhaps doubling what it has")
        try:
            parts = [msgspec.yaml.decode(part) for part in re.split(r"(?m)^---.*$", text)]
            return [each for part in parts for each in _containers(part, name, set())]
        except (msgspec.DecodeError, ImportError, RecursionError):
            pass  # a template, or no reader of YAML here: its lines may still tell
    if "dockerfile" in end or "containerfile" in end:
        return [*_image(text, name)]
    return [*_shell(text, name)]


def _shell(text: str, name: str) -> Iterator[Started]:
    """Give what the lines of a script start; a variable that is set but once is put in."""
    joined = re.sub(r"\\\n", lambda _: " \0", text)  # a mark, so that lines keep their numbers
    set_to: dict[str, list[str]] = {}
    for found in re.finditer(
        r"(?m)^[ \t]*(?:export[ \t]+)?(\w+)=(\"[^\"$`]*\"|'[^']*'|[^\s\"'$`(;&]*)$", text
    ):
        set_to.setdefault(found[1], []).append(found[2].strip("\"'"))
    for each in re.findall(r"(?m)\b(\w+)\+?=", text):
        if each in set_to:
            set_to[each].append("")
    known = {each: values[0] for each, values in set_to.items() if len(values) == 2}
    number = 1
    for line in joined.splitlines():
        plain = re.sub(r"\$\{?(\w+)\}?", lambda found: known.get(found[1], found[0]), line)
        for words in _split(plain.replace("\0", " ")):
            yield from Started.commands(words, f"{name}, line {number}")
        number += 1 + line.count("\0")


def _split(line: str) -> Iterator[list[str]]:
    """Give the words of each command in a line of a shell; comments are left out."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    try:
        every = [*reader]
    except ValueError:  # a quotation that goes on in the next line
        every = line.partition("#")[0].split()
    words: list[str] = []
    for word in every:
        if word and set(word) <= set(";&|()<>"):
            yield words
            words = []
        else:
            words.append(word)
    yield words


def _image(text: str, name: str) -> Iterator[Started]:
    """Give what a container of this recipe starts: its last ENTRYPOINT, and its last CMD."""
    whole = re.sub(r"\\\n", " ", text)
    last: dict[str, list[str]] = {}
    for line in whole.splitlines():
        found = re.match(r"\s*(FROM|ENTRYPOINT|CMD)\s+(.*)", line, re.I)
        if found:
            step, given = found[1].upper(), found[2]
            last |= {} if step != "FROM" else {"ENTRYPOINT": [], "CMD": []}
            last[step] = _words(_as_list(given))
            last |= {"CMD": []} if step == "ENTRYPOINT" else {}  # as Docker does
    image = [word for word in last.get("FROM", ()) if IMAGE.fullmatch(word)]
    program = last.get("ENTRYPOINT") or image
    yield from Started.commands([*program, *last.get("CMD", ())], name)


def _as_list(text: str) -> object:
    try:
        found: object = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return found


def _words(value: object) -> list[str]:
    """Return the words of a command that is written as a list or as a line."""
    if isinstance(value, list):
        return [str(each) for each in value]
    return [word for words in _split(value) for word in words] if isinstance(value, str) else []


def _containers(value: object, name: str, met: set[int]) -> Iterator[Started]:
    """Give what the containers of a compose file or of Kubernetes start, and lines of a shell."""
    if isinstance(value, str):
        yield from (replace(each, where=name) for each in _shell(value, name))
        return
    if not isinstance(value, dict | list) or id(value) in met:
        return
    met.add(id(value))
    inner = value
    if isinstance(value, dict) and CONTAINER & value.keys():
        given = _words(value.get("entrypoint"))
        after = [*_words(value.get("command")), *_words(value.get("args"))]
        whole = given or "-c" in after or any(map(_program, after))
        yield from Started.commands(
            [*given, *after] if whole else [str(value.get("image")), *after], name
        )
        inner = {key: value[key] for key in value if key not in CONTAINER}
    for each in inner.values() if isinstance(inner, dict) else inner:
        yield from _containers(each, name, met)


def _connections(tables: dict[str, Any], name: str) -> Iterator[Started]:
    """Give the connections of a pyproject.toml's federations, or of Flower's config.toml."""
    older = _table(_table(_table(tables, "tool"), "flwr"), "federations")
    for prefix, every in (
        ("tool.flwr.federations", older),
        ("superlink", _table(tables, "superlink")),
    ):
        for key, value in every.items():
            if isinstance(value, dict) and value.get("address") not in SIMULATED:
                options = {
                    each: str(value[each])
                    for each in ("address", "root-certificates")
                    if value.get(each)
                }
                options |= {"insecure": ""} if value.get("insecure") else {}
                yield Started(CONNECTION, options, f"{name}, [{prefix}.{key}]")


def _table(tables: dict[str, Any], name: str) -> dict[str, Any]:
    found = tables.get(name)
    return found if isinstance(found, dict) else {}


def running(largest: int) -> tuple[list[Started], list[str]]:
    """Return what runs on this machine and Flower's connections, and what could not be read."""
    starts: list[Started] = []
    skipped: list[str] = []
    home = os.environ.get("FLWR_HOME")
    config = (Path(home) if home else Path.home() / ".flwr") / "config.toml"
    if config.is_file():
        try:
            starts += read_started(str(config), read_bytes(config, largest))
        except GradveilError:
            skipped.append(f"{config}, which cannot be read")
    if not PROCESSES.joinpath("self", "cmdline").is_file():
        return starts, [*skipped, "processes, which can be looked at on Linux alone"]
    for path in sorted(PROCESSES.glob("[0-9]*/cmdline")):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")[:-1]
        except OSError:  # it has ended, or is another user's
            continue
        if any(_program(word) for word in words[:3] if "/proc" not in word):
            starts += Started.commands(words, f"process {path.parent.name}")
    return starts, skipped


def judged_of(every: Iterable[Started]) -> set[str]:
    """Return the checks that these settle: a connection of `flwr` tells nothing of who may join."""
    kinds = {each.kind for each in every}
    names = set(NAMES) if kinds else set()
    return names if kinds & {SUPERLINK, SUPERNODE} else names - {"node authentication"}


def check_started(every: Iterable[Started]) -> Iterator[Finding]:
    """Find SuperLinks that anybody may join, and connections that others can read."""
    for each in every:
        if each.kind == SUPERLINK:
            yield from _superlink(each)
        elif each.kind == SUPERNODE:
            yield from _supernode(each)
        else:
            yield from _connection(each)


def _superlink(each: Started) -> Iterator[Finding]:
    options, near = each.options, _near(each.options.get("--host", ""))
    level: Level = "note" if near else "warning"
    if "--enable-supernode-auth" in options and "--insecure" in options:
        yield Finding(
            "error",
            "node authentication",
            f"{each.where}: the SuperLink does not start: Flower refuses node authentication "
            "together with --insecure",
            "give it certificates in place of --insecure: --ssl-ca-certfile, --ssl-certfile and "
            "--ssl-keyfile",
        )
        return
    if "--insecure" in options:
        yield Finding(
            level,
            "TLS",
            f"{each.where}: the SuperLink starts with --insecure: models and updates travel in the "
            "clear, and whoever is on the way can read the updates and invert them, or change them",
            "give it certificates in place of --insecure: --ssl-ca-certfile, --ssl-certfile and "
            "--ssl-keyfile",
        )
    if "--auth-list-public-keys" in options:
        yield Finding(
            "error",
            "node authentication",
            f"{each.where}: the SuperLink does not start: Flower 1.41 has no "
            "--auth-list-public-keys any more",
            "start it with --enable-supernode-auth, and register each node's key: "
            "flwr supernode register",
        )
    elif not {"--enable-supernode-auth", "--simulation"} & options.keys():
        if each.unsettled and "--insecure" not in options:
            yield from _unjudged(each, "--enable-supernode-auth")
            return
        yield Finding(
            level,
            "node authentication",
            f"{each.where}: the SuperLink starts without node authentication, so anybody who "
            "reaches it can join, and read the model",
            "start it with --enable-supernode-auth and certificates, and register the keys of "
            "its nodes: flwr supernode register",
        )


def _unjudged(each: Started, wanted: str) -> Iterator[Finding]:
    """Say of a command that its file does not settle all of its options."""
    for name in NAMES:
        yield Finding(
            "warning",
            name,
            f"{each.where}: the {each.kind} could not be judged: what {' '.join(each.unsettled)} "
            "stands for is not settled here",
            f"see that {wanted} is among its options, and --insecure is not",
        )


def _supernode(each: Started) -> Iterator[Finding]:
    options, near = each.options, _near(each.options.get("--superlink", ""))
    level: Level = "note" if near else "warning"
    if "--insecure" in options:
        yield Finding(
            level,
            "TLS",
            f"{each.where}: the SuperNode starts with --insecure: its updates travel in the clear "
            "to whoever answers at that address, and can be inverted on the way",
            "give it --root-certificates with the authority of the SuperLink's certificate, in "
            "place of --insecure",
        )
    elif each.unsettled and "--auth-supernode-private-key" not in options:
        yield from _unjudged(each, "--auth-supernode-private-key")
        return
    elif "--root-certificates" not in options:
        yield Finding(
            "note",
            "TLS",
            f"{each.where}: the SuperNode trusts every authority that its machine trusts to say "
            "who the SuperLink is",
            "give it --root-certificates where the SuperLink has an authority of its own",
        )
    if "--auth-supernode-private-key" not in options:
        yield Finding(
            level,
            "node authentication",
            f"{each.where}: the SuperNode has no key of its own, so it can join only where anybody "
            "can",
            "make a key (ssh-keygen -t ecdsa -b 384), register it (flwr supernode register), and "
            "start with --auth-supernode-private-key",
        )


def _connection(each: Started) -> Iterator[Finding]:
    options = each.options
    address = options.get("address", "")
    if "insecure" in options and "root-certificates" in options:
        yield Finding(
            "error",
            "TLS",
            f"{each.where}: it has insecure = true and root-certificates, which Flower refuses",
            "remove insecure",
        )
    elif "insecure" in options:
        level: Level = "note" if _near(address) else "warning"
        yield Finding(
            level,
            "TLS",
            f"{each.where}: insecure = true: apps, models and results travel in the clear between "
            f"flwr and {address}, and whoever is on the way can run an app of theirs",
            "set root-certificates in place of insecure, in config.toml of FLWR_HOME (~/.flwr), "
            "where Flower 1.41 keeps its connections",
        )
    elif "root-certificates" not in options and not address.split(":")[0].endswith("flower.ai"):
        yield Finding(
            "note",
            "TLS",
            f"{each.where}: without root-certificates every authority that this machine trusts can "
            f"say who {address} is",
            "set root-certificates where the SuperLink has an authority of its own",
        )


def _near(address: str) -> bool:
    """Tell whether an address is this machine's own."""
    return address.startswith(LOOPBACK)
