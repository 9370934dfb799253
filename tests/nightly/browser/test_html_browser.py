"""The page in a browser, with mouse and keyboard. `make test-browser` installs a browser and runs these tests."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, find_browser
from replay_runs import made_up_run, simulated_run

from quire.replay.report.html import write_html
from quire.replay.run.run_record import RequestRun, RunRecord

PROGRAM = find_browser()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no chromium here: `make test-browser` installs it"),
]
WATERFALL = ".requests .u-over"
CHART = 'section[aria-label="Over time"] .u-over'
NOTE = ".waterfall-note"


def opened(folder: Path, *runs: RunRecord, width: int = 1280) -> Browser:
    write_html(folder / "run.html", runs)
    assert PROGRAM is not None
    browser = Browser(PROGRAM, width)
    browser.open(folder / "run.html")
    return browser


def check_quiet(browser: Browser, folder: Path) -> None:
    """Check that the page logged no error and requested nothing but itself."""
    assert browser.errors == []
    assert browser.requests == [(folder / "run.html").as_uri()]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with opened(tmp_path, simulated_run()) as browser:
        yield browser
        check_quiet(browser, tmp_path)


def text(browser: Browser, selector: str) -> str:
    found: str = browser.evaluate(f"document.querySelector({selector!r}).textContent")
    return found


def place(browser: Browser, selector: str) -> tuple[float, float, float, float]:
    """Scroll an element into the window; return its x, y, width and height there."""
    browser.evaluate(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
    browser.settle()
    found = f"document.querySelector({selector!r}).getBoundingClientRect()"
    x, y, width, height = browser.evaluate(f"(({{x, y, width, height}}) => [x, y, width, height])({found})")
    return x, y, width, height


def test_click_on_a_row_shows_its_request(browser: Browser) -> None:
    assert "Click a row" in text(browser, "#details")
    x, y, width, height = place(browser, WATERFALL)
    first, last = simulated_run().requests[0], simulated_run().requests[-1]
    browser.click(x + width / 2, y + 2)
    details = text(browser, "#details")
    assert f"Request {first.request_id}Finish" in details and "talk 0" in details
    assert f"{first.first_token:.6f} s" in details.replace("\u00a0", " ")
    browser.click(x + width / 2, y + height - 2)
    assert f"Request {last.request_id}Finishrejected" in text(browser, "#details")


def test_preempted_request_names_its_beneficiary(browser: Browser) -> None:
    out, moment = next((r, m) for r in simulated_run().requests for m in r.moments if m.what == "preempt" and m.other)
    browser.evaluate("document.querySelector('#search').focus()")
    browser.type_text(out.request_id)
    browser.press("Enter")
    details = text(browser, "#details")
    assert f"Request {out.request_id}" in details
    assert f"{moment.reason} for {moment.other}" in details
    browser.evaluate("[...document.querySelectorAll('#details button.link')][0].click()")
    assert f"Request {moment.other}" in text(browser, "#details")


def test_dragging_and_buttons_change_the_view_of_all_charts(browser: Browser) -> None:
    views = [text(browser, "#view")]

    def changed() -> None:
        browser.settle()
        views.append(text(browser, "#view"))
        assert views[-1] != views[-2]

    x, y, width, height = place(browser, CHART)
    browser.drag(x + width / 4, y + 60, x + width / 2, y + 60)
    changed()
    assert "61 of 61" not in text(browser, NOTE)
    for label in ("\u25b6", "+", "\u2212", "\u25c0"):
        browser.evaluate(
            f"[...document.querySelectorAll('.bar button')].find(b => b.textContent === '{label}').click()"
        )
        changed()
    x, y, width, height = place(browser, WATERFALL)
    browser.drag(x + width / 4, y + height / 2, x + width / 2, y + height / 2)
    changed()
    assert "Click a row" in text(browser, "#details")
    for count in (1, 2):
        browser.mouse("mousePressed", x + 50, y + 50, button="left", clickCount=count)
        browser.mouse("mouseReleased", x + 50, y + 50, button="left", clickCount=count)
    browser.settle()
    assert text(browser, "#view") == views[0]
    browser.mouse("mouseMoved", x + width, y - 60)
    browser.settle()
    assert "61 of 61" in text(browser, NOTE)


def test_search_and_kinds_filter_requests(browser: Browser) -> None:
    assert "61 of 61" in text(browser, NOTE)
    browser.evaluate("document.querySelector('#search').focus()")
    browser.type_text("TALK 7")
    assert "5 found" in text(browser, "#results")
    assert "5 of 61" in text(browser, NOTE)
    choose = "const k = document.querySelector('#kind'); k.value = '{}'; k.dispatchEvent(new Event('change'))"
    browser.evaluate("document.querySelector('#search').value = ''")
    browser.evaluate("document.querySelector('#search').dispatchEvent(new Event('input'))")
    browser.evaluate(f"{{ {choose.format('preempted')} }}")
    browser.settle()
    preempted = sum(run.num_preemptions > 0 for run in simulated_run().requests)
    assert f"{preempted} of 61" in text(browser, NOTE)
    browser.evaluate(f"{{ {choose.format('rejected, failed, aborted')} }}")
    browser.settle()
    assert "1 of 61" in text(browser, NOTE)


def test_pointing_at_a_chart_shows_its_values(browser: Browser) -> None:
    x, y, width, height = place(browser, CHART)
    browser.mouse("mouseMoved", x + width / 2, y + height / 2)
    browser.settle()
    over_time = text(browser, 'section[aria-label="Over time"]')
    assert re.search(r"running\d+waiting\d+", over_time)
    assert re.search(r"held by requests\d+", over_time)
    x, y, width, height = place(browser, "section[aria-label=Latency] .u-over")
    browser.mouse("mouseMoved", x + width / 2, y + height / 2)
    browser.settle()
    assert re.search(r"cumulative[\d.]+\s%", text(browser, "section[aria-label=Latency]"))
    x, y, width, height = place(browser, WATERFALL)
    browser.mouse("mouseMoved", x + width / 2, y + 2)
    browser.settle()
    assert text(browser, NOTE).startswith(f"{simulated_run().requests[0].request_id}: ")


@pytest.mark.parametrize("width", [400, 800, 1280])
def test_shows_two_runs_side_by_side(tmp_path: Path, width: int) -> None:
    with opened(tmp_path, simulated_run(), simulated_run(160), width=width) as browser:
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate(f"document.querySelectorAll({WATERFALL!r}).length") == 2
        x, y, wide, _ = place(browser, WATERFALL)
        browser.click(x + wide / 2, y + 2)
        assert browser.evaluate("document.querySelectorAll('#details .grid > div').length") == 2
        assert "60 requests succeeded in both runs" in text(browser, "section[aria-label='B against A']")
        check_quiet(browser, tmp_path)


def test_each_note_is_shown_once_and_the_page_follows_the_theme(tmp_path: Path) -> None:
    runs = [copy.copy(simulated_run()) for _ in range(2)]
    for run, own in zip(runs, (["only A"], ["only B"]), strict=True):
        run.notes = ["both", *own]
    with opened(tmp_path, *runs) as browser:
        lists = browser.evaluate("[...document.querySelectorAll('#main > .box ul')].map((each) => each.textContent)")
        assert lists == ["both", "only A", "only B"]
        seen = []
        for theme in ("light", "dark"):
            browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
            browser.settle()
            shade = "getComputedStyle(document.{}).backgroundColor"
            picture = "[...document.querySelectorAll('canvas')].map((each) => each.toDataURL())"
            seen.append((browser.evaluate(shade.format("body")), *browser.evaluate(picture)))
        assert all(light != dark for light, dark in zip(*seen, strict=True)), "a chart keeps its colours"
        check_quiet(browser, tmp_path)


def test_client_ids_are_text(tmp_path: Path) -> None:
    broken = "document.title='broken'"
    evil = f"</script><script>{broken}</script><img src=http://127.0.0.1:9/x onerror={broken}>"
    run = RequestRun(evil, 0.0, 5, evil, end=0.0, finish="rejected", finish_detail=evil)
    with opened(tmp_path, RunRecord(evil, notes=[evil], settings={evil: evil}, requests=[run])) as browser:
        browser.evaluate("document.querySelector('#search').focus()")
        browser.type_text("script")
        browser.press("Enter")
        assert evil in text(browser, "#details")
        assert browser.evaluate("document.title") == f"{evil} - Quire replay"
        assert browser.evaluate("document.images.length") == 0
        check_quiet(browser, tmp_path)


@pytest.mark.parametrize("record", [RunRecord(), made_up_run(5000, 60_000)], ids=["empty", "large"])
def test_opens_smallest_and_largest_run(tmp_path: Path, record: RunRecord) -> None:
    with opened(tmp_path, record) as browser:
        assert browser.evaluate(f"document.querySelectorAll({WATERFALL!r}).length") == 1
        x, y, width, _ = place(browser, CHART)
        browser.drag(x + width / 4, y + 60, x + width / 2, y + 60)
        browser.click(x + width / 2, y + 60)
        check_quiet(browser, tmp_path)
