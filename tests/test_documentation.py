"""README, documentation and notebooks: every command can be parsed, every block runs."""

import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import gradveil
from gradveil.audits import AuditResult
from gradveil.checks.doctor import CHECKS
from gradveil.checks.flower import NAMES
from gradveil.report.provenance import command, search_command
from gradveil.search import SearchResult
from report.folders import make_audit, make_search

with warnings.catch_warnings():
    # typer 0.20 imports names that click 8.5 means to remove
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer.main

    from gradveil.cli import app

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples/flower/README.md"]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)#]+)\)")


def blocks(path: Path, kind: str) -> list[str]:
    """Return the blocks of code of a kind in a page; commands have none."""
    return [text for name, text in BLOCK.findall(text_of(path)) if name == kind]


def text_of(path: Path) -> str:
    """Return the text of a page, or of a notebook without its code."""
    text = path.read_text("utf-8")
    return text if path.suffix == ".md" else "\n\n".join(sources(path, "markdown"))


def commands(path: Path) -> Iterator[list[str]]:
    """Give the words of each gradveil command in the blocks of a page, and in its sentences."""
    text = text_of(path)
    lines = [line for block in blocks(path, "") for line in joined(block)]
    said = re.findall(r"`(gradveil [a-z][^`]*)`", " ".join(BLOCK.sub("", text).split()))
    # A sentence may name a command and leave its options out.
    lines += [line for line in said if re.search(r" --?[a-z]", line) and "..." not in line]
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[:1] == ["gradveil"]:
            yield words[1:]


def joined(block: str) -> list[str]:
    """Return the command lines of a block."""
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def parse(words: list[str]) -> None:
    """Parse a command as the program does, and run nothing."""
    group: click.Command = typer.main.get_command(app)
    context: click.Context | None = None
    while isinstance(group, click.Group):
        context = group.make_context(words[0] if words else "", list(words), parent=context)
        rest = [*context._protected_args, *context.args]  # what a group hands on has no other name
        if not rest:
            return
        _, found, words = group.resolve_command(context, rest)
        assert found is not None
        group = found
    group.make_context(group.name, list(words), parent=context)


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS], ids=lambda path: path.name)
def test_every_command_of_a_page_can_be_parsed(path: Path) -> None:
    for words in commands(path):
        try:
            parse(words)
        except click.UsageError as error:
            pytest.fail(f"gradveil {shlex.join(words)}: {error.format_message()}")


def test_a_wrong_option_is_noticed() -> None:
    with pytest.raises(click.UsageError, match="--imagez"):
        parse(["audit", "--data", "x", "--imagez", "8"])


def test_the_commands_that_pages_of_runs_show_can_be_parsed(tmp_path: Path) -> None:
    local: dict[str, Any] = {"local_epochs": 2, "local_batch_size": 2, "client_momentum": 0.9}
    run = make_audit(tmp_path / "run", {"none": {"dlg": 5}}, batch_size=4, budget=2.0, **local)
    audit = shlex.split(command(AuditResult.read(run)) or "")
    folder = make_search(tmp_path / "search")
    settings = json.loads((folder / "settings.json").read_text())
    (folder / "settings.json").write_text(json.dumps(settings | {"checkpoint": "my weights.pt"}))
    found = SearchResult.read(folder)
    facts = {"weights_sha256": "0" * 64, "images_sha256": "1" * 64, "gradveil": "0.1.0"}
    found = replace(found, settings={**found.settings, **facts, "augment": False, "race": True})
    search = shlex.split(search_command(found) or "")
    for words in (audit, search):
        assert words[0] == "gradveil"
        parse(words[1:])
    assert search[search.index("--checkpoint") + 1] == "my weights.pt"
    assert {"--race", "--no-augment"} <= {*search} and {"--budget", "--local-epochs"} <= {*audit}
    of_python = replace(found, settings={**found.settings, "data_sha256": "2" * 64})
    assert search_command(of_python) is None


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS], ids=lambda path: path.name)
def test_python_compiles_and_links_lead_somewhere(path: Path) -> None:
    for block in blocks(path, "python") if path.suffix == ".md" else sources(path):
        compile(block, path.name, "exec")
    for link in LINK.findall(path.read_text("utf-8")) if path.suffix == ".md" else ():
        if not link.startswith("https://"):
            assert (path.parent / link).exists(), link


