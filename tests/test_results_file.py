"""RESULTS.md and the figures of the documentation are what the records under
`benchmarks/results/` say."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_its_pictures_are_there() -> None:
    text = (ROOT / "RESULTS.md").read_text()
    shown = re.findall(r"!\[[^]]*]\(([^)]*)\)", text)
    assert len(shown) > 1
    for path in shown:
        assert (ROOT / path).is_file(), f"{path} is missing: run `make results`"


def test_it_is_current_and_a_changed_figure_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import make_results
    from results import docs

    text, pages = make_results.made(), docs.pages()
    assert text == (ROOT / "RESULTS.md").read_text(), "run `make results`"
    assert docs.with_figures(pages) == pages, "run `make results`"
    with pytest.raises(SystemExit, match="32 of 64"):
        docs.with_figures({path: t.replace("32 of 64", "33 of 64") for path, t in pages.items()})
    monkeypatch.setattr(make_results, "made", lambda: text)
    monkeypatch.setattr(make_results, "TARGET", tmp_path / "RESULTS.md")
    monkeypatch.setattr(sys, "argv", ["make_results.py", "--check"])
    (tmp_path / "RESULTS.md").write_text(text)
    make_results.main()
    (tmp_path / "RESULTS.md").write_text(text.replace("17/64", "18/64"))
    with pytest.raises(SystemExit, match="make results"):
        make_results.main()
