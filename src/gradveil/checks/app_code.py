"""The code of an app, read and never run: which values names stand for, as far as files tell."""

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

DEEPEST = 20  # names that stand for names that stand for …
CHANGING = ("append", "extend", "insert", "remove", "pop", "clear", "update")
OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


@dataclass(frozen=True)
class Imported:
    """A name of another module, or without a `name` that module; `level` counts leading dots."""

    module: str
    name: str | None = None
    level: int = 0


Binding = ast.expr | ast.FunctionDef | ast.ClassDef | Imported | None
"""What a name stands for; None where the code does not settle it."""

Scope = Mapping[str, Binding]


@dataclass(frozen=True, eq=False)
class Module:
    """A file of the app: its path in the folder, its dotted name, and what its names stand for."""

    file: str
    name: str
    tree: ast.Module
    names: Scope


@dataclass(frozen=True, eq=False)
class Site:
    """Where an expression stands: its module, and the scopes around it, the outermost first."""

    module: Module
    scopes: tuple[Scope, ...]


@dataclass(frozen=True, eq=False)
class Value:
    """An expression, a function or a class that a name stands for, and where that is written."""

    node: ast.expr | ast.FunctionDef | ast.ClassDef
    site: Site


class Expression(NamedTuple):
    """An expression, and where it stands."""

    node: ast.expr
    site: Site


@dataclass(frozen=True, eq=False)
class Call:
    """A call in a file: the last part of its function's name, and where it stands."""

    name: str
    node: ast.Call
    site: Site

    @property
    def where(self) -> str:
        """The file and the line, for a reader."""
        return f"{self.site.module.file}, line {self.node.lineno}"

    def argument(self, position: int | None, keyword: str) -> ast.expr | None:
        """Return an argument; None where it is not given, or hidden in * or **."""
        for each in self.node.keywords:
            if each.arg == keyword:
                return each.value
        before = self.node.args[: 0 if position is None else position + 1]
        if position is None or len(before) <= position:
            return None
        return None if any(isinstance(each, ast.Starred) for each in before) else before[position]


def read_module(file: str, source: bytes) -> Module:
    """Return the module that a file of the app is; errors are those of `ast.parse`."""
    tree = ast.parse(source)
    parts = file.removesuffix(".py").replace("\\", "/").split("/")
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    settled = _names(tree.body, tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            settled |= dict.fromkeys(node.names)
    return Module(file, name, tree, settled)


def _names(body: Iterable[ast.stmt], inside: ast.AST) -> dict[str, Binding]:
    """Return what the names of a body stand for: None where they are bound or changed again."""
    found: dict[str, Binding] = {}
    for statement in body:
        for name in _bound(statement):
            found[name] = None if name in found else _binding(statement, name)
    return found | dict.fromkeys(name for name in _changed(inside) if name in found)


def _scope_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Scope:
    """Return what names stand for in a function; parameters are not settled."""
    given = [each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)]
    return _names(node.body, node) | dict.fromkeys(given)


def _bound(node: ast.AST) -> Iterator[str]:
    """Give every name that a statement binds in its own scope."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from (each.asname or each.name.split(".")[0] for each in node.names)
    elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name
    if not isinstance(node, ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _bound(child)


def _binding(statement: ast.stmt, name: str) -> Binding:
    """Return what a statement of a body binds a name to; None where it may or may not do so."""
    match statement:
        case ast.FunctionDef() | ast.ClassDef():
            return statement
        case ast.Assign(targets=[ast.Name()], value=value) if not _walrus(value):
            return value
        case ast.AnnAssign(target=ast.Name(), value=ast.expr() as value) if not _walrus(value):
            return value
        case ast.Import(names=names):
            for each in names:
                if (each.asname or each.name.split(".")[0]) == name:
                    return Imported(each.name if each.asname else name)
        case ast.ImportFrom(module=module, names=names, level=level):
            for each in names:
                if (each.asname or each.name) == name:
                    return Imported(module or "", each.name, level)
    return None


def _walrus(node: ast.AST) -> bool:
    return any(isinstance(each, ast.NamedExpr) for each in ast.walk(node))


def _changed(tree: ast.AST) -> Iterator[str]:
    """Give names of lists and other values that are changed in place."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)):
                if attr in CHANGING:
                    yield name
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                yield name


