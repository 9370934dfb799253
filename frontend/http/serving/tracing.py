"""OpenTelemetry: one span per request, sent to an OTLP collector. Needs the packages of the extra ``otel``."""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.frontend.http.serving.metrics import SequenceClock
from quire.protocol.request.sampling_params import SamplingParams

SPAN_NAME = "llm_request"
PARENT_HEADERS = (b"traceparent", b"tracestate")
FLUSH_S = 1.0
"""Longest time that a front end waits at its end for the collector."""


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """The data of a request whose response has ended. ``clocks``: one per sequence; none if it was refused.
    ``engines``: as of ``Answered``."""

    request_id: str
    model: str
    params: SamplingParams
    prompt_tokens: int
    output_tokens: int
    finish_reasons: Sequence[str]
    arrival: float
    end: float
    clocks: Sequence[SequenceClock]
    engines: str = ""

    def attributes(self) -> dict[str, Any]:
        """Return the attributes, with the names that vLLM and OpenTelemetry's conventions use."""
        params, sequences = self.params, [clock for clock in self.clocks if clock.first_token]
        found: dict[str, Any] = {
            "gen_ai.request.id": self.request_id,
            "gen_ai.response.model": self.model,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.num_sequences": len(self.clocks),
            "gen_ai.usage.prompt_tokens": self.prompt_tokens,
            "gen_ai.usage.completion_tokens": self.output_tokens,
            "gen_ai.response.finish_reasons": list(self.finish_reasons),
            "gen_ai.latency.e2e": self.end - self.arrival,
        }
        if self.engines:
            found["quire.engines"] = self.engines
        if params.max_tokens is not None:
            found["gen_ai.request.max_tokens"] = params.max_tokens
        if sequences:
            admitted = min(clock.admitted for clock in sequences)
            first = min(clock.first_token for clock in sequences)
            last = max(clock.last_token for clock in sequences)
            found |= {
                "gen_ai.latency.time_in_queue": admitted - self.arrival,
                "gen_ai.latency.time_to_first_token": first - self.arrival,
                "gen_ai.latency.time_in_model_prefill": first - admitted,
                "gen_ai.latency.time_in_model_decode": last - first,
                "gen_ai.latency.time_in_model_inference": last - admitted,
            }
        return found


class OtlpTracer:
    """Sends spans over HTTP from a thread. A collector that is slow or absent loses spans and delays no request."""

    def __init__(self, endpoint: str, exporter: Any = None) -> None:
        """``exporter``: replaces that for ``endpoint``, for tests."""
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "quire")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("quire")
        self._propagator = TraceContextTextMapPropagator()
        self._kind = trace.SpanKind.SERVER

    def record(self, headers: Sequence[tuple[bytes, bytes]], span: RequestSpan) -> None:
        """Send a span. ``headers``: of the request; a W3C ``traceparent`` among them is the span's parent."""
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name in PARENT_HEADERS}
        started = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(carrier),
            kind=self._kind,
            attributes=span.attributes(),
            start_time=_epoch_ns(span.arrival),
        )
        started.end(_epoch_ns(span.end))

    def close(self) -> None:
        """Send what is unsent, if the collector accepts it within ``FLUSH_S``."""
        flush = threading.Thread(target=self._provider.shutdown, daemon=True)
        flush.start()
        flush.join(FLUSH_S)


def _epoch_ns(monotonic: float) -> int:
    return time.time_ns() - int((time.monotonic() - monotonic) * 1e9)
