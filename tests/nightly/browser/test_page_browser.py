"""The page at ``/`` in a browser, over the demo model. `make test-browser` installs a browser and runs these tests."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from browser import Browser, find_browser
from served import Served

PROGRAM = find_browser()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no chromium here: `make test-browser` installs it"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    served = Served("--api-key", "k", "--admin-api-key", "a", "--served-model-name", "tiny", "<b>other</b>")
    yield served
    assert served.stop() == 0


@pytest.fixture
def browser(server: Served) -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM, width=400) as browser:
        browser.visit(f"{server.url}/")
        yield browser
        assert all(url.startswith(f"{server.url}/") and "?" not in url for url in browser.requests)
        assert [error for error in browser.errors if "status of 40" not in error] == []


def until(browser: Browser, condition: str) -> None:
    """Wait until the page fulfils the condition."""
    assert browser.evaluate(
        f"new Promise((done) => {{ const wait = (n) => ({condition}) ? done(true) : n ? setTimeout(wait, 20, n - 1) : "
        "done(false); wait(1000); })"
    ), condition


def text(browser: Browser, selector: str) -> str:
    return str(browser.evaluate(f"document.querySelector({selector!r}).textContent"))


def enter(browser: Browser, selector: str, written: str) -> None:
    """Type into a field and press Enter."""
    browser.evaluate(f"document.querySelector({selector!r}).focus()")
    browser.type_text(written)
    press: dict[str, Any] = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
    browser.call("Input.dispatchKeyEvent", type="keyDown", **press)
    browser.call("Input.dispatchKeyEvent", type="keyUp", **press)


def log_in(browser: Browser) -> None:
    until(browser, "!document.querySelector('#login').hidden")
    enter(browser, "#key", "k")
    until(browser, "document.querySelector('#models').options.length === 2")


def test_a_key_opens_the_chat_and_an_answer_is_streamed(browser: Browser) -> None:
    until(browser, "!document.querySelector('#login').hidden")
    enter(browser, "#key", "wrong")
    until(browser, "!document.querySelector('#error').hidden")
    assert "invalid API key" in text(browser, "#error")
    browser.evaluate("document.querySelector('#key').value = ''")
    log_in(browser)
    assert browser.evaluate("document.querySelector('#error').hidden")
    enter(browser, "#text", "Count from 1 to 5.")
    until(browser, "document.querySelector('.assistant .note')?.textContent.includes('tokens in')")
    assert text(browser, ".answer") == "1, 2, 3, 4, 5."
    assert browser.evaluate("document.documentElement.scrollWidth") == 400


def test_no_percentile_exceeds_the_largest_value(browser: Browser) -> None:
    """Of four values of 10.03: in the middle of their bucket is 15."""
    samples = {
        **{f'bucket{{le="{bound}"}}': 4 * (bound != "10") for bound in ("10", "20", "+Inf")},
        "sum": 40.12,
        "count": 4,
    }
    body = "\n".join(f"quire:e2e_request_latency_seconds_{name} {value}" for name, value in samples.items())
    browser.evaluate(
        "(() => { const real = window.fetch; window.fetch = (url, ...more) => String(url).includes('metrics') "
        f"? Promise.resolve(new Response({json.dumps(body)})) : real(url, ...more); }})()"
    )
    row = "[...document.querySelectorAll('#times tr')].at(-1)"
    until(browser, f"{row}?.textContent.endsWith('4')")
    assert browser.evaluate(f"[...{row}.children].map((cell) => cell.textContent)")[1:] == ["10.03"] * 3 + ["4"]


def test_text_is_never_markup_and_errors_are_shown(browser: Browser) -> None:
    log_in(browser)
    browser.evaluate("document.querySelector('#models').selectedIndex = 1")
    enter(browser, "#text", "<img src=x><script>alert(1)</script> " + "word " * 3000)
    until(browser, "!document.querySelector('#error').hidden")
    assert "maximum context length" in text(browser, "#error")
    assert browser.evaluate("document.querySelector('#text').value").startswith("<img src=x>")
    assert browser.evaluate("document.querySelectorAll('article, img, b').length") == 0


def test_escape_stops_an_answer_and_a_new_chat_is_empty(browser: Browser, server: Served) -> None:
    log_in(browser)
    browser.evaluate(
        "new MutationObserver((_, seen) => { if (!document.querySelector('.answer')?.textContent) return; "
        "seen.disconnect(); document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'})); })"
        ".observe(document.querySelector('#messages'), {childList: true, subtree: true})"
    )
    enter(browser, "#text", "Tell me a story.")
    until(browser, "document.querySelector('.assistant .note')?.textContent === 'stopped'")
    assert server.wait_until_idle()
    browser.evaluate("document.querySelector('#clear').click()")
    assert browser.evaluate("document.querySelectorAll('article').length") == 0


def test_tenants_and_requests_need_the_administrators_key(browser: Browser, server: Served) -> None:
    browser.evaluate("document.querySelector('#admin summary').click()")
    enter(browser, "#admin-key", "k")
    until(browser, "!document.querySelector('#admin-error').hidden")
    assert "missing or invalid administrator's key" in text(browser, "#admin-error")
    enter(browser, "#admin-key", "a")
    until(browser, "!document.querySelector('#admin-state').hidden")
    httpx.post(f"{server.url}/admin/pause", headers={"authorization": "Bearer a"}).raise_for_status()
    try:
        log_in(browser)
        enter(browser, "#text", "Hello")
        until(browser, "document.querySelector('#requests').textContent.includes('waiting (paused)')")
        assert text(browser, "#tenants th") == "1"
        until(browser, "document.querySelector('#state').textContent === 'paused'")
    finally:
        httpx.post(f"{server.url}/admin/resume", headers={"authorization": "Bearer a"}).raise_for_status()
    until(browser, "document.querySelector('#send').hidden === false")


def test_figures_are_those_of_the_server(browser: Browser, server: Served) -> None:
    until(browser, "document.querySelector('#state').textContent === 'ready'")
    blocks = f"{int(server.metrics()['quire:num_usable_blocks']):,}"
    until(browser, f"document.querySelector('#numbers').textContent.includes('of {blocks}')")
    until(browser, "document.querySelector('#window').textContent.startsWith('last')")


@pytest.mark.parametrize(
    ("ending", "note", "error"),
    [
        (["[DONE]"], "s, cut at its limit of tokens", ""),
        ([], "incomplete", "the answer was cut off"),
        (['{"error": {"message": "it failed"}}'], "incomplete", "it failed"),
    ],
)
def test_thoughts_are_folded_and_broken_answers_are_reported(
    browser: Browser, ending: list[str], note: str, error: str
) -> None:
    """The page's requests are answered by a made-up stream."""
    log_in(browser)
    deltas = [{"reasoning": "Let me "}, {"reasoning": "think."}, {"content": "Four"}, {"content": "."}]
    events = [json.dumps({"choices": [{"delta": delta, "finish_reason": "length"}]}) for delta in deltas] + ending
    stream = "".join(f"data: {event}\n\n" for event in events)
    browser.evaluate(f"window.fetch = async (url) => new Response({json.dumps(stream)})")
    enter(browser, "#text", "2 + 2?")
    until(browser, f"document.querySelector('.assistant .note').textContent.endsWith({note!r})")
    assert text(browser, "#error") == error
    assert text(browser, ".assistant details .text") == "Let me think."
    assert not browser.evaluate("document.querySelector('.assistant details').open")
    assert text(browser, ".answer") == "Four."


