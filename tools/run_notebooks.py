"""Run the notebooks and write their outputs into them: `make notebooks`.

    python tools/run_notebooks.py [NOTEBOOK...]

Each runs in a new folder, in this process, as Jupyter would run it: the value of a cell's last
expression is its output. Paths of the machine are left out of what is written.
"""

import ast
import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
KINDS = {"image/png": "_repr_png_", "text/html": "_repr_html_"}


def run_notebook(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Run the code of a notebook in the present folder; return the outputs of each code cell."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    return [_run("".join(cell["source"]), scope) for cell in code_cells(notebook)]


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of a notebook that hold code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _run(source: str, scope: dict[str, Any]) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        exec(compile(tree, "<cell>", "exec"), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), scope)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": _lines(text)})
    if value is not None:
        outputs.append(
            {
                "output_type": "execute_result",
                "data": dict(_shown(value)),
                "metadata": {},
                "execution_count": None,
            }
        )
    return outputs


def _shown(value: Any) -> Iterator[tuple[str, Any]]:
    """Give a value in the forms that a notebook can show."""
    for kind, method in KINDS.items():
        made = getattr(value, method, lambda: None)()
        if made is not None:
            is_text = isinstance(made, str)
            yield kind, _lines(made) if is_text else base64.b64encode(made).decode()
    yield "text/plain", _lines(repr(value))


def _lines(text: str) -> list[str]:
    """Return text line by line, without the folder and the memory that it was made in."""
    for path in {os.getcwd(), str(Path.cwd().resolve())}:  # noqa: PTH109  # both spellings
        text = text.replace(path, ".")
    return re.sub(" at 0x[0-9A-F]+", "", text).splitlines(keepends=True)


def renew(path: Path, folder: Path) -> None:
    """Run a notebook in a folder, and write its outputs into it."""
    notebook, before = json.loads(path.read_text(encoding="utf-8")), Path.cwd()
    os.chdir(folder)
    try:
        outputs = run_notebook(notebook)
    finally:
        os.chdir(before)
    for number, (cell, made) in enumerate(zip(code_cells(notebook), outputs, strict=True), 1):
        cell["execution_count"], cell["outputs"] = number, made
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(paths: list[str]) -> None:
    for path in map(Path, paths) if paths else sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            renew(path.resolve(), Path(folder))
        print(f"ran {path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
