"""``quire bench serve``: dataset, truncation of prompts, load loops, report. The server is a mock transport."""

import argparse
import asyncio
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.bench.dataset import random_prompts, read_prompts
from quire.bench.measure.http_client import RequestSettings, ServerClient, Timing, parse_metrics
from quire.bench.serve import arrivals, closed_loop, fit_prompts, make_report, open_loop, run
from quire.protocol.errors import ConfigError

SETTINGS = RequestSettings("m", max_tokens=4, temperature=0.0, seed=7, chat=False, ignore_eos=False)
LINES = [{"input": "first", "output": "x"}, {"prompt": "second"}, {"input": ""}, {"input": "third"}]


def write(path: Path, text: str) -> Path:
    opener: Callable[..., Any] = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    with opener(path, "wt", encoding="utf-8") as file:
        file.write(text)
    return path


class TestDataset:
    @pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.xz", "d.jsonl.gz"])
    def test_plain_and_compressed(self, tmp_path: Path, name: str) -> None:
        path = write(tmp_path / name, "\n".join(map(json.dumps, LINES)) + "\n\n")
        assert read_prompts(path) == ["first", "second", "third"]
        assert read_prompts(path, 2) == ["first", "second"]

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "no prompts in file"),
            ('{"input": "a"}\n{"input": \n', "line 2 is not JSON"),
            ('{"text": "a"}', "line 1 has no string field input or prompt"),
            ('{"input": 3}', "line 1 has no string field"),
            ("[1]", "line 1 has no string field"),
            ("[" * 100_000, "line 1 is not JSON"),
        ],
    )
    def test_refusals(self, tmp_path: Path, text: str, reason: str) -> None:
        with pytest.raises(ConfigError, match=reason):
            read_prompts(write(tmp_path / "d.jsonl", text))

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot read file: No such file"):
            read_prompts(tmp_path / "none.jsonl")
        (tmp_path / "d.jsonl.xz").write_bytes(b"not xz")
        (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(b'{"input": "a"}\n' * 100)[:-20])
        (tmp_path / "f.jsonl").write_bytes(b'{"input": "\xff"}\n')
        for name in ("d.jsonl.xz", "e.jsonl.gz", "f.jsonl"):
            with pytest.raises(ConfigError, match="cannot read file"):
                read_prompts(tmp_path / name)


def use_client(handler: Callable[[httpx.Request], httpx.Response], use: Callable[[ServerClient], Any]) -> Any:
    async def main() -> Any:
        async with ServerClient("http://server", "key", httpx.MockTransport(handler)) as client:
            return await use(client)

    return asyncio.run(main())


def words_server(request: httpx.Request) -> httpx.Response:
    """One token per character; texts of 40 or more are refused as too long; the chat template adds 3."""
    body = json.loads(request.content)
    text = body["prompt"] if "prompt" in body else body["messages"][0]["content"] + "\n\n\n"
    if len(text) >= 40:
        return httpx.Response(400, json={"error": {"code": "context_length_exceeded", "message": "too long"}})
    return httpx.Response(200, json={"tokens": [ord(c) for c in text]})


class TestTruncation:
    @pytest.mark.parametrize("chat", [False, True])
    def test_prompts_fit(self, chat: bool) -> None:
        texts = ["short", "x" * 10, "x" * 30, "y" * 1000]
        prompts, num_cut = use_client(words_server, lambda c: fit_prompts(c, "m", texts, 10, chat=chat))
        assert num_cut == (3 if chat else 2)
        if chat:
            assert prompts[0] == "short"
            assert all(isinstance(p, str) and 1 <= len(p) + 3 <= 10 for p in prompts)
        else:
            assert prompts == [[ord(c) for c in text[:10]] for text in texts]

    def test_random_prompts_have_exactly_the_length(self) -> None:
        texts = random_prompts(3, 10, seed=1)
        assert texts == random_prompts(3, 10, seed=1) != random_prompts(3, 10, seed=2)
        prompts, _ = use_client(words_server, lambda c: fit_prompts(c, "m", texts, 10, chat=False))
        assert [len(prompt) for prompt in prompts] == [10] * 3 and len(set(texts)) == 3

    def test_no_room(self) -> None:
        with pytest.raises(ConfigError, match="no room"):
            use_client(words_server, lambda c: fit_prompts(c, "m", ["a"], 0, chat=False))
        with pytest.raises(ConfigError, match="no room for a message"):
            use_client(words_server, lambda c: fit_prompts(c, "m", ["abc"], 2, chat=True))

    def test_server_without_a_tokenizer(self) -> None:
        refusal = httpx.Response(400, json={"error": {"code": "x", "message": "no tokenizer"}})
        with pytest.raises(ConfigError, match="no tokenizer"):
            use_client(lambda request: refusal, lambda c: fit_prompts(c, "m", ["a"], 5, chat=False))


