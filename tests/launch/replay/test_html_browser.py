"""The page in a browser, with a mouse and a keyboard. `make test-browser` installs one and runs this."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, find_browser
from replay_runs import made_up_run, simulated_run

from quire.launch.replay.report.html import write_html
from quire.launch.replay.run.run_record import RequestRun, RunRecord

PROGRAM = find_browser()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no chromium here: `make test-browser` installs it"),
]
WATERFALL = ".lives canvas"
CHART = 'section[aria-label="Over time"] canvas'


def opened(folder: Path, *runs: RunRecord, width: int = 1280, dark: bool = False) -> Browser:
    write_html(folder / "run.html", runs)
    assert PROGRAM is not None
    browser = Browser(PROGRAM, width, dark=dark)
    browser.open(folder / "run.html")
    return browser


def check_quiet(browser: Browser, folder: Path) -> None:
    """Nothing was complained about, and nothing but the page itself was asked for."""
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
    """x, y, width, height in the window, into which it is scrolled."""
    browser.evaluate(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
    browser.settle()
    found = f"document.querySelector({selector!r}).getBoundingClientRect()"
    x, y, width, height = browser.evaluate(f"(({{x, y, width, height}}) => [x, y, width, height])({found})")
    return x, y, width, height


def test_a_click_on_a_bar_shows_its_request(browser: Browser) -> None:
    assert "Click a bar" in text(browser, "#details")
    x, y, width, _ = place(browser, WATERFALL)
    browser.click(x + width / 2, y + 9)
    details = text(browser, "#details")
    first, second = simulated_run().requests[:2]
    assert f"Request {first.request_id}Ended" in details and "talk 0" in details
    assert f"{first.first_token:.6f} s" in details.replace("\u00a0", " ")
    browser.evaluate(f"document.querySelector({WATERFALL!r}).focus()")
    browser.press("ArrowDown")
    assert f"Request {second.request_id}Ended" in text(browser, "#details")


def test_a_preempted_request_tells_for_whose_sake(browser: Browser) -> None:
    out, moment = next((r, m) for r in simulated_run().requests for m in r.moments if m.what == "preempt" and m.other)
    browser.evaluate("document.querySelector('#search').focus()")
    browser.type_text(out.request_id)
    browser.press("Enter")
    details = text(browser, "#details")
    assert f"Request {out.request_id}" in details
    assert f"{moment.reason} for {moment.other}" in details
    browser.evaluate("[...document.querySelectorAll('#details button.link')][0].click()")
    assert f"Request {moment.other}" in text(browser, "#details")


def test_wheel_drag_and_keys_change_the_view(browser: Browser) -> None:
    views = [text(browser, "#view")]

    def changed() -> None:
        browser.settle()
        views.append(text(browser, "#view"))
        assert views[-1] != views[-2]

    x, y, width, height = place(browser, WATERFALL)
    middle = x + width / 2, y + height / 2
    browser.mouse("mouseWheel", *middle, deltaX=0, deltaY=-300)
    changed()
    assert "61 of 61" not in text(browser, ".lives .plot + p")
    browser.drag(*middle, middle[0] - 150, middle[1])
    changed()
    browser.press("0")
    browser.evaluate("document.querySelector('#reset').click()")
    changed()
    assert views[-1] == views[0]
    x, y, width, height = place(browser, CHART)
    browser.drag(x + 120, y + 60, x + 260, y + 60)
    changed()
    browser.evaluate(f"document.querySelector({CHART!r}).focus()")
    for key in ("ArrowRight", "+", "-", "ArrowLeft"):
        browser.press(key)
        changed()
    browser.press("0")
    assert text(browser, "#view") == views[0]


def test_search_and_kinds_choose_requests(browser: Browser) -> None:
    assert "61 of 61" in text(browser, ".lives .plot + p")
    browser.evaluate("document.querySelector('#search').focus()")
    browser.type_text("TALK 7")
    assert "5 found" in text(browser, "#results")
    assert "5 of 61" in text(browser, ".lives .plot + p")
    choose = "const k = document.querySelector('#kind'); k.value = '{}'; k.dispatchEvent(new Event('change'))"
    browser.evaluate("document.querySelector('#search').value = ''")
    browser.evaluate("document.querySelector('#search').dispatchEvent(new Event('input'))")
    browser.evaluate(f"{{ {choose.format('preempted')} }}")
    browser.settle()
    preempted = sum(run.num_preemptions > 0 for run in simulated_run().requests)
    assert f"{preempted} of 61" in text(browser, ".lives .plot + p")
    browser.evaluate(f"{{ {choose.format('unsuccessful')} }}")
    browser.settle()
    assert "1 of 61" in text(browser, ".lives .plot + p")


def test_pointing_at_a_chart_reads_it_out(browser: Browser) -> None:
    x, y, width, height = place(browser, CHART)
    browser.mouse("mouseMoved", x + width / 2, y + height / 2)
    assert "running" in text(browser, "#tip") and "waiting" in text(browser, "#tip")
    x, y, width, height = place(browser, "section[aria-label=Latency] canvas")
    browser.mouse("mouseMoved", x + width / 2, y + height / 2)
    assert "up to here" in text(browser, "#tip")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [800, 1280])
def test_two_runs_side_by_side(tmp_path: Path, width: int, dark: bool) -> None:
    with opened(tmp_path, simulated_run(), simulated_run(160), width=width, dark=dark) as browser:
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate("document.querySelectorAll('.lives canvas').length") == 2
        x, y, wide, _ = place(browser, WATERFALL)
        browser.click(x + wide / 2, y + 9)
        assert browser.evaluate("document.querySelectorAll('#details .pair > div').length") == 2
        assert "60 ended well in both" in text(browser, "section[aria-label='B against A']")
        page = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        browser.evaluate("document.querySelector('#theme').click()")
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") != page
        check_quiet(browser, tmp_path)


def test_ids_of_clients_are_text(tmp_path: Path) -> None:
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
def test_the_smallest_and_the_largest_run_open(tmp_path: Path, record: RunRecord) -> None:
    with opened(tmp_path, record) as browser:
        assert browser.evaluate("document.querySelectorAll('.lives canvas').length") == 1
        browser.evaluate(f"document.querySelector({CHART!r}).focus()")
        browser.press("+")
        check_quiet(browser, tmp_path)


def test_it_prints_in_light_colours(tmp_path: Path) -> None:
    with opened(tmp_path, simulated_run(), dark=True) as browser:
        printed = browser.call("Page.printToPDF", printBackground=True)["data"]
        assert len(printed) > 20_000
        assert browser.evaluate("document.documentElement.dataset.theme") is None
        check_quiet(browser, tmp_path)
