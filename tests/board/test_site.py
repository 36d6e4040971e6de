"""The site in a real browser: it sorts, filters, tells, links, needs no mouse, and runs nothing that a record says."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from prunebench.board import build_board, write_board
from prunebench.board.markdown import to_markdown

_spec = importlib.util.spec_from_file_location("prunebench_tests_browser", Path(__file__).parent / "browser.py")
browser_module = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(browser_module)

needs_browser = pytest.mark.skipif(browser_module.CHROMIUM is None, reason="no chromium on PATH")
HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>|`x`[y](javascript:z)'&amp;"
)
LAYERS = {"1": {"calls": 9, "filled_share": 0.0, "displaced_share": 0.4, "keep_over_renorm": 0.5, "above_one_share": 0}}


@pytest.fixture(scope="module")
def site(factory, tmp_path_factory):
    """The demo's shape with enough items for claims, cards, and a method of a hostile mind."""
    folder = tmp_path_factory.mktemp("site")
    factory.demo(folder / "r", n=40)
    factory.demo(folder / "r", n=40, model="tiny-moonlight")
    hostile = dict.fromkeys(("convention", "mask", "operator", "scale", "fit_draw"), HOSTILE)
    identity = {
        "method": {"name": HOSTILE, "parameters": {HOSTILE: HOSTILE}, "file_sha256": HOSTILE},
        "operator": {"name": HOSTILE, "parameters": {"p": [HOSTILE]}, "reference": HOSTILE},
    }
    checks = [{"check": HOSTILE, "status": "fail", "detail": HOSTILE}]
    changes = {**hostile, "identity": identity, "integrity": checks, "routing": {"bos": HOSTILE, "layers": LAYERS}}
    volatile = {"host": HOSTILE, "error": HOSTILE, "seconds": 1}
    factory.write(folder / "r" / "owned", factory.make_items(n=40), **changes, volatile=volatile)
    (folder / "r" / "<img src=x onerror=alert(1)>").mkdir()
    (folder / "r" / os.fsdecode(b"not-utf8-\xff")).mkdir()
    (folder / "cards").mkdir()
    (folder / "cards" / "mone.md").write_text(f"# MoNE\n\n{HOSTILE}\n")
    write_board(build_board(folder / "r", track="t"), folder / "out", cards=folder / "cards")
    return folder / "out"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = browser_module.Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def visible(browser, column):
    """The main text of a column in the rows that are shown."""
    return browser.look(
        f"""(() => {{ const at = [...document.querySelectorAll('#board thead th')]
          .findIndex((head) => head.dataset.key === '{column}');
          return [...document.querySelectorAll('#board tbody tr')].filter((row) => row.offsetParent !== null)
            .map((row) => row.cells[at].dataset.sort ?? row.cells[at].firstChild.textContent); }})()"""
    )


@needs_browser
def test_a_press_on_a_title_sorts_up_down_and_back(site, browser):
    browser.open((site / "index.html").as_uri())
    first = visible(browser, "stored")
    for order, sign in (("ascending", 1), ("descending", -1)):
        browser.click("[data-key=stored] button")
        browser.until(f"document.querySelector('[data-key=stored]').ariaSort === '{order}'")
        numbers = [float(text) for text in visible(browser, "stored")]
        assert numbers == sorted(numbers, key=lambda number: sign * number)
        assert f"order={order}" in browser.look("location.hash")
    browser.click("[data-key=stored] button")
    browser.until("document.querySelector('[data-key=stored]').ariaSort === 'none'")
    assert visible(browser, "stored") == first


@needs_browser
def test_the_keyboard_does_what_the_mouse_does(site, browser):
    browser.open((site / "index.html").as_uri())
    browser.look("document.querySelector('[data-key=perplexity] button').focus()")
    browser.key("Enter")
    browser.until("document.querySelector('[data-key=perplexity]').ariaSort === 'ascending'")
    browser.look("document.getElementById('filter').focus()")
    browser.call("Input.insertText", text="REROUTE random")
    browser.until("document.getElementById('count').textContent === '4 of 15 rows'")
    assert set(visible(browser, "method")) == {"random"}
    browser.key("Tab")
    assert browser.look("document.activeElement.id") == "model"


