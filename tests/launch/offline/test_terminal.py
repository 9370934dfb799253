"""``quire chat`` and ``quire generate``: streamed text, a running server instead of an own engine, clear errors."""

import contextlib
import io
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_http import Answer, FakeHttp, fake_http
from served import QUIRE

from quire.launch import cli

TEXTS = ("Hel", "lo", " there")


class Streams:
    """The answers of the server: some events, of which a client that stalls receives the first only."""

    def __init__(self) -> None:
        self.status = 200
        self.refused = "(nothing)"
        self.stalls = False
        self.events: list[bytes] = []

    def __call__(self, body: Any) -> Answer:
        if self.status != 200:
            return self.status, b'{"error": {"message": "too hot"}}'
        if self.refused in str(body):
            return 400, b'{"error": {"message": "messages[2].content[0].image_url.url must be an image file"}}'
        events = [b"data: %b\n\n" % event for event in self.events]
        return (200, events[0], 10**6) if self.stalls else (200, b"".join(events))

    def are(self, *, chat: bool, end: bool = True) -> None:
        texts = [{"delta": {"content": t}} if chat else {"text": t} for t in TEXTS]
        choices = [*texts, {"delta": {}, "text": "", "finish_reason": "stop"}] if end else texts
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
        events: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
        self.events = [json.dumps(event).encode() for event in (*events, {"choices": [], "usage": usage})]
        self.events += [b"[DONE]"] if end else []


@pytest.fixture
def streams() -> Streams:
    return Streams()


@pytest.fixture
def server(streams: Streams) -> Iterator[FakeHttp]:
    with fake_http(streams) as made:
        yield made


