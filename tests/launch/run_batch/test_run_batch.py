"""``quire run-batch``: damaged lines, order, retries, a running server and an own engine."""

import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from fake_http import Answer, FakeHttp, fake_http
from fake_images import PICTURE, TEMPLATE, FakeReader, with_image_tokens
from front_end import FrontEnd
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.text_in import TextIn
from quire.launch import cli
from quire.launch.run_batch import lines, sender
from quire.launch.run_batch.lines import InvalidLine, RequestLine, ResultLine, read_lines, result
from quire.launch.run_batch.runner import WINDOW, run_lines
from quire.protocol.errors import EngineError

CHAT = "/v1/chat/completions"
GOOD = {"custom_id": "good", "method": "POST", "url": CHAT, "body": {"messages": [{"role": "user", "content": "hi"}]}}

FINE = b'{"usage": {"completion_tokens": 3}}'


def line(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


def read(data: bytes) -> list[RequestLine | InvalidLine]:
    return list(read_lines(io.BytesIO(data)))


class TestLines:
    def test_body_is_unchanged(self) -> None:
        text = (
            b'{"custom_id":"x","method":"POST","url":"/v1/completions","body":{"seed": 123456789012345678901, "a":1.0}}'
        )
        (request,) = read(b"\xef\xbb\xbf" + text + b"\r\n\n  \n")
        assert isinstance(request, RequestLine)
        assert bytes(request.body) == b'{"seed": 123456789012345678901, "a":1.0}'

    @pytest.mark.parametrize(
        ("data", "custom_id", "said"),
        [
            (b"nothing", None, "line 1 must be a JSON object"),
            (b"[]", None, "line 1 must be a JSON object"),
            (b"[" * 5000, None, "line 1 must be a JSON object"),
            (b'{"custom_id": "\xff"}', None, "line 1 must be a JSON object"),
            (line(custom_id=5), None, "custom_id"),
            (line(method="GET"), "good", "method must be POST (got 'GET')"),
            (line(url="/v1/audio/speech"), "good", "(got '/v1/audio/speech')"),
            (line(url="http://elsewhere/v1/completions"), "good", "url must be one of"),
            (line(body=[1]), "good", "Expected `object`"),
            (line(body=None), "good", "Expected `object`"),
            (line(body={"stream": True}), "good", "body.stream must be false"),
            (b'{"custom_id": "good"}', "good", "missing required field `method`"),
            (b'{"custom_id": "nan", "body": {"top_p": NaN}}', "nan", "line 1 must be a JSON object: "),
            (b'{"custom_id": "half", "body": {"prompt": "\\ud800"}}', "half", "line 1 must be a JSON object: "),
            (b'{"custom_id": "\\ud800"}', None, "line 1 must be a JSON object: "),
            (line(custom_id="first") + b"\n" + line(custom_id="first"), "first", "(got 'first', as in line 1)"),
        ],
    )
    def test_invalid(self, data: bytes, custom_id: str | None, said: str) -> None:
        invalid, good = read(data + b"\n" + line())[-2:]
        assert isinstance(invalid, InvalidLine) and isinstance(good, RequestLine)
        assert invalid.custom_id == custom_id
        assert said in invalid.message

    def test_long_line_is_not_read_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1000)
        first, good, last = read(b"x" * 5000 + b"\n" + line() + b"\n" + b"y" * 1001)
        assert isinstance(first, InvalidLine) and isinstance(last, InvalidLine) and isinstance(good, RequestLine)

    @given(
        st.lists(
            st.one_of(st.just(line()), st.binary(max_size=60), st.builds(lambda d: line()[: d * 3], st.integers(0, 40)))
        )
    )
    def test_damage_of_a_line_ends_that_line_only(self, given: list[bytes]) -> None:
        whole = [each.replace(b"\n", b"") for each in given]
        found = read(b"\n".join(whole))
        first = whole.index(line()) if line() in whole else None
        texts = [(i, each.removeprefix(b"\xef\xbb\xbf") if i == 0 else each) for i, each in enumerate(whole)]
        filled = [(i, text) for i, text in texts if text.strip()]
        assert len(found) == len(filled)
        for each, (i, text) in zip(found, filled, strict=True):
            assert isinstance(each, RequestLine) == (text.strip() == line() and i == first)

    @given(st.integers(0, 200), st.binary(min_size=1, max_size=3))
    def test_changed_byte(self, at: int, byte: bytes) -> None:
        text = line()
        damaged = text[: at % len(text)] + byte.replace(b"\n", b" ") + text[at % len(text) + 1 :]
        found = read(damaged + b"\n" + line(custom_id="another one"))
        assert isinstance(found[-1], RequestLine) and len(found) == 2