@needs_browser
@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("", 15),
        ("#model=tiny-moonlight", 7),
        ("#model=tiny-moonlight&pruned=0.5&filter=constant", 2),
        ("#sort=nonsense&order=ascending", 15),
        ("#filter=%3Cimg", 1),
        ("#sort=multiple_choice-gain&hide=d.x", 15),
    ],
)
def test_an_address_is_a_view(site, browser, link, shown):
    browser.open((site / "index.html").as_uri() + link)
    assert len(visible(browser, "model")) == shown
    hidden = {name for name in "sdcx" if not browser.look(f"document.querySelector('th.{name}').offsetParent !== null")}
    assert hidden == ({"d", "x"} if "hide" in link else set())


@needs_browser
def test_links_lead_to_the_runs_page_its_record_and_the_methods_card(site, browser):
    browser.open((site / "index.html").as_uri())
    browser.click("tbody tr:nth-child(2) a[href^='runs/']")
    browser.until("location.pathname.includes('/runs/')")
    browser.until("document.readyState === 'complete'")
    assert browser.look("document.querySelectorAll('svg.mask').length") == 2
    browser.click("a[href^='../records/']")
    browser.until("location.pathname.endsWith('.json')")
    browser.until("document.body !== null && document.body.textContent.includes('identity')")
    browser.open((site / "index.html").as_uri())
    browser.click("a[href='methods/mone.html']")
    browser.until("location.pathname.endsWith('/methods/mone.html')")
    browser.until("document.readyState === 'complete'")
    assert HOSTILE in browser.look("document.querySelector('pre.card').textContent")


@pytest.mark.parametrize("message", ["Inspected target navigated or closed", "Execution context was destroyed."])
def test_a_page_that_is_left_while_it_is_asked_is_waited_for(message):
    browser = object.__new__(browser_module.Browser)
    browser._number, browser._session, browser._send, browser.events = 0, None, io.BytesIO(), []
    answers = [
        {"id": 1, "error": {"code": -32000, "message": message}},
        {"id": 2, "result": {"result": {"value": True}}},
        {"id": 3, "error": {"code": -32601, "message": "no such method"}},
    ]
    browser._rest = b"".join(json.dumps(answer).encode() + b"\0" for answer in answers)
    browser.until("it is so")
    assert browser._number == 2
    with pytest.raises(AssertionError, match="no such method"):
        browser.until("it is so")


@needs_browser
def test_a_mark_says_its_run_when_one_points_at_it(site, browser):
    browser.open((site / "plots.html").as_uri())
    browser.move(".plot [aria-roledescription=point]")
    browser.until("document.getElementById('tip').hidden === false")
    assert re.search(r"tiny-|mone|random|dense|reap", browser.look("document.getElementById('tip').textContent"))