def sources(path: Path, kind: str = "code") -> list[str]:
    """Return the cells of a notebook of a kind."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def test_the_three_uses_of_the_readme_have_ten_lines_at_most() -> None:
    uses = [block for kind in ("", "python") for block in blocks(README, kind)]
    assert len(uses) == 4 and all(block.count("\n") <= 10 for block in uses)


def test_notebooks_have_their_outputs_and_no_path_of_a_machine() -> None:
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        text = path.read_text("utf-8")
        assert '"output_type": "execute_result"' in text
        assert not re.search(r"/(home|root|tmp|work|Users)/", text), path


def test_the_page_on_troubleshooting_has_every_check_of_the_doctor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import docs_hook

    page = docs_hook.on_page_markdown((ROOT / "docs/troubleshooting.md").read_text("utf-8"))
    assert [name for name in re.findall("^## (.*)$", page, re.M) if name in CHECKS] == [*CHECKS]
    assert all(f"| {name} |" in page for name in NAMES)
    rows = [line for line in page.splitlines() if re.match(r"\| (error|warning|note)", line)]
    assert len(rows) > 30 and "divide them by 255" in page
    assert not [row for row in rows if row.endswith("| … |")]


def test_the_citation_has_the_version_of_the_package() -> None:
    assert f"\nversion: {gradveil.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


def run_lines(lines: list[str], folder: Path) -> None:
    """Run command lines one after another, with the program of this Python."""
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    for line in lines:
        words = shlex.split(line, comments=True)
        assert words[0] == "gradveil"
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (line, done.stderr[-2_000:])


@pytest.mark.slow
def test_the_commands_of_the_readme_run_as_they_stand(tmp_path: Path) -> None:
    lines = [line for block in blocks(README, "") for line in joined(block)]
    run_lines([line for line in lines if line.startswith("gradveil ")], tmp_path)
    for name in ("audit", "search", "defended"):
        assert (tmp_path / "runs" / name / "index.html").is_file()


def run_python(name: str) -> dict[str, Any]:
    """Run the blocks of Python in a page, each by itself; return what they define."""
    found: dict[str, Any] = {}
    for block in blocks(ROOT / name, "python"):
        scope: dict[str, Any] = {"__name__": "block"}
        exec(compile(block, name, "exec"), scope)
        found |= scope
    return found


@pytest.mark.filterwarnings("ignore::gradveil.GradveilWarning")  # of files that can be inverted
@pytest.mark.parametrize("name", ["README.md", "docs/tutorials/flower.md"])
def test_the_clients_of_flower_run_as_they_stand(name: str) -> None:
    assert run_python(name)["app"]


def test_the_attack_and_the_defense_of_the_documentation_work() -> None:
    attack, defense = (run_python(f"docs/add-{kind}.md") for kind in ("attack", "defense"))
    model = gradveil.models.build("mlp", channels=1, size=8, classes=3)
    images, labels = torch.rand(2, 1, 8, 8), torch.tensor([0, 2])
    shared = gradveil.Client(model, defense=defense["Quantize"](2)).share(images, labels, seed=0)
    assert all(len(value.unique()) <= 4 for value in shared.seen.gradients.values())
    found = attack["Gray"](0.25)(shared.seen, seed=0)
    assert torch.equal(found.images, torch.full((2, 1, 8, 8), 0.25))
    assert attack["PATIENT"].steps == 600


def test_the_policy_of_the_documentation_can_be_used() -> None:
    policy = run_python("docs/tutorials/search.md")["policy"]
    assert policy(torch.rand(2, 3, 16, 16), torch.Generator()).shape == (2, 3, 16, 16)


@pytest.mark.slow
def test_the_page_on_python_runs_as_it_stands() -> None:
    assert run_python("docs/python.md")["pictures"].shape == (2, 1, 28, 28)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_ends_with_what_it_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import run_notebooks

    monkeypatch.chdir(tmp_path)
    notebook: dict[str, Any] = json.loads(path.read_text("utf-8"))
    outputs = run_notebooks.run_notebook(notebook)
    there = [cell["outputs"] for cell in run_notebooks.code_cells(notebook)]
    assert [len(made) for made in outputs] == [len(made) for made in there]
    assert outputs[-1][-1]["output_type"] == there[-1][-1]["output_type"]