MARKDOWN = """# Title

Use `x` & **<b>b</b>** [a](javascript:alert(1)) [ok](https://a.test/) ![](https://a.test/x.png)

- one
  - two

```python
print("<i>")
```

| a | b |
|---|---|
| 1 | 2 |
"""


def answer_with(browser: Browser, content: str) -> None:
    """Answer each further request of the page with ``content``, one character at a time, and note its body."""
    events = [json.dumps({"choices": [{"delta": {"content": char}, "finish_reason": "stop"}]}) for char in content]
    stream = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
    browser.evaluate(
        f"window.fetch = async (url, {{ body }} = {{}}) => {{ if (body) (window.bodies ||= []).push(JSON.parse(body)); "
        f"return new Response({json.dumps(stream)}); }}"
    )


def test_markdown_is_shown_and_neither_its_html_nor_its_images_are(browser: Browser) -> None:
    log_in(browser)
    answer_with(browser, MARKDOWN)
    enter(browser, "#text", "Show")
    until(browser, "document.querySelector('.assistant .note')?.textContent.endsWith(' s')")
    count = "document.querySelectorAll('.answer {}').length"
    for found in ("h4", "p > code", "strong", "ul ul > li", "figure pre > code", "tbody td + td"):
        assert browser.evaluate(count.format(found)) == 1, found
    assert browser.evaluate(count.format("b") + " + " + count.format("i") + " + document.images.length") == 0
    links = browser.evaluate("[...document.querySelectorAll('.answer a')].map((a) => [a.href, a.rel, a.textContent])")
    addresses = ["https://a.test/", "https://a.test/x.png"]
    assert links == [
        [address, "noopener noreferrer", shown]
        for address, shown in zip(addresses, ["ok", f"image: {addresses[1]}"], strict=True)
    ]
    assert "<b>b</b> [a](javascript:alert(1))" in text(browser, ".answer")
    browser.evaluate("document.querySelector('.copy').click()")
    assert browser.evaluate("getSelection().toString().trim()") == 'print("<i>")'
    assert browser.evaluate("document.documentElement.scrollWidth") == 400