@needs_browser
def test_nothing_that_a_record_says_runs_or_is_fetched(site, browser):
    pages = [site / name for name in ("index.html", "plots.html", "contrasts.html", "methods/mone.html")]
    owned = next(path for path in (site / "runs").iterdir() if "owned" in path.read_text())
    for page in [*pages, owned]:
        browser.open(page.as_uri())
        if page.name == "contrasts.html":
            browser.look("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert "owned" not in browser.look("document.title").split(": ")[0]
        assert browser.look("document.querySelectorAll('img, iframe, object, embed, link, foreignObject').length") == 0
        assert (
            browser.look(
                "[...document.querySelectorAll('*')].some((e) => e.getAttributeNames().some((n) => n.startsWith('on')))"
            )
            is False
        )
        assert browser.look("[...document.links].every((a) => a.protocol === 'file:')") is True
        assert browser.look("performance.getEntriesByType('resource').length") == 0
        faults = [one for one in browser.events if one["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
        assert faults == [], page.name


@needs_browser
@pytest.mark.parametrize("width", [390, 1700])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_fit_a_phone_and_a_wide_screen_in_both_themes(site, browser, width, theme):
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
    for name in ("index.html", "plots.html", "contrasts.html"):
        browser.open((site / name).as_uri())
        assert browser.look("document.documentElement.scrollWidth <= innerWidth"), f"{name} scrolls sideways"
        ink, back = (browser.look(f"getComputedStyle(document.body).{key}") for key in ("color", "backgroundColor"))
        assert contrast(ink, back) > 7
    browser.call("Emulation.clearDeviceMetricsOverride")
    browser.call("Emulation.setEmulatedMedia", features=[])


@needs_browser
def test_paper_holds_every_column_and_what_was_folded(site, browser):
    landscape = 1047  # A4 less its margins, in pixels of CSS
    run = next(path for path in (site / "runs").iterdir() if "<h2>Mask" in path.read_text())
    browser.call("Emulation.setDeviceMetricsOverride", width=landscape, height=718, deviceScaleFactor=1, mobile=False)
    browser.call("Emulation.setEmulatedMedia", media="print")
    for page in (*map(site.joinpath, ("index.html", "plots.html", "contrasts.html", "methods/mone.html")), run):
        browser.open(page.as_uri())
        assert browser.look("document.documentElement.scrollWidth") <= landscape, f"{page.name} is cut off"
        sizes = browser.look(
            "[...document.querySelectorAll('small')].map((one) => [one, one.parentElement]"
            ".map((e) => parseFloat(getComputedStyle(e).fontSize)))"
        )
        assert all(small < around for small, around in sizes), f"{page.name}: the small print is large"
        folded = "[...document.querySelectorAll('details > :not(summary)')].every((one) => one.checkVisibility())"
        assert browser.look(folded), f"{page.name}: what is folded is lost"
    browser.call("Emulation.clearDeviceMetricsOverride")
    browser.call("Emulation.setEmulatedMedia", media="")


def contrast(*colors):
    """WCAG's ratio of two `rgb(r, g, b)`."""

    def luminance(color):
        parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted(map(luminance, colors), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_every_link_of_the_site_is_to_a_file_of_it(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/)", text), page
        for target in re.findall(r'href="([^"]*)"', text):
            assert not urlsplit(target).scheme
            assert (page.parent / target).is_file(), (page, target)
        policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
        assert policy.startswith("default-src 'none'")
        assert "script-src 'unsafe-inline'" not in policy


def test_pages_of_runs_that_are_gone_go_too(factory, tmp_path):
    factory.write(tmp_path / "r" / "a", factory.make_items(n=2))
    gone = build_board(tmp_path / "r").table.rows[0].entry.id
    write_board(tmp_path / "r", tmp_path / "out")
    assert (tmp_path / "out" / "runs" / f"{gone}.html").is_file()
    factory.write(tmp_path / "r" / "b", factory.make_items(n=2), mask="b")
    (tmp_path / "r" / "a").rename(tmp_path / "a")
    write_board(tmp_path / "r", tmp_path / "out")
    for folder, suffix in (("runs", "html"), ("records", "json")):
        (only,) = (tmp_path / "out" / folder).iterdir()
        assert only.name != f"{gone}.{suffix}"


def test_hostile_text_is_only_text_in_markdown(site, tmp_path):
    board = build_board(site.parent / "r", track="t")
    links = board.markdown(tmp_path / "README.md", tmp_path / "docs")
    for text in (to_markdown(board.table, board.shown_left_out), *links.values()):
        assert "<" not in text
        assert "`" not in text.replace("\\`", "")
        targets = re.findall(r"(?<!\\)\]\(([^)]*)\)", text)
        assert not [target for target in targets if re.search(r"[\s<>\"'`]|^\w+:", target)]
        assert len({line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("| t")}) <= 2


def test_every_word_of_the_columns_is_explained(site):
    board = build_board(site.parent / "r", track="t")
    page = (site / "index.html").read_text().split("Legend")[1]
    for text in (to_markdown(board.table, ()).split("Legend")[1], page):
        assert "every number" not in text, "bytes and checks are not recomputed"
        for word in (
            "computed again from the per-item outcomes",
            "Stored bytes, integrity and calls rerouted are as the record has them",
            *("trained", "keep", "renorm", "item bootstrap", "B = 10,000", "lower is better", "Holm", "group", "gaps"),
        ):
            assert word in text