def requests(count: int) -> list[RequestLine | InvalidLine]:
    return read(b"\n".join(line(custom_id=str(i)) for i in range(count)))


class TestOrder:
    @pytest.mark.parametrize("concurrency", [1, 3, 50])
    def test_results_are_in_the_order_of_the_lines(self, concurrency: int) -> None:
        """The first request is answered last of those that may run beside it; none is sent far ahead of it."""
        sent: list[int] = []
        last = threading.Event()

        def send(request: RequestLine) -> ResultLine:
            number = int(request.custom_id)
            sent.append(number)
            if number == min(concurrency - 1, 20):
                last.set()
            if number == 0:
                assert last.wait(10)
            return result(request.custom_id, None, None)

        written: list[bytes] = []
        summary = run_lines(requests(40), send, written.append, concurrency)
        assert [json.loads(each)["custom_id"] for each in written] == [str(i) for i in range(40)]
        assert (summary.lines, summary.failed) == (40, 0)

    def test_few_results_are_in_memory(self) -> None:
        taken = 0
        written: list[bytes] = []

        def given() -> Iterator[RequestLine | InvalidLine]:
            nonlocal taken
            for each in requests(200):
                taken += 1
                assert taken - len(written) <= WINDOW * 2 + 1
                yield each

        run_lines(given(), lambda request: result(request.custom_id, None, None), written.append, 2)
        assert len(written) == 200

    def test_results_before_a_failure_are_written(self) -> None:
        def send(request: RequestLine) -> ResultLine:
            if request.custom_id == "5":
                raise EngineError("gone")
            return result(request.custom_id, None, None)

        written: list[bytes] = []
        with pytest.raises(EngineError):
            run_lines(requests(20), send, written.append, 1)
        assert len(written) == 5


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Return a function that runs the command on lines, and returns the results."""
    monkeypatch.setattr(sender, "PAUSE_S", 0.0)

    def run(*given: bytes, flags: list[str]) -> list[Any]:
        (tmp_path / "in.jsonl").write_bytes(b"\n".join(given))
        try:
            cli.main(["run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), *flags])
            status: object = 0
        except SystemExit as ended:
            status = ended.code
            if not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_bytes():
                raise
        results = [json.loads(each) for each in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert status == int(any(each["error"] for each in results))
        return results

    return run


@pytest.fixture
def behaviours() -> list[Answer]:
    """What the next requests get; then they are answered."""
    return []


@pytest.fixture
def faulty(behaviours: list[Answer]) -> Iterator[FakeHttp]:
    with fake_http(lambda body: behaviours.pop(0) if behaviours else (200, FINE)) as made:
        yield made


class TestServer:
    @pytest.mark.parametrize("behaviour", [None, (503, b"{}"), (429, b"{}")])
    def test_transient_failure_is_retried(
        self, run: Any, faulty: FakeHttp, behaviours: list[Answer], behaviour: Answer
    ) -> None:
        behaviours += [behaviour] * 3
        (answer,) = run(line(), flags=["--url", faulty.url])
        assert (answer["response"]["status_code"], answer["error"]) == (200, None)

    def test_other_answers(
        self, run: Any, faulty: FakeHttp, behaviours: list[Answer], capsys: pytest.CaptureFixture[str]
    ) -> None:
        behaviours += [(404, b'{"error": {"code": "model_not_found", "message": "no"}}'), (200, b"<html>")]
        flags = ["--url", f"{faulty.url}/v1", "--concurrency", "1"]
        refused, broken, good = run(*(line(custom_id=name) for name in "abc"), flags=flags)
        assert refused["error"] == {"code": "model_not_found", "message": "no"}
        assert (refused["response"]["status_code"], broken["response"]) == (404, None)
        assert broken["error"]["code"] == "invalid_response"
        assert good["error"] is None
        assert "1 of 3 lines answered, 2 failed; 3 output tokens" in capsys.readouterr().err

    def test_unreachable_server(
        self, run: Any, faulty: FakeHttp, behaviours: list[Answer], capsys: pytest.CaptureFixture[str]
    ) -> None:
        behaviours += [None] * sender.ATTEMPTS
        with pytest.raises(SystemExit) as ended:
            run(line(), flags=["--url", faulty.url])
        assert ended.value.code == 1
        assert "the server cannot be reached" in capsys.readouterr().err

    def test_all_routes_of_a_server_with_keys(self, run: Any, tokenizer: Any, text_in: Any) -> None:
        engine: Any = FakeEngine(tokenizer, reply="one two", max_model_len=4000)
        front_end = FrontEnd(engine, keys=("secret",), settings={"text_in": text_in})
        given = [
            line(custom_id="chat"),
            b"\xff\x00",
            line(custom_id="text", url="/v1/completions", body={"prompt": "x"}),
            line(custom_id="items", url="/v1/responses", body={"input": "x"}),
            line(custom_id="wrong", body={"messages": []}),
        ]
        flags = ["--url", f"http://127.0.0.1:{front_end.port}", "--api-key", "secret"]
        answers = run(*given, flags=flags)
        assert [answer["custom_id"] for answer in answers] == ["chat", None, "text", "items", "wrong"]
        assert [answer["response"] and answer["response"]["status_code"] for answer in answers] == [
            200,
            None,
            200,
            200,
            400,
        ]
        assert answers[0]["response"]["body"]["choices"][0]["message"]["content"] == "one two"
        assert answers[0]["response"]["request_id"].startswith("chatcmpl-")
        assert "messages" in answers[4]["error"]["message"]
        front_end.close()

    def test_images(self, run: Any, tokenizer: Any) -> None:
        words = with_image_tokens(tokenizer)
        text_in = TextIn(words, ChatTemplate(TEMPLATE, {}, "test"))
        text_in.read_images(words.token_to_id("<row>"))
        engine: Any = FakeEngine(words, reply="one two", max_model_len=4000)
        front_end = FrontEnd(engine, settings={"text_in": text_in, "images": FakeReader()})
        images = [{"type": "image_url", "image_url": {"url": url}} for url in (f"{PICTURE}a", "https://x/y")]
        given = [
            line(custom_id=str(i), body={"messages": [{"role": "user", "content": [image]}]})
            for i, image in enumerate(images)
        ]
        read, refused = run(*given, flags=["--url", f"http://127.0.0.1:{front_end.port}"])
        assert read["response"]["body"]["usage"]["prompt_tokens_details"]["image_tokens"] == 3
        assert "image_url.url must be a data URL" in refused["error"]["message"]
        front_end.close()

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            (["--url", "ftp://x"], "must start with http"),
            (["--url", "http://x", "--max-num-seqs", "3"], "--url cannot be combined with --max-num-seqs"),
            (["--url", "http://x", "model"], "--url cannot be combined with MODEL"),
            (["--concurrency", "0"], "--concurrency must be between 1 and 4096 (got 0)"),
            (["-i", "/nowhere/x"], "--input-file /nowhere/x cannot be used"),
            (["-o", "/nowhere/x"], "--output-file /nowhere/x cannot be used"),
        ],
    )
    def test_flags(self, run: Any, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            run(line(), flags=flags)
        assert said in capsys.readouterr().err

    def test_output_is_not_the_input(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "both.jsonl"
        file.write_bytes(line())
        with pytest.raises(SystemExit):
            cli.main(["run-batch", "-i", str(file), "-o", str(file), "--url", "http://127.0.0.1:1"])
        assert file.read_bytes() == line()
        assert "must not be the input file" in capsys.readouterr().err


@pytest.mark.full
def test_own_engine(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"messages": GOOD["body"]["messages"], "max_tokens": 3, "temperature": 0}  # type: ignore[index]
    given = [line(custom_id=str(i), body=body) for i in range(20)]
    answers = run(*given, b"nothing", flags=["--max-num-seqs", "4", "--concurrency", "8"])
    texts = {answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers[:-1]}
    assert len(texts) == 1
    assert answers[-1]["error"]["code"] == "invalid_line"
    assert "20 of 21 lines answered, 1 failed; 60 output tokens" in capsys.readouterr().err