def test_an_answer_is_given_again_with_system_prompt_and_temperature(browser: Browser) -> None:
    log_in(browser)
    assert browser.evaluate("document.querySelector('#again').hidden")
    answer_with(browser, "First")
    enter(browser, "#text", "Hello")
    until(browser, "!document.querySelector('#again').hidden")
    browser.evaluate("document.querySelector('#settings summary').click()")
    for field, written in (("#system", "Be brief"), ("#temperature", "0")):
        browser.evaluate(f"document.querySelector({field!r}).focus()")
        browser.type_text(written)
    for answer, shown in (("Second", "Second"), ("", "Second")):  # the old answer comes back for an empty one
        answer_with(browser, answer)
        browser.evaluate("document.querySelector('#again').click()")
        until(browser, "!document.querySelector('#again').hidden")
        assert browser.evaluate("document.querySelectorAll('article').length") == 2
        assert text(browser, ".answer") == shown
    asked = {"role": "user", "content": "Hello"}
    first, second, _ = browser.evaluate("bodies")
    assert first["messages"] == [asked] and "temperature" not in first
    assert second["messages"] == [{"role": "system", "content": "Be brief"}, asked] and second["temperature"] == 0


def test_the_page_of_the_routes_sends_requests_with_a_key(browser: Browser, server: Served) -> None:
    browser.visit(f"{server.url}/docs#get-/v1/models")
    root = "document.querySelector('rapi-doc').shadowRoot"
    asked = f"{root}?.querySelector('api-request')?.shadowRoot"
    until(browser, f"{asked}?.querySelector('button')")
    browser.evaluate(f"{root}.querySelector('.api-key-input').value = 'k'")
    browser.evaluate(f"{root}.querySelector('.api-key-input + button').click()")
    until(browser, f"{root}.textContent.includes('1 API key applied')")
    browser.evaluate(f"[...{asked}.querySelectorAll('button')].find((each) => each.textContent === 'TRY').click()")
    until(browser, f"{asked}.textContent.includes('max_model_len')")


DRAW = """
new Promise((done) => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 180, height: 140 });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "white";
  pen.fillRect(0, 0, 180, 140);
  pen.fillStyle = COLOR;
  if (THING === "circle") { pen.arc(90, 70, 45, 0, 7); pen.fill(); }
  else { pen.font = "110px sans-serif"; pen.textAlign = "center"; pen.fillText(THING, 90, 110); }
  canvas.toBlob((blob) => {
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([blob], `${THING}.png`, { type: "image/png" }));
    const drop = new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true });
    document.querySelector("#chat").dispatchEvent(drop);
    done();
  });
})
"""
"""Draws a thing of one color and drops it on the page as a file."""


def test_a_conversation_about_two_pictures() -> None:
    assert PROGRAM is not None
    served = Served("demo-vision", "--served-model-name", "demo-vision")
    with Browser(PROGRAM, width=1000) as browser:
        browser.visit(f"{served.url}/")
        until(browser, "!document.querySelector('#attach').hidden")
        browser.evaluate("document.querySelector('#temperature').value = '0'")
        asks = [
            ("circle", "red", "What is in this image?", "A red circle."),
            ("1", "green", "What is this?", "A green 1."),
            ("", "", "What color is the 1?", "The 1 is green."),
        ]
        for number, (thing, color, ask, answer) in enumerate(asks, 1):
            if thing:
                browser.evaluate(DRAW.replace("THING", json.dumps(thing)).replace("COLOR", json.dumps(color)))
                until(browser, "document.querySelectorAll('#attached li').length === 1")
            enter(browser, "#text", ask)
            notes = "[...document.querySelectorAll('.assistant .note')]"
            until(browser, f"{notes}.filter((note) => note.textContent.includes('tokens in')).length === {number}")
            assert browser.evaluate("[...document.querySelectorAll('.answer')].pop().textContent") == answer
        assert browser.evaluate("document.querySelectorAll('.user img').length") == 2
        assert browser.errors == []
    assert served.stop() == 0
