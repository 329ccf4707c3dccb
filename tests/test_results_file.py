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


def test_the_figures_on_searches_in_the_documentation_are_those_of_the_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from results import docs

    pages = docs.pages()
    for part in ("0.40 and 0.37", "1.2% of the work", "interval of each of the three includes 0"):
        for path in (docs.README, ROOT / "docs/tutorials/search.md"):
            words = " ".join(pages[path].split())
            assert part in words
            with pytest.raises(SystemExit, match=f"{path.name} does not say .*, as the records do"):
                docs.with_figures(pages | {path: words.replace(part, "")})


def test_its_table_of_searches_has_controls_and_corrected_tests() -> None:
    """Uncorrected, the hybrid of the published search has p = 0.0017 against none."""
    text = (ROOT / "RESULTS.md").read_text()
    part = text.split("**searches**: ")[1].split("\n\n**")[0]
    head, _, *rows = [line.split(" | ") for line in part.splitlines() if line.startswith("|")]
    assert head[5:9] == ["sham", "draws known", "noisy truth", "gradients"]
    assert len(rows) >= 16 and all(re.fullmatch(r"\d+/\d+", cell) for r in rows for cell in r[5:9])
    tests = re.findall(r"[:,] ([\d.e-]+)(?=[,; ])", " ".join(r[9] for r in rows))
    assert f"Holm's correction for the table's {len(tests)}." in part
    (hybrid,) = (r for r in rows if r[1:3] == ["semi-trained", "48-48-3+21-5-15"])
    assert float(re.findall(r"none: ([\d.]+), 1;", hybrid[9])[0]) > 0.02
    assert "told the labels alone, not the policy" in part
    assert "separates nothing at this setting: the probe, Fashion-MNIST, lenet" in part
