"""The HTTP front end on real sockets in this process, over an engine with an endless supply of tokens."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from pooled_vectors import pooled_update
from pulled_sequence import PulledSequence

from quire.frontend.engine.scheduler_link import Readers
from quire.frontend.engine.update import Update
from quire.frontend.http.app import make_app
from quire.frontend.http.serving.connections import ConnectionLimits
from quire.frontend.http.serving.http_server import HttpServer
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.http.serving.socket_protocol import BoundedHttpProtocol
from quire.frontend.text.text_in import TextIn
from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.routing import EnginePlace
from quire.protocol.wire.front_end_messages import AddRequest, EndReason, Statistics
from quire.protocol.wire.logprobs import LogprobArrays, TokenLogprobs

CANARY = {"prompt": [5, 6, 7], "max_tokens": 5}
WAIT_S = 10.0


@dataclass
class EndlessSequence(PulledSequence):
    """One token per pause of its engine, up to ``max_tokens``; each depends on the prompt's sum and its position."""

    request_id: str
    engine: "EndlessEngine"
    prompt: list[int]
    params: SamplingParams
    pooling: PoolingParams | None = None
    delivered: int = 0
    aborted: bool = False

    async def updates(self) -> AsyncIterator[Update]:
        assert self.params.max_tokens is not None
        if self.pooling is not None:
            await self.engine.pause()
            if not self.aborted:
                self.engine.live.discard(self)
                yield pooled_update(self.prompt, self.pooling)
            return
        while True:
            await self.engine.pause()
            if self.aborted:
                return
            token = (sum(self.prompt) + self.delivered) % 200
            self.delivered += 1
            last = self.delivered == self.params.max_tokens
            self.engine.live.discard(self) if last else None
            yield Update(
                [token],
                logprobs=None if self.params.logprobs is None else [self._logprobs(token, self.params.logprobs)],
                ended=EndReason.LENGTH if last else None,
                num_output_tokens=self.delivered,
                prompt_logprobs=self._prompt_logprobs() if self.delivered == 1 else None,
            )
            if last:
                return

    @staticmethod
    def _logprobs(token: int, count: int) -> TokenLogprobs:
        return TokenLogprobs(token, -1.0, 1, [(best, -1.0 - best) for best in range(count)])

    def _prompt_logprobs(self) -> LogprobArrays | None:
        if self.params.prompt_logprobs is None:
            return None
        shape = (len(self.prompt) - 1, 1 + self.params.prompt_logprobs)
        return LogprobArrays(np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.ones(shape[0], np.int32))

    def stop_at(self, num_output_tokens: int) -> None:
        self.abort()

    def abort(self) -> None:
        self.aborted = True
        self.engine.live.discard(self)

    def __hash__(self) -> int:
        return id(self)


@dataclass
class EndlessEngine:
    """An ``EngineClient``. ``pause`` is awaited before each token; ``live``: unfinished sequences."""

    pause: Callable[[], Any] = lambda: asyncio.sleep(0)
    state: str = "ready"
    pause_kind: str = ""
    seconds_without_progress: float = 0.0
    places: list[EnginePlace] = field(default_factory=list)
    max_model_len: int = 10**6
    vocab_size: int = 200
    added: list[EndlessSequence] = field(default_factory=list)
    readers: Readers = field(default_factory=Readers)
    live: set[EndlessSequence] = field(default_factory=set)
    tenants: list[int] = field(default_factory=list)
    num_queries: int = 0

    async def add(
        self, request: AddRequest, on_update: Callable[[], None], *, parent: Any = None, num_shared: int = 0
    ) -> EndlessSequence:
        self.tenants.append(request.tenant)
        prompt = request.prompt_token_ids.tolist()
        sequence = EndlessSequence(request.request_id, self, prompt, request.sampling, request.pooling)
        sequence.start(self.readers, on_update)
        self.added.append(sequence)
        self.live.add(sequence)
        return sequence

    async def statistics(self) -> Statistics:
        self.num_queries += 1
        return Statistics(1, num_running=len(self.live), num_usable_blocks=1, num_free_blocks=1)

    async def statistics_by_engine(self) -> dict[int, Statistics]:
        return {0: await self.statistics()}

    async def control(self, kind: str) -> Statistics:
        return await self.statistics()


class FrontEnd:
    """The application and its server in a thread, with limits that the test sets, and a canary request."""

    def __init__(self, engine: EndlessEngine | None = None, *, keys: tuple[str, ...] = (), **limits: Any) -> None:
        settings, tls = limits.pop("settings", {}), limits.pop("tls", None)
        listener = limits.pop("listener", None)
        self.engine = engine or EndlessEngine()
        self.limits = ConnectionLimits(check_s=0.01, **limits)
        settings = {"text_in": TextIn(), **settings}
        serve = ServerSettings(served_model_names=("endless",), api_keys=keys, **settings)
        protocol = type("Limited", (BoundedHttpProtocol,), {"limits": self.limits})
        self.uvicorn = HttpServer(make_app(self.engine, serve), tls, protocol)
        self._listener = listener or socket.create_server(("127.0.0.1", 0))
        name = self._listener.getsockname()
        uds, self.port = (name, 80) if isinstance(name, str) else (None, name[1])
        self._thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [self._listener]}, daemon=True)
        self._thread.start()
        headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
        # A test's limits may close an idle connection at any time.
        alone = httpx.HTTPTransport(verify=tls is None, limits=httpx.Limits(max_keepalive_connections=0), uds=uds)
        url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=url, timeout=WAIT_S, headers=headers, transport=alone)
        self._right = self._ask()

    def _ask(self) -> str:
        response = self.client.post("/v1/completions", json={**CANARY, "stream": True})
        assert response.status_code == 200, response.text
        return "".join(line.split('"text":')[1].split(",")[0] for line in response.iter_lines() if '"text":' in line)

    def check(self) -> None:
        """Check that a request is answered as at the start, and that no other request is running."""
        assert self._ask() == self._right
        self.until(lambda: not self.engine.live)

    def connect(self, data: bytes = b"", receive_buffer: int = 0, source: str = "") -> socket.socket:
        made = socket.socket()
        made.settimeout(WAIT_S)
        if receive_buffer:  # before it connects, because the window is negotiated then
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        if source:
            made.bind((source, 0))
        made.connect(("127.0.0.1", self.port))
        made.sendall(data)
        return made

    @property
    def num_connections(self) -> int:
        return len(self.uvicorn.server_state.connections)

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not true():
            assert time.monotonic() < deadline, (len(self.engine.live), self.num_connections)
            time.sleep(0.002)

    def ask(self, data: bytes) -> bytes:
        """Return the bytes that the server sends in answer to these bytes until the connection ends."""
        with self.connect(data) as connection:
            return read_all(connection)

    def close(self) -> None:
        self.client.close()
        self.uvicorn.should_exit = True
        self._thread.join(WAIT_S)
        self._listener.close()
        assert not self._thread.is_alive()


def post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    """Return the bytes of a POST; ``length``: the Content-Length to send, true or false."""
    lines = [f"POST {path} HTTP/1.1", "host: x", *headers]
    if not any("transfer-encoding" in line.lower() for line in headers):
        lines.append(f"content-length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def read_all(connection: socket.socket) -> bytes:
    """Return the bytes that arrive until the other end closes or resets; fail if it does neither."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def status_of(answer: bytes) -> int:
    """Return the status, or 0 for no answer."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