class TestModel:
    def find(self, wanted: str | None, cards: list[dict[str, Any]]) -> Any:
        answer = httpx.Response(200, json={"data": cards})
        return use_client(lambda request: answer, lambda c: c.find_model(wanted))

    def test_first_or_requested_model(self) -> None:
        cards = [{"id": "a", "max_model_len": 10}, {"id": "b", "max_model_len": 20}]
        assert self.find(None, cards) == ("a", 10)
        assert self.find("b", cards) == ("b", 20)
        with pytest.raises(ConfigError, match="models: a, b"):
            self.find("c", cards)
        with pytest.raises(ConfigError, match="no max_model_len"):
            self.find(None, [{"id": "a"}])

    def test_unreachable_server(self) -> None:
        def refuse(request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("refused")

        with pytest.raises(ConfigError, match="cannot reach the server"):
            use_client(refuse, lambda c: c.find_model(None))
        with pytest.raises(ConfigError, match="http://"):
            ServerClient("server:80", None)


def events(*data: Any, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(d)}\n\n" for d in data] + (["data: [DONE]\n\n"] if done else [])
    return "".join(lines).encode()


def piece(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}], "usage": None}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}},
}


class TestStream:
    def ask(self, content: bytes, status: int = 200) -> tuple[Timing, dict[str, Any]]:
        asked: list[httpx.Request] = []

        def handler(request: httpx.Request) -> httpx.Response:
            asked.append(request)
            return httpx.Response(status, content=content)

        ticks = iter(range(100))
        timing = use_client(handler, lambda c: c.stream(SETTINGS, [1, 2], lambda: float(next(ticks))))
        assert asked[0].headers["authorization"] == "Bearer key"
        return timing, json.loads(asked[0].content)

    def test_complete_response(self) -> None:
        timing, body = self.ask(events(piece("a"), piece("bc"), piece("", "length"), USAGE))
        assert body["prompt"] == [1, 2] and body["seed"] == 7 and body["stream_options"] == {"include_usage": True}
        assert "ignore_eos" not in body
        assert (timing.error, timing.finish_reason) == (None, "length")
        assert (timing.prompt_tokens, timing.cached_tokens, timing.output_tokens) == (9, 8, 4)
        assert (timing.ttft, timing.gaps, timing.per_token) == (1.0, [1.0], 1 / 3)

    def test_chat_chunks_without_text_are_not_pieces(self) -> None:
        role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        text = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}
        timing, _ = self.ask(events(role, text, USAGE))
        assert timing.error is None and len(timing.pieces) == 1

    @pytest.mark.parametrize(
        ("content", "status", "error"),
        [
            (events(piece("a"), done=False), 200, ("cut off", "stream ended without [DONE]")),
            (events(piece("a")), 200, ("finish_reason missing", "")),
            (events(piece("a", "abort")), 200, ("finish_reason abort", "")),
            (events({"error": {"code": "c", "message": "m"}}), 200, ("event c", "m")),
            (b'{"error": {"code": "c", "message": "m"}}', 400, ("http 400 c", "m")),
            (b"<html>", 502, ("http 502", "<html>")),
        ],
    )
    def test_errors(self, content: bytes, status: int, error: tuple[str, str]) -> None:
        assert self.ask(content, status)[0].error == error

    @pytest.mark.parametrize(
        ("raised", "kind"), [(httpx.ReadTimeout("slow"), "timeout"), (httpx.ReadError("gone"), "connection")]
    )
    def test_broken_connections(self, raised: Exception, kind: str) -> None:
        def handler(request: httpx.Request) -> httpx.Response:
            raise raised

        timing = use_client(handler, lambda c: c.stream(SETTINGS, "a", lambda: 0.0))
        assert timing.error is not None and timing.error[0] == kind


