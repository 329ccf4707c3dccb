"""Make the page on troubleshooting from the doctor's code, when MkDocs builds the documentation.

The code is read and not run, so that the documentation can be built without torch.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

CHECKS = Path(__file__).resolve().parents[1] / "src" / "gradveil" / "checks"
TABLES = ("FIRST", "QUICK", "SLOW")
MODULES = {"attacker": "attack"}  # as doctor.py names them
HEAD = "| says | about | what to do |\n|--|--|--|\n"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the doctor's lines into the page that has a mark for them; called by MkDocs."""
    if "<!-- doctor -->" not in markdown:
        return markdown
    made = markdown.replace("<!-- doctor -->", doctor_text())
    return made.replace("<!-- flower -->", flower_text())


def doctor_text() -> str:
    """Return a section for each check of the doctor, in the order that it makes them."""
    parts = []
    for name, module, function in checks():
        node = functions(MODULES.get(module, module))[function]
        rows = "".join(finding_row(call, node) for call in findings(node))
        said = ast.get_docstring(node) or ""
        parts.append(f"## {name}\n\n{said}\n\n{HEAD}{rows}")
    return "\n".join(parts)


def flower_text() -> str:
    """Return a table of all findings in a Flower app and in what starts it."""
    nodes = [*functions("flower").values(), *functions("deployment").values()]
    return HEAD + "".join(finding_row(call, node) for node in nodes for call in findings(node))


@cache
def tree_of(module: str) -> ast.Module:
    """Return the code of a module of the checks."""
    return ast.parse((CHECKS / f"{module}.py").read_text(encoding="utf-8"))


def functions(module: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a module by name."""
    return {node.name: node for node in tree_of(module).body if isinstance(node, ast.FunctionDef)}


def checks() -> Iterator[tuple[str, str, str]]:
    """Give the name of each check, its module and its function, as doctor.py lists them."""
    body = tree_of("doctor").body
    plain = {
        target.id: node.value.value
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in body:
        if not isinstance(node, ast.AnnAssign) or ast.unparse(node.target) not in TABLES:
            continue
        assert isinstance(node.value, ast.Dict)
        for key, value in zip(node.value.keys, node.value.values, strict=True):
            name = key.value if isinstance(key, ast.Constant) else plain[ast.unparse(key or value)]
            module, _, function = ast.unparse(value).partition(".")
            yield str(name), module, function


def findings(node: ast.FunctionDef) -> list[ast.Call]:
    """Return the calls in a function that make a finding."""
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) == "Finding" and len(call.args) == 4]


def finding_row(call: ast.Call, node: ast.FunctionDef) -> str:
    """Return a row of the table: the level, what it is about, and what to do."""
    level, about, _, do = call.args
    todo = " or: ".join(dict.fromkeys(texts(do, node)))
    return f"| {' or '.join(texts(level, node))} | {about_text(about)} | {todo} |\n"


def about_text(node: ast.expr) -> str:
    """Return the name of a finding; one that is given for several names stands for each."""
    return str(node.value) if isinstance(node, ast.Constant) else "any of these"


def texts(node: ast.expr, function: ast.FunctionDef) -> list[str]:
    """Return the texts that an expression may have; what is computed becomes `…`."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        parts = (texts(each, function)[0] for each in node.values)
        return ["".join(parts)]
    if isinstance(node, ast.IfExp):
        return texts(node.body, function) + texts(node.orelse, function)
    if isinstance(node, ast.Name):
        given = [
            each.value
            for each in ast.walk(function)
            if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == node.id
        ]
        return [text for value in given for text in texts(value, function)] or ["…"]
    return ["…"]


if __name__ == "__main__":
    sys.stdout.write(doctor_text() + "\n" + flower_text())
