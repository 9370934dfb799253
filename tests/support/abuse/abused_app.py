"""The application of a server in this process, for attacks that a parser, tokenizer or grammar guard must refuse.

Its engine makes up tokens. The tokenizer, the chat template with its helper, and the guard that tries each grammar
before it is compiled are those of the demo model.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import httpx
from abuse import SLOWEST_S, Door
from fake_engine import FakeEngine, FakeSequence
from grammar_cases import DEMO, VOCAB_SIZE, demo_config
from pooled_vectors import BOTH

from quire.frontend.http.app import make_app
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.text.pooling.capabilities import Capabilities
from quire.frontend.text.text_in import TextIn
from quire.protocol.errors import InvalidRequest
from quire.protocol.request.grammar_checks import GrammarRefused
from quire.protocol.wire.front_end_messages import AddRequest
from quire.scheduler_proc.structured.guard import COMPILE_SECONDS, Guard

CONTEXT = 2048


class GuardedEngine(FakeEngine):
    """Refuses a grammar as the scheduler does, by asking the guard; it applies no masks."""

    guard: Guard

    async def add(self, request: AddRequest, *more: Any, **named: Any) -> FakeSequence:
        if (wanted := request.sampling.structured_outputs) is not None:
            try:
                self.guard.check(wanted, COMPILE_SECONDS)
            except GrammarRefused as refused:
                raise InvalidRequest(str(refused), "structured_outputs", "invalid_structured_outputs") from None
        return await super().add(request, *more, **named)


class AbusedApp(Door):
    """Routes, parser, gate and text side of ``quire serve``, called without sockets.

    Attributes:
        engine: keeps every sequence that was submitted since the last check.
    """

    def __init__(self, **settings: Any) -> None:
        """``settings``: further ones of ServerSettings."""
        self._text_in = TextIn.load(DEMO)
        self.engine = GuardedEngine(self._text_in.tokenizer, max_model_len=CONTEXT, vocab_size=VOCAB_SIZE)
        self.engine.guard = Guard(demo_config())
        can = Capabilities(pooling=BOTH)
        served = ServerSettings(text_in=self._text_in, served_model_names=("quire-demo",), capabilities=can, **settings)
        app = make_app(self.engine, served)
        self._loop = asyncio.Runner()
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=30)

    def request(self, method: str, path: str, **given: Any) -> httpx.Response:
        return self._loop.run(self._client.request(method, path, **given))

    @contextlib.contextmanager
    def in_time(self) -> Iterator[None]:
        """Measure processor time; the time of helpers has limits of its own."""
        began = time.process_time()
        yield
        assert time.process_time() - began < SLOWEST_S

    def check(self) -> None:
        """Check that each sequence has finished, was stopped or was aborted."""
        for sequence in self.engine.added:
            ended = sequence.delivered == min(len(sequence.tokens), sequence.params.max_tokens or 0)
            assert ended or sequence.aborted or sequence.stopped_at is not None
        self.engine.added.clear()

    def close(self) -> None:
        self._loop.run(self._client.aclose())
        self._loop.close()
        self.engine.guard.close()
        self._text_in.close()
