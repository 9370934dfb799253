"""Live runs: the requests sent, their order, and the record of successful and failed answers."""

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest

from quire.protocol.errors import ConfigError
from quire.replay.live import LiveTarget, run_live
from quire.replay.live_prompts import PromptMaker, generate_tokens
from quire.replay.report.summary import summary
from quire.replay.run.run_record import RunRecord
from quire.replay.workload.workload import Call, ContentIds, Workload


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C interrupts, also in a background job, which shells start with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def call(number: int, prompt: int = 20, output: int = 4, ids: tuple[int, ...] = (), **more: Any) -> Call:
    return Call(number, f"r{number}", 0.0, prompt, output, ContentIds(ids, 8, 1) if ids else None, **more)


def workload(*calls: Call) -> Workload:
    return Workload("mooncake", "a trace", list(calls), notes=["one line was skipped"])


@dataclass
class Stub:
    """A server that returns answers of the requested length and rejects the configured fields, ids and requests.

    Attributes:
        asked: bodies of the answered requests, without the probe.
    """

    context: int | None = 64
    unknown_fields: tuple[str, ...] = ()
    vocab_size: int = 400
    token_ids: bool = True
    fail: dict[int, int] = field(default_factory=dict)
    on_request: Callable[[int], None] = lambda number: None
    asked: list[dict[str, Any]] = field(default_factory=list)
    seen: bool = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            card = {"id": "m"} | ({"max_model_len": self.context} if self.context is not None else {})
            return httpx.Response(200, json={"data": [card]})
        if request.url.path == "/metrics":
            return httpx.Response(200, text=f"quire:num_preemptions_total {len(self.asked)}\n")
        body = json.loads(request.content)
        prompt = body["prompt"]
        ids = isinstance(prompt, list)
        if any(name in body for name in self.unknown_fields) or (ids and not self.token_ids):
            return httpx.Response(400, json={"error": {"code": "unknown", "message": "unknown field"}})
        if ids and max(prompt) >= self.vocab_size:
            return httpx.Response(400, json={"error": {"message": "beyond the vocabulary"}})
        if not self.seen:
            self.seen = True
            return self.answer(1, body)
        self.asked.append(body)
        number = len(self.asked) - 1
        self.on_request(number)
        if number in self.fail:
            return httpx.Response(self.fail[number], json={"error": {"code": "busy", "message": "try later"}})
        return self.answer(len(prompt) if ids else 7, body)

    def answer(self, num_prompt_tokens: int, body: dict[str, Any]) -> httpx.Response:
        count = body["max_tokens"]
        chunks: list[Any] = [{"choices": [{"text": "a"}]} for _ in range(count - 1)]
        chunks.append({"choices": [{"text": "", "finish_reason": "length"}]})
        usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": count}
        chunks.append({"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 8}}})
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        return httpx.Response(200, text=text + "data: [DONE]\n\n")

    def run(self, load: Workload, target: LiveTarget | None = None, **options: Any) -> RunRecord:
        return run_live(load, target or LiveTarget("http://test"), transport=httpx.MockTransport(self), **options)


class TestRequests:
    def test_equal_ids_give_equal_prefixes_and_lengths_are_forced(self) -> None:
        stub = Stub()
        stub.run(workload(call(0, ids=(5, 6)), call(1, ids=(5, 7), output=2)), concurrency=1)
        first, second = (body["prompt"] for body in stub.asked)
        assert first[:8] == second[:8] and first[8:16] != second[8:16] and first[16:] != second[16:]
        assert [len(first), len(second)] == [20, 20]
        assert all(3 <= token < 256 for token in first)  # the server rejected 1,024
        assert [body["max_tokens"] for body in stub.asked] == [body["min_tokens"] for body in stub.asked] == [4, 2]
        assert all(body["ignore_eos"] and body["stream"] and body["model"] == "m" for body in stub.asked)

    def test_supports_server_with_openai_fields_only(self) -> None:
        stub = Stub(context=None, unknown_fields=("min_tokens", "ignore_eos"), token_ids=False)
        record = stub.run(workload(call(0, ids=(5, 6))), concurrency=1)
        assert stub.asked[0]["prompt"].count(" ") == 19 and "ignore_eos" not in stub.asked[0]
        assert any("no token ids" in note for note in record.notes)
        assert any("does not support forced output lengths" in note for note in record.notes)

    def test_sends_priorities_if_supported(self) -> None:
        calls = workload(call(0, priority=3), call(1))
        knows, knows_not = Stub(), Stub(unknown_fields=("priority",))
        knows.run(calls)
        assert [body["priority"] for body in knows.asked] == [3, 0]
        knows_not.run(calls)
        assert "priority" not in knows_not.asked[0] and knows_not.asked[0]["ignore_eos"]

    def test_sends_text_and_tokens_of_the_trace(self) -> None:
        stub = Stub()
        calls = workload(call(0, prompt=3, tokens=[1, 2, 1000]), call(1, text="Hello"))
        record = stub.run(calls, LiveTarget("http://test", vocab_size=300), concurrency=1)
        assert [body["prompt"] for body in stub.asked] == [[1, 2, 100], "Hello"]
        assert "1 prompts have token ids beyond the server's vocabulary: ids were taken modulo its size" in record.notes

    def test_closed_loop_waits_for_previous_turn(self) -> None:
        stub = Stub()
        stub.run(workload(call(0, after=1, ids=(3,)), call(1, ids=(9,))), closed_loop=True)
        starts = [body["prompt"][:8] for body in stub.asked]
        assert starts == [generate_tokens(call(0, ids=(i,)), 8, 256).tolist() for i in (9, 3)]


class TestTooLong:
    def run(self, **options: Any) -> tuple[Stub, RunRecord]:
        stub = Stub(context=24)
        return stub, stub.run(workload(call(0), call(1, prompt=21, ids=(1, 2)), call(2, prompt=9)), **options)

    def test_rejects_overlong_prompt(self) -> None:
        stub, record = self.run()
        found = summary(record)
        assert (found["requests"], found["rejected"], len(stub.asked)) == (3, 1, 2)
        assert found["rejected_reasons"] == {"prompt of N tokens and its answer exceed the server's context": 1}

    def test_records_rejection_by_the_server(self) -> None:
        def handler(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v1/completions" and len(json.loads(request.content)["prompt"]) > 1:
                error = {"code": "context_length_exceeded", "message": "this has 70 tokens"}
                return httpx.Response(400, json={"error": error})
            return Stub()(request)

        record = run_live(workload(call(0)), LiveTarget("http://test"), transport=httpx.MockTransport(handler))
        assert summary(record)["rejected_reasons"] == {"this has N tokens": 1} and record.extra["errors"] == {}

    def test_clips_overlong_prompt(self) -> None:
        stub, record = self.run(overlong="clip")
        assert [len(body["prompt"]) for body in stub.asked] == [20, 20, 9]
        assert "1 over-long prompts were clipped" in record.notes

    def test_drops_overlong_prompt(self) -> None:
        stub, record = self.run(overlong="drop")
        assert len(record.requests) == len(stub.asked) == 2
        assert "1 over-long prompts were dropped" in record.notes

    def test_applies_limit_of_the_user(self) -> None:
        stub = Stub()
        stub.run(workload(call(0)), LiveTarget("http://test", max_prompt_tokens=10), overlong="clip")
        assert len(stub.asked[0]["prompt"]) == 10


class TestResults:
    def test_record_has_reports(self) -> None:
        record = Stub().run(workload(call(0), call(1, output=1)), concurrency=1)
        found = summary(record)
        assert (found["requests"], found["finish_reasons"], found["steps"]) == (2, {"length": 2}, None)
        assert found["prefix_cache"]["hit_tokens"] == 16 and found["prefix_cache"]["input_tokens"] == 40
        assert found["latency_ms"]["ttft"]["mean"] > 0 and found["latency_ms"]["queue"]["mean"] is None
        assert sum(count for _, count in record.itl) == 3
        assert found["server_preemptions"] == 2 and found["errors"] == {}
        assert "one line was skipped" in found["notes"] and found["virtual_s"] > 0

    def test_counts_errors_by_kind(self) -> None:
        record = Stub(fail={0: 503, 2: 503, 3: 429}).run(workload(*(call(i) for i in range(5))), concurrency=1)
        found = summary(record)
        assert found["errors"] == {"http 429 busy": 1, "http 503 busy": 2}
        assert found["finish_reasons"] == {"error": 3, "length": 2}
        assert "error: 2 x http 503 busy: try later" in record.notes

    def test_ctrl_c_keeps_finished_requests(self, ctrl_c: None) -> None:
        def interrupt(number: int) -> None:
            if number == 2:
                signal.raise_signal(signal.SIGINT)

        record = Stub(on_request=interrupt).run(workload(*(call(i) for i in range(5))), concurrency=1)
        assert record.extra["interrupted"] is True
        assert [run.finish for run in record.requests][:2] == ["length", "length"]
        assert len(record.requests) < 5 and any(note.startswith("interrupted: ") for note in record.notes)

    def test_progress_counts_all(self) -> None:
        counts: list[int] = []
        Stub(context=24).run(workload(call(0), call(1, prompt=99)), progress=lambda _, ended: counts.append(ended))
        assert sorted(counts) == [1, 2]


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (lambda request: httpx.Response(200, text="<html>"), "did not return JSON"),
        (lambda request: httpx.Response(200, json={"data": []}), "server lists no models"),
        (lambda request: httpx.Response(404, text="no"), "returned 404"),
        (Stub(unknown_fields=("prompt",)), "rejects every prompt: unknown field"),
        (
            lambda request: Stub()(request) if request.url.path == "/v1/models" else httpx.Response(500, text="broken"),
            "cannot complete a prompt: http 500: broken",
        ),
    ],
)
def test_rejects_unusable_servers(handler: Callable[[httpx.Request], httpx.Response], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        run_live(workload(call(0)), LiveTarget("http://test"), transport=httpx.MockTransport(handler))


def test_generated_tokens_are_uniform_and_repeatable() -> None:
    tokens = generate_tokens(call(0, ids=(1, 2, 3)), 5000, 1024)
    assert tokens.min() >= 3 and tokens.max() < 1024
    assert len(np.unique(tokens)) > 900
    assert np.array_equal(tokens, generate_tokens(call(0, ids=(1, 2, 3)), 5000, 1024))
    assert not np.array_equal(tokens[:24], generate_tokens(call(0, ids=(1, 2, 4)), 24, 1024))
    other_space = Call(0, "", 0.0, 24, 1, ContentIds((1, 2, 3), 8, 2))
    assert not np.array_equal(tokens[:8], generate_tokens(other_space, 24, 1024)[:8])


def test_clipped_text_keeps_its_share() -> None:
    maker = PromptMaker(1024, token_ids=True)
    assert maker.make(call(0, prompt=100, text="x" * 300, tokens=[1] * 100), 50) == "x" * 142
    assert maker.make(call(0, prompt=1, text="", tokens=[0]), 1) == [0]