class App:
    """The modules of an app, all calls in them, and the files that are too deep to be read."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self.modules = tuple(modules)
        self.calls: list[Call] = []
        self.too_deep: list[str] = []
        for module in self.modules:
            try:
                self.calls += [*self._walk(module.tree.body, Site(module, (module.names,)))]
            except RecursionError:
                self.too_deep.append(module.file)

    def _walk(self, nodes: Iterable[ast.AST], site: Site) -> Iterator[Call]:
        for node in nodes:
            if isinstance(node, ast.Call):
                yield Call(self._original(node.func, site), node, site)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                outside = [*node.decorator_list, node.args]
                yield from self._walk(outside, site)
                scopes = (*site.scopes, _scope_of(node))
                yield from self._walk(node.body, Site(site.module, scopes))
            else:
                yield from self._walk(ast.iter_child_nodes(node), site)

    def _original(self, node: ast.expr, site: Site) -> str:
        """Return the name that a function has where it comes from, which `as` may have changed."""
        found = self.resolve(node, site)
        if isinstance(found, Imported):
            return found.name or found.module.rpartition(".")[2]
        if isinstance(found, Value) and isinstance(found.node, ast.FunctionDef | ast.ClassDef):
            return found.node.name
        return last_name(node)

    def resolve(self, node: ast.expr, site: Site) -> Value | Imported | None:
        """Follow names to an expression, function or class of the app, or a name from elsewhere.

        None where the files do not settle it.
        """
        for _ in range(DEEPEST):
            if isinstance(node, ast.Attribute):
                return self._attribute(node, site)
            if not isinstance(node, ast.Name):
                return Value(node, site)
            held = self._lookup(node.id, site)
            if held is None:
                return None
            found, site = held
            if isinstance(found, Imported):
                return self._followed(found, site.module)
            if not isinstance(found, ast.expr):
                return Value(found, site)
            node = found
        return None

    def _lookup(
        self, name: str, site: Site
    ) -> tuple[ast.expr | ast.FunctionDef | ast.ClassDef | Imported, Site] | None:
        for depth in range(len(site.scopes), 0, -1):
            if name in site.scopes[depth - 1]:
                found = site.scopes[depth - 1][name]
                inner = Site(site.module, site.scopes[:depth])
                return None if found is None else (found, inner)
        return None

    def _attribute(self, node: ast.Attribute, site: Site) -> Value | Imported | None:
        """Resolve a name of a module, `module.name`; of other values nothing is known."""
        before = ast.unparse(node.value)
        held = self._lookup(before.split(".")[0], site)
        if held is None or not isinstance(held[0], Imported):
            return None
        given = held[0]
        inner = before.split(".")[1:]
        path = ".".join(filter(None, [given.module, given.name or "", *inner]))
        return self._followed(Imported(path, node.attr, given.level), site.module)

    def _followed(self, found: Imported, into: Module) -> Value | Imported | None:
        """Follow an import into the app's other files; a name from elsewhere stays as it is."""
        for _ in range(DEEPEST):
            home = self._home(found, into)
            if home is None or found.name is None:
                return found
            if found.name not in home.names:
                return None
            held = home.names[found.name]
            if held is None:
                return None
            if not isinstance(held, Imported):
                site = Site(home, (home.names,))
                return self.resolve(held, site) if isinstance(held, ast.expr) else Value(held, site)
            found, into = held, home
        return None

    def _home(self, found: Imported, into: Module) -> Module | None:
        """Return the file of the app that an import means."""
        wanted = found.module
        if found.level:
            package = into.name.split(".")
            drop = found.level - into.file.endswith("__init__.py")
            wanted = ".".join(filter(None, [*package[: len(package) - drop], found.module]))
        for module in self.modules:
            if wanted and (module.name == wanted or module.name.endswith(f".{wanted}")):
                return module
        return None

    def returned(self, call: ast.Call, site: Site) -> Expression | None:
        """Return the expression that a call of the app's own function gives back, if but one."""
        found = self.resolve(call.func, site)
        if not isinstance(found, Value) or not isinstance(found.node, ast.FunctionDef):
            return None
        given = [each for each in ast.walk(found.node) if isinstance(each, ast.Return)]
        if len(given) != 1 or given[0].value is None:
            return None
        scopes = (*found.site.scopes, _scope_of(found.node))
        return Expression(given[0].value, Site(found.site.module, scopes))

    def number(self, node: ast.expr | None, site: Site, depth: int = 0) -> float | None:
        """Return the number that an expression is; None where the files do not settle it."""
        if node is None or depth > DEEPEST:
            return None
        found = self.resolve(node, site)
        if not isinstance(found, Value):
            return None
        match found.node:
            case ast.Constant(value=bool()):
                return None
            case ast.Constant(value=int() | float() as value):
                return _safely(float, value)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=inner):
                size = self.number(inner, found.site, depth + 1)
                return -size if isinstance(sign, ast.USub) and size is not None else size
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                before = self.number(left, found.site, depth + 1)
                after = self.number(right, found.site, depth + 1)
                if before is None or after is None:
                    return None
                return _safely(OPERATORS[type(op)], before, after)
        return None


def _safely(function: Callable[..., float], *given: float) -> float | None:
    try:
        found = function(*given)
    except (ArithmeticError, ValueError):
        return None
    return found if isinstance(found, float) else None  # a power may be complex


def last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name; nothing of other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