@pytest.mark.parametrize("url_end", ["", "/", "/v1"])
def test_chat_streams_the_answer_of_a_server(
    server: FakeHttp, streams: Streams, url_end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    streams.are(chat=True)
    flags = ["--temperature", "0.5", "--max-tokens", "9", "--api-key", "secret"]
    cli.main(["chat", "--url", server.url + url_end, "--prompt", "Hi", *flags])
    assert capsys.readouterr().out == "Hello there\n"
    ((path, body, authorization),) = server.bodies
    assert (path, authorization) == ("/v1/chat/completions", "Bearer secret")
    assert body["messages"] == [{"role": "user", "content": "Hi"}] and body["stream"] and body["model"] == "one"
    assert (body["temperature"], body["max_tokens"]) == (0.5, 9) and "top_p" not in body


def test_a_conversation_sends_earlier_answers(
    server: FakeHttp, streams: Streams, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    streams.are(chat=True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\n\nsecond\n"))
    cli.main(["chat", "--url", server.url])
    assert capsys.readouterr().out == "Hello there\nHello there\n"
    roles = [(m["role"], m["content"]) for m in server.bodies[1][1]["messages"]]
    assert roles == [("user", "first"), ("assistant", "Hello there"), ("user", "second")]


def test_commands_of_a_conversation(
    server: FakeHttp, streams: Streams, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    streams.are(chat=True)
    lines = ("/help", "first", "/usr/bin is", "/clear", "/hlep", "//help", "/exit", "never")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    cli.main(["chat", "--url", server.url])
    asked = [[m["content"] for m in body["messages"] if m["role"] == "user"] for _, body, _ in server.bodies]
    assert asked == [["first"], ["first", "/usr/bin is"], ["/help"]]
    helped, cleared, unknown, again = capsys.readouterr().err.splitlines()
    assert "/clear: forget the conversation" in helped == again
    assert (cleared, unknown) == ("the conversation is empty", "unknown command /hlep")


def test_images_go_before_the_text_of_the_next_message(
    server: FakeHttp,
    streams: Streams,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    streams.are(chat=True)
    one, other = tmp_path / "a b.webp", tmp_path / "unnamed"
    one.write_bytes(b"1")
    other.write_bytes(b"2")
    lines = (f"/image {other}", "first", "/image", f"/image {tmp_path / 'none.png'}", "second")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    cli.main(["chat", "--url", server.url, "--image", str(one)])
    first, _, second = [message["content"] for message in server.bodies[1][1]["messages"]]
    urls = ["data:image/webp;base64,MQ==", "data:image/png;base64,Mg=="]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    assert first == [*parts, {"type": "text", "text": "first"}] and second == "second"
    added, unknown, _, missing = capsys.readouterr().err.splitlines()
    assert (added, unknown) == ("2 images for the next message", "unknown command /image")
    assert missing.endswith("none.png: cannot be read: No such file or directory")


def test_a_refused_image_does_not_end_a_conversation_on_a_terminal(
    server: FakeHttp,
    streams: Streams,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    streams.are(chat=True)
    streams.refused = "image_url"
    (tmp_path / "image").write_bytes(b"1")
    terminal = io.StringIO(f"first\n/image {tmp_path / 'image'}\nsecond\nthird\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    cli.main(["chat", "--url", server.url])
    assert [message["content"] for message in server.bodies[-1][1]["messages"]] == ["first", "Hello there", "third"]
    assert f"{tmp_path / 'image'} must be an image file" in capsys.readouterr().err


@pytest.mark.full
def test_a_terminal_has_a_history_and_ctrl_c_ends_an_answer_only(server: FakeHttp, streams: Streams) -> None:
    streams.are(chat=True)
    outside, inside = os.openpty()
    ends = {"stdin": inside, "stdout": inside, "stderr": inside, "env": os.environ | {"TERM": "xterm"}}
    ends["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    process = subprocess.Popen([*QUIRE, "chat", "--url", server.url], start_new_session=True, **ends)  # type: ignore[call-overload]
    os.close(inside)
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            assert select.select([outside], [], [], 60)[0], seen
            seen += os.read(outside, 4096)
        seen = seen.partition(text)[2]

    until(b"> ")
    os.write(outside, b"first\n")
    until(b"Hello there\r\n")
    until(b"> ")
    os.write(outside, b"\x1b[A\n")  # Up, Enter
    until(b"Hello there\r\n")
    streams.stalls = True
    os.write(outside, b"third\n")
    until(b"Hel")
    process.send_signal(signal.SIGINT)
    until(b"> ")
    streams.stalls = False
    os.write(outside, b"fourth\n")
    until(b"Hello there\r\n")
    until(b"> ")
    for _ in range(60):  # a signal right before readline waits for a key is noticed with the next one
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
            break
    assert process.returncode == 130
    until(b"\r\n")
    os.close(outside)
    answer = "Hello there"
    said = [message["content"] for message in server.bodies[-1][1]["messages"]]
    assert said == ["first", answer, "first", answer, "third", "Hel", "fourth"]


def test_json_has_the_text_and_usage(server: FakeHttp, streams: Streams, capsys: pytest.CaptureFixture[str]) -> None:
    streams.are(chat=False)
    cli.main(["generate", "--url", server.url, "--prompt", "Once", "--json", "--regex", "[a-z]+"])
    printed = json.loads(capsys.readouterr().out)
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "cached_tokens": 4}
    assert printed == {"text": "Hello there", "finish_reason": "stop", "stop_reason": None, "usage": usage}
    assert server.bodies[0][0] == "/v1/completions"
    assert server.bodies[0][1]["structured_outputs"] == {"regex": "[a-z]+"}


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--url", "ftp://x"], "--url must start with http:// or https:// (got 'ftp://x')"),
        (["--url", "http://127.0.0.1:1"], "--url http://127.0.0.1:1: cannot reach the server"),
        (["two", "--url", "URL"], "two is not served at URL (models: one)"),
        (["--url", "URL", "--max-num-seqs", "3"], "--url cannot be combined with --max-num-seqs"),
        (
            ["--url", "URL", "--lora", "x"],
            "--url cannot be combined with --lora: give the adapter's name on the server",
        ),
    ],
)
def test_an_unusable_server_is_one_line(
    server: FakeHttp, flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["chat", "--prompt", "Hi", *(server.url if flag == "URL" else flag for flag in flags)])
    assert ended.value.code
    error = capsys.readouterr().err
    assert text.replace("URL", server.url) in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("status", "400 too hot"),
        ("cut", "the connection ended before the answer did"),
        ("event", "the engine failed"),
    ],
)
def test_a_failed_answer_is_one_line(
    server: FakeHttp, streams: Streams, fault: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    streams.are(chat=True, end=fault != "cut")
    if fault == "status":
        streams.status = 400
    elif fault == "event":
        streams.events = [streams.events[0], b'{"error": {"message": "the engine failed"}}']
    with pytest.raises(SystemExit):
        cli.main(["chat", "--prompt", "Hi", "--url", server.url])
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1
