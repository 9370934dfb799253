"""Spans of requests."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine

from quire.frontend.http.app import make_app
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.text.text_in import TextIn
from quire.launch.config.observability import check_tracing
from quire.protocol.errors import ConfigError

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from quire.frontend.http.serving.tracing import OtlpTracer

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class Traced:
    """A client of an application whose spans are kept."""

    def __init__(self, make_client: Any, engine: FakeEngine, text_in: TextIn) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer = OtlpTracer("http://localhost:4318/v1/traces", self._exporter)
        settings = ServerSettings(text_in=text_in, served_model_names=("tiny",), tracer=self.tracer)
        self.client = make_client(make_app(engine, settings))

    def spans(self) -> tuple[ReadableSpan, ...]:
        self.tracer.close()
        return tuple(self._exporter.get_finished_spans())


@pytest.fixture
def traced(client: Any, engine: FakeEngine, text_in: TextIn) -> Iterator[Traced]:
    traced = Traced(type(client), engine, text_in)
    yield traced
    traced.tracer.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_one_span_below_the_clients(traced: Traced, stream: bool) -> None:
    response: httpx.Response = traced.client.request(
        "POST",
        "/v1/completions",
        json={"model": "tiny", "prompt": "hello", "max_tokens": 2, "n": 2, "stream": stream},
        headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
    )
    (span,) = traced.spans()
    assert span.name == "llm_request" and span.kind.name == "SERVER"
    assert f"{span.context.trace_id:032x}" == TRACE and span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    found = dict(span.attributes or {})
    assert found["gen_ai.request.id"] == response.headers["x-request-id"]
    assert found["gen_ai.request.max_tokens"] == 2 and found["gen_ai.request.n"] == 2
    assert found["gen_ai.usage.completion_tokens"] == 4 and found["gen_ai.usage.num_sequences"] == 2
    assert found["gen_ai.response.finish_reasons"] == ("length",) and found["gen_ai.response.model"] == "tiny"
    parts = [found[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_in_model_inference", "e2e")]
    assert all(isinstance(part, float) and part >= 0 for part in parts)
    assert span.end_time and span.start_time and span.end_time >= span.start_time > 1.7e18


def test_an_invalid_parent_begins_a_trace(traced: Traced) -> None:
    headers = {"traceparent": "00-nonsense", "tracestate": "x" * 1000}
    traced.client.request("POST", "/v1/completions", json={"prompt": "hello", "max_tokens": 2}, headers=headers)
    (span,) = traced.spans()
    assert span.parent is None


def test_an_invalid_request_has_no_span(traced: Traced) -> None:
    traced.client.post("/v1/completions", json={"prompt": "hello", "max_tokens": -2})
    assert traced.spans() == ()


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://", "/v1/traces"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"(got {endpoint!r})")):
        check_tracing(endpoint)
    check_tracing("http://localhost:4318/v1/traces")
    check_tracing("")
