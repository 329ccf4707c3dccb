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
    for part in (
        *("0.40 and 0.37", "1.2% of the work", "interval of each of the three includes 0"),
        "the hybrid found so has rank 1 for 31 of 64 pictures",
    ):
        for path in (docs.README, ROOT / "docs/tutorials/search.md"):
            words = " ".join(pages[path].split())
            assert part in words
            with pytest.raises(SystemExit, match=f"{path.name} does not say .*, as the records do"):
                docs.with_figures(pages | {path: words.replace(part, "")})


def test_a_count_in_the_documentation_that_no_record_has_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from results import docs

    pages = docs.pages()
    guide, threats = ROOT / "docs/guide.md", ROOT / "docs/threat-models.md"
    with pytest.raises(SystemExit, match=r"guide\.md says '7 of 99', and no record does"):
        docs.with_figures(pages | {guide: pages[guide] + "It found 7 of 99 pictures."})
    assert "100 of 320" in pages[threats]
    with pytest.raises(SystemExit, match=r"threat-models\.md does not say '100 of 320"):
        docs.with_figures(pages | {threats: pages[threats].replace("100 of 320", "110 of 320")})


def sections() -> dict[str, str]:
    """Return the parts of the file by heading."""
    parts = re.split(r"^###? (.+)\n", (ROOT / "RESULTS.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """Return the head and the rows of each table of a text."""
    found = []
    for part in re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
        head, _, *rows = ([*map(str.strip, line.split("|")[1:-1])] for line in part.splitlines())
        found.append((head, rows))
    return found


def test_its_links_lead_to_headings_and_its_contents_name_every_section() -> None:
    text = (ROOT / "RESULTS.md").read_text()
    links = re.findall(r"\[([^]]+)\]\(#([^)]+)\)", text)
    # As GitHub names a heading: letters, digits, hyphens and underscores; spaces become hyphens.
    names = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-"): title for title in sections()}
    assert len(links) > 50 and {target for _, target in links} <= {*names}
    assert all(names[target] == words for words, target in links)
    listed = text.split("**Contents**")[1].split("\n## ")[0]
    assert [title for title, _ in re.findall(r"\[([^]]+)\]\(#([^)]+)\)", listed)] == [*sections()]


def test_its_findings_are_few_and_each_has_figures_and_a_section() -> None:
    found = sections()["What holds"].strip().splitlines()
    assert 5 <= len(found) <= 10
    for line in found:
        assert re.match(r"- \*\*[^*]+\*\*.*\d.* \[[^]]+]\(#[^)]+\)$", line), line


def test_a_row_of_its_tables_is_of_one_attack_and_has_no_empty_cell() -> None:
    found = tables((ROOT / "RESULTS.md").read_text())
    assert len(found) > 40
    for head, rows in found:
        for row in rows:
            assert len(row) == len(head) and all(row), row
            for cell in row:
                assert len(re.findall(r"\d/\d+ \(", cell)) <= 1, cell
                assert not re.search(r"\d.*;.*\d", cell), cell


def test_what_is_not_measured_stands_in_one_section_alone() -> None:
    found = sections()
    missing = found.pop("Not measured yet")
    ((head, rows),) = tables(missing)
    assert head[0] == "experiment" and "table1b" in {row[0] for row in rows}
    assert not any("not measured yet" in part.replace("[Not m", "") for part in found.values())


def test_its_figures_have_captions() -> None:
    text = (ROOT / "RESULTS.md").read_text()
    shown = re.findall(r"^!\[[^]]*]\(.*\)\n\n(.*)$", text, flags=re.MULTILINE)
    assert len(shown) == text.count("![")
    assert all(re.fullmatch(r"\*.{60,}\*", caption) for caption in shown)


def test_its_table_of_searches_has_controls_and_corrected_tests() -> None:
    """Uncorrected, the hybrid of the published search has p = 0.0017 against none."""
    part = sections()["searches"]
    (head, rows), (_, tests) = tables(part)
    assert head[4:9] == [
        *("guess", "sham", "guess that knows the draws", "ceiling by the true picture with noise"),
        "ceiling by the gradient line-up",
    ]
    assert len(rows) >= 16 and all(re.fullmatch(r"\d+/\d+", cell) for r in rows for cell in r[4:9])
    assert f"Holm's correction for these {2 * len(tests)}:" in part
    hybrid = ["S_pri, as published", "semi-trained", "48-48-3+21-5-15", "none"]
    ((fewer, more),) = (row[4:] for row in tests if row[:4] == hybrid)
    assert float(fewer) > 0.02 and float(more) == 1
    assert "told the labels alone, not the policy" in part
    assert "on cifar100 10 of 1,500 policies dropped" in part
    assert "on fashion-mnist 29 of 1,500 policies dropped" in part
    assert "of *S_pri, as published* and *the probe* are one measurement" in part
    assert "separates nothing at this setting: the probe, untrained (against none); " in part
    assert "the probe, Fashion-MNIST, lenet, semi-trained (against random)" in part