class TestLoops:
    def test_closed_loop_keeps_order_and_limits_concurrency(self) -> None:
        running: list[int] = []
        most = 0

        async def send(prompt: Any) -> Timing:
            nonlocal most
            running.append(1)
            most = max(most, len(running))
            await asyncio.sleep(0)
            running.pop()
            return Timing(float(prompt[0]))

        done: list[None] = []
        prompts: list[Any] = [[i] for i in range(10)]
        timings = asyncio.run(closed_loop(prompts, 3, send, lambda: done.append(None)))
        assert [t.sent for t in timings] == list(range(10))
        assert most == 3 and len(done) == 10

    def test_open_loop_does_not_wait_for_responses(self) -> None:
        slept: list[float] = []
        sent: list[Any] = []

        async def main() -> list[Timing]:
            gate = asyncio.Event()

            async def send(prompt: Any) -> Timing:
                sent.append(prompt)
                if len(sent) == 3:
                    gate.set()
                await gate.wait()
                return Timing(0.0)

            async def sleep(seconds: float) -> None:
                slept.append(seconds)
                await asyncio.sleep(0)

            return await open_loop([[1], [2], [3]], iter([0.0, 100.0, 200.0]), send, lambda: None, sleep)

        assert len(asyncio.run(main())) == 3
        assert slept[0] == 0.0 and 90 < slept[1] <= 100 and 190 < slept[2] <= 200

    def test_arrivals_repeat_and_meet_the_rate(self) -> None:
        first, again = arrivals(4.0, seed=1), arrivals(4.0, seed=1)
        times = [next(first) for _ in range(4000)]
        assert times == [next(again) for _ in range(4000)]
        assert times == sorted(times)
        assert 4000 / times[-1] == pytest.approx(4.0, rel=0.1)


def test_report_counts_complete_responses_and_errors_by_kind() -> None:
    whole = Timing(0.0, [0.1, 0.2, 0.4], 0.5, "length", prompt_tokens=100, cached_tokens=25, output_tokens=5)
    failed = [Timing(0.0, error=("timeout", f"message {i}")) for i in range(2)]
    report = make_report({}, [whole, *failed], wall=2.0)
    found = report.results
    assert (found["completed"], found["errors"]) == (1, {"timeout": 2})
    assert found["ttft_ms"]["p50"] == 100.0
    assert found["inter_token_ms"]["max"] == 200.0
    assert found["per_token_ms"]["mean"] == 75.0
    assert found["e2e_ms"]["p99"] == 500.0
    assert (found["requests_per_s"], found["output_tokens_per_s"], found["cached_tokens_share"]) == (0.5, 2.5, 0.25)
    assert "error: 2 x timeout: message 0" in report.notes


def test_parse_metrics() -> None:
    text = (
        '# HELP x\nquire:num_free_blocks{model_name="a b"} 3.0\nquire:n_total{r="x"} 1\nquire:n_total{r="y"} 2e1\no 5\n'
    )
    assert parse_metrics(text) == {"num_free_blocks": 3.0, "n_total": 21.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [("concurrency", 0), ("max_tokens", 0), ("num_prompts", 0), ("images", 0), ("rate", 0.0), ("rate", -1.0)],
)
def test_flags_out_of_range(name: str, value: float) -> None:
    fine = {"num_prompts": None, "input_len": None, "concurrency": 1, "max_tokens": 1, "rate": None}
    fine |= {"images": None, "rounds": 1}
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be"):
        run(argparse.Namespace(**(fine | {name: value})))
