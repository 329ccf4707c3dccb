"""The page in a real browser, offline: what moves, sorts, filters and saves; widths and colors."""

import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradveil.audits import Threshold
from gradveil.report.write import write_report
from report.browser import Browser, find_browser
from report.folders import make_audit, make_cell, make_search

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium here: apt-get install chromium"
)
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
DEFENSES = {
    "none": {"adam-cosine": 12, "dlg": 7},
    "prune:0.99": {"adam-cosine": 3, "masked": 6},
    "3-1-7": {"adam-cosine": 2},
}
CONTRAST = """
(() => {
  const parse = (text) => text.match(/[0-9.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = color.slice(0, 3).map((c) => {
      const s = c / 255;
      return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.body.querySelectorAll("*")) {
    const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !node.getClientRects().length || node.tagName === "SCRIPT") continue;
    const a = light(parse(getComputedStyle(node).color)), b = light(ground(node));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${node.tagName}.${node.className} ${ratio.toFixed(2)}`);
  }
  return [...new Set(poor)];
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    accuracies = {"none": 0.9, "prune:0.99": 0.85, "3-1-7": 0.8}
    folders = tmp_path_factory.mktemp("page")
    run = make_audit(folders / "run", DEFENSES, 16, accuracies=accuracies, kinds="shoe")
    line = {"mean": [0.1, 0.3, 0.9, 1.0], "std": [0.05, 0.1, 0.05, 0.0]}
    curves = {"points": 4, "lines": {"none": line, "3-1-7": {"mean": [0.1, 0.2, 0.4, 1.0]}}}
    cell = make_cell(folders / "cell", "lines", curves)
    return write_report([run, cell], certify="psnr=15").page


def column(browser: Browser, head: str) -> list[str]:
    """Return the cells of the visible rows below a head of the table."""
    found = browser.run(
        f"""(() => {{
          const heads = [...document.querySelectorAll("#rows th")];
          const at = heads.findIndex((head) => head.textContent === {json.dumps(head)});
          return [...document.querySelectorAll("#rows tbody tr")].filter((row) => !row.hidden)
            .map((row) => row.cells[at].textContent);
        }})()"""
    )
    assert isinstance(found, list)
    return found


def click(browser: Browser, selector: str, number: int = 0) -> None:
    browser.run(f"document.querySelectorAll({json.dumps(selector)})[{number}].click()")


def sort_by(browser: Browser, head: str) -> None:
    browser.run(
        f"""[...document.querySelectorAll("#rows th button")]
          .find((head) => head.textContent === {json.dumps(head)}).click()"""
    )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_a_page_opens_without_error_or_request_fits_its_window_and_can_be_read(
    browser: Browser, page: Path, width: int, dark: bool
) -> None:
    browser.open(page, width, dark)
    assert browser.errors == []
    assert {url.partition(":")[0] for url in browser.requests} == {"file", "data"}
    assert len([url for url in browser.requests if url.startswith("file:")]) == 1
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run(CONTRAST) == []
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(19, 20, 22)") is dark


def test_the_certificates_fit_a_phone_with_the_head_of_its_column_beside_each_figure(
    browser: Browser, tmp_path: Path
) -> None:
    names = {"none": {"dlg": 5}, "3-1-7+43-18-18+21-33-9": {"a-long-name-" * 5: 3}}
    run = make_audit(tmp_path / "run", names, 16, accuracies=dict.fromkeys(names, 0.9))
    page = write_report(run, certify=Threshold("psnr", 15.0, 0.2, 0.1)).page
    for width, beside in ((390, '"reached "'), (1440, "none")):
        browser.open(page, width)
        beyond = browser.run(
            """(() => {
              const box = document.querySelector("#bounds .scroll");
              return box.scrollWidth - box.clientWidth;
            })()"""
        )
        assert beyond <= 0 or width > 390
        shown = browser.run(
            """getComputedStyle(
              document.querySelector(".bounds td[data-head=reached]"), "::before").content"""
        )
        assert shown == beside


def axe_script() -> str | None:
    """Return axe-core, which looks for what keeps people from reading a page; None without it."""
    found = importlib.util.find_spec("axe_core_python")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0], "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.skipif(axe_script() is None, reason="no axe-core here: pip install axe-core-python")
@pytest.mark.parametrize(("width", "dark"), [(1440, False), (390, True)])
def test_axe_core_finds_nothing_serious(
    browser: Browser, page: Path, width: int, dark: bool
) -> None:
    browser.open(page, width, dark)
    browser.run(f"{axe_script()}; undefined")
    found = browser.run(
        """axe.run().then(({ violations, passes }) => [passes.length, violations.map(
          ({ id, impact, nodes }) => [id, impact, nodes.slice(0, 3).map((n) => n.html)]
        )])"""
    )
    assert found[0] > 20
    assert [each for each in found[1] if each[1] in ("serious", "critical")] == []


def test_the_slider_moves_every_film_through_its_iterations(browser: Browser, page: Path) -> None:
    browser.open(page)

    def state(value: int) -> tuple[str, set[str]]:
        found = browser.run(
            f"""(() => {{
              const slider = document.querySelector(".time");
              slider.value = {value};
              slider.dispatchEvent(new Event("input"));
              const films = [...document.querySelectorAll(".film")];
              return [document.querySelector(".moment").textContent,
                films.map((film) => getComputedStyle(film).backgroundPositionX)];
            }})()"""
        )
        return found[0], set(found[1])

    assert state(0) == ("iteration 0", {"0%"})
    assert state(45)[0] == "iteration 30" and state(45)[1] == {"44.4444%"}
    assert state(100) == ("the result", {"100%"})
    click(browser, ".play")
    assert browser.run("document.querySelector('.play').textContent") == "Stop"
    assert browser.run("document.querySelector('.moment').textContent") == "iteration 0"


def test_without_frames_there_is_no_slider(browser: Browser, tmp_path: Path) -> None:
    run = make_audit(tmp_path / "run", {"none": {"closed-form": 5}}, frames=0)
    browser.open(write_report(run).page)
    hidden = browser.run("getComputedStyle(document.querySelector('.slider')).display")
    assert hidden == "none" and browser.errors == []


def test_the_gallery_shows_the_case_that_is_chosen_and_more_when_asked(
    browser: Browser, page: Path
) -> None:
    browser.open(page)
    assert browser.run("document.querySelectorAll('.card').length") == 12
    click(browser, ".more")
    assert browser.run("document.querySelectorAll('.card').length") == 16
    click(browser, "#only")
    assert browser.run("document.querySelectorAll('.card').length") == 12
    browser.run(
        """(() => {
          const select = document.getElementById("case");
          select.value = 2;
          select.dispatchEvent(new Event("change"));
        })()"""
    )
    names = browser.run("[...document.querySelectorAll('.card small')].map((s) => s.textContent)")
    assert "as used" in names and names.count("private picture") == 2
    wide = browser.run(
        """Promise.all([...document.querySelectorAll(".card img")].map(async (image) => {
          image.loading = "eager";
          await image.decode();
          return image.naturalWidth;
        }))"""
    )
    assert set(wide) == {12}


def test_a_head_sorts_by_numbers_and_by_words_both_ways(browser: Browser, page: Path) -> None:
    browser.open(page)
    sort_by(browser, "share")
    rising = [float(text.rstrip("%")) for text in column(browser, "share")]
    assert rising == sorted(rising) and rising[0] < rising[-1]
    sort_by(browser, "share")
    falling = [float(text.rstrip("%")) for text in column(browser, "share")]
    assert falling == rising[::-1]
    sort_by(browser, "attack or control")
    names = column(browser, "attack or control")
    assert names[0] == "adam-cosine" and names[-1] == "sham"


def test_words_and_a_kind_filter_the_table(browser: Browser, page: Path) -> None:
    browser.open(page)
    whole = len(column(browser, "kind"))
    browser.run(
        """(() => {
          const filter = document.getElementById("filter");
          const kinds = document.getElementById("kinds");
          filter.value = "PRUNE";
          filter.dispatchEvent(new Event("input"));
          kinds.value = "attack";
          kinds.dispatchEvent(new Event("change"));
        })()"""
    )
    assert column(browser, "defense") == ["prune:0.99"] * 2
    said = browser.run("document.getElementById('count').textContent")
    assert said == f"2 of {whole} rows"


def hover(browser: Browser, selector: str) -> Any:
    """Move the pointer over an element and return the words of the tip."""
    spot = browser.run(
        f"""(() => {{
          const found = document.querySelector({json.dumps(selector)});
          found.scrollIntoView({{ block: "center", behavior: "instant" }});
          const box = found.getBoundingClientRect();
          return [box.left + box.width / 2, box.top + box.height / 2];
        }})()"""
    )
    browser.run("new Promise((done) => setTimeout(done, 200))")  # scrolling hides a tip
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=spot[0], y=spot[1])
    return browser.run(
        "document.getElementById('tip').hidden ? null : document.getElementById('tip').textContent"
    )


def test_a_point_under_the_pointer_says_what_it_is(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert hover(browser, "#accuracy .point") == (
        "no defense: adam-cosine, rank 1 in 12 of 16 line-ups (95%: 48% to 93%), accuracy 90.0%"
    )
    assert hover(browser, ".meter.control").startswith("blind: class mean: rank 1 in 0 of 16")
    assert hover(browser, "h1") is None


def test_a_policy_of_a_search_shows_itself_and_opens_its_pictures(
    browser: Browser, tmp_path: Path
) -> None:
    browser.open(write_report(make_search(tmp_path / "search")).page)
    assert browser.errors == []
    assert str(hover(browser, "#search .point.shown")).startswith("policy ")
    before = browser.run("document.getElementById('case').selectedOptions[0].textContent")
    click(browser, "#search .point.shown")
    after = browser.run("document.getElementById('case').selectedOptions[0].textContent")
    assert before.startswith("none on") and after.startswith("single on the semi-trained model")
    browser.resize(390)
    assert browser.run("document.documentElement.scrollWidth") == 390


def test_csv_and_json_are_saved(browser: Browser, page: Path, tmp_path: Path) -> None:
    browser.open(page)
    browser.allow_downloads(tmp_path)
    for number, name in enumerate(("audit.csv", "rows.json")):
        click(browser, ".save", number)
        until = time.monotonic() + 30
        # The name is there before the content is.
        while not ((tmp_path / name).is_file() and (tmp_path / name).stat().st_size):
            assert time.monotonic() < until
            browser.run("new Promise((done) => setTimeout(done, 50))")
    assert (tmp_path / "audit.csv").read_text() == page.with_name("audit.csv").read_text()
    assert json.loads((tmp_path / "rows.json").read_text())[0]["defense"] == "none"


def test_hostile_names_are_seen_and_run_nothing(browser: Browser, tmp_path: Path) -> None:
    folder = make_audit(
        tmp_path / "run",
        {"none": {"dlg": 5}, HOSTILE: {"dlg": 3}},
        data=f"folder:{HOSTILE}",
        model=f"x:{HOSTILE}",
        accuracies={"none": 0.9, HOSTILE: 0.8},
    )
    browser.open(write_report(folder, with_pictures=True).page)
    hover(browser, "#accuracy .point:last-child")
    browser.run("document.getElementById('case').selectedIndex = 1")
    assert browser.errors == []
    assert browser.run("document.querySelectorAll('script:not([type])').length") == 1
    assert browser.run("document.querySelectorAll('img[src=x]').length") == 0
    assert HOSTILE in browser.run("document.getElementById('case').textContent")
    assert HOSTILE in browser.run("document.querySelector('.chips').textContent")


def test_on_paper_there_are_no_controls_and_the_rest_is_there(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.call("Emulation.setEmulatedMedia", media="print")
    hidden = browser.run(
        """["nav", ".tools", ".slider"].map(
          (name) => getComputedStyle(document.querySelector(name)).display)"""
    )
    assert hidden == ["none"] * 3
    assert browser.run("getComputedStyle(document.querySelector('.film')).display") == "block"
    browser.resize(700)
    assert browser.run("document.documentElement.scrollWidth") == 700
    browser.call("Emulation.setEmulatedMedia", media="")
    assert browser.call("Page.printToPDF")["data"].startswith("JVBERi0")
