"""The server as a client sees it: its model, its tokenizer, streamed answers with the time of each piece, metrics."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.protocol.errors import ConfigError

try:
    import httpx
except ImportError:
    raise ConfigError("this needs httpx: pip install 'quire[bench]'") from None

FAILURES = (httpx.HTTPError, httpx.InvalidURL)
TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 10.0
GOOD_ENDINGS = ("stop", "length")

Prompt = str | list[int]
Transport = httpx.AsyncBaseTransport


@dataclass(slots=True)
class Timing:
    """What one request saw. Times are seconds on one clock.

    Attributes:
        pieces: arrival of each piece that brought text (a piece may bring several tokens).
        error: (kind, message) when the answer is not whole.
        chunks: as pieces, with those that brought no text: an unfinished character, a chat's role, perhaps the ending.
    """

    sent: float
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: tuple[str, str] | None = None
    chunks: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float | None:
        return self.pieces[0] - self.sent if self.pieces else None

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def per_token(self) -> float | None:
        """Mean seconds per token after the first: what a reader feels, however the tokens were grouped."""
        if len(self.pieces) < 2 or self.output_tokens < 2:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """What all requests of a run have in common. ``further``: fields that are not OpenAI's."""

    model: str
    max_tokens: int
    temperature: float
    seed: int
    chat: bool
    ignore_eos: bool
    further: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: Prompt) -> dict[str, Any]:
        what = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        body = {
            "model": self.model,
            **what,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        # Not OpenAI's: sent only when asked for, so that other servers can be driven too.
        return body | ({"ignore_eos": True} if self.ignore_eos else {}) | dict(self.further)


class ServerClient:
    """One server. An asynchronous context manager that owns the connections."""

    def __init__(self, url: str, api_key: str | None, transport: Transport | None = None) -> None:
        """``transport``: instead of sockets, for tests.

        Raises:
            ConfigError: the URL is none.
        """
        key = api_key or os.environ.get("QUIRE_API_KEY", "")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url}: must start with http:// or https://")
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # a proxy between us and the server would be measured too
            transport=transport,
        )

    async def __aenter__(self) -> "ServerClient":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def find_model(self, wanted: str | None) -> tuple[str, int]:
        """(name, context) of the model ``wanted``, or of the first that the server lists."""
        name, context = await self.find_card(wanted)
        if context is None:
            raise ConfigError("the server does not say its context (max_model_len in /v1/models)")
        return name, context

    async def find_card(self, wanted: str | None) -> tuple[str, int | None]:
        """As ``find_model``, of a server that need not say its context."""
        body = await self._get_json("/v1/models")
        listed = body.get("data")
        cards = {card["id"]: card for card in listed if "id" in card} if isinstance(listed, list) else {}
        if not cards or (wanted is not None and wanted not in cards):
            raise ConfigError(f"--model {wanted}: the server has {', '.join(cards) or 'no model'}")
        card = cards[wanted] if wanted is not None else next(iter(cards.values()))
        context = card.get("max_model_len")
        return card["id"], context if isinstance(context, int) else None

    async def tokenize(self, model: str, prompt: str, *, chat: bool) -> list[int] | None:
        """Token ids of a prompt, or of it as the only message; None when the server finds it longer than the context.

        Raises:
            ConfigError: the server cannot tokenize.
        """
        what = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        try:
            response = await self._http.post("/tokenize", json={"model": model, **what})
        except FAILURES as error:
            raise ConfigError(f"the server cannot be reached: {_words(error)}") from None
        if response.status_code == 400 and _error_of(response.content)[0] == "context_length_exceeded":
            return None
        if response.status_code != 200:
            raise ConfigError(
                f"the server's /tokenize answered {response.status_code}: {_error_of(response.content)[1]}"
            )
        tokens: list[int] = response.json()["tokens"]
        return tokens

    async def stream(self, settings: RequestSettings, prompt: Prompt, clock: Callable[[], float]) -> Timing:
        """Ask, and take the answer in. Never raises for what the server does: that is the result."""
        path = "/v1/chat/completions" if settings.chat else "/v1/completions"
        timing = Timing(clock())
        try:
            async with self._http.stream("POST", path, json=settings.body(prompt)) as response:
                if response.status_code != 200:
                    code, message = _error_of(await response.aread())
                    timing.error = (f"http {response.status_code} {code}".rstrip(), message)
                else:
                    timing.error = await self._take_events(response, timing, clock)
        except httpx.TimeoutException as error:
            timing.error = ("timeout", _words(error))
        except FAILURES as error:
            timing.error = ("connection", _words(error))
        timing.ended = clock()
        return timing

    async def metrics(self) -> dict[str, float]:
        """Gauges and counters of /metrics without labels and prefix, summed; empty when the server has none."""
        try:
            response = await self._http.get("/metrics")
        except FAILURES:
            return {}
        return parse_metrics(response.text) if response.status_code == 200 else {}

    async def _take_events(
        self, response: httpx.Response, timing: Timing, clock: Callable[[], float]
    ) -> tuple[str, str] | None:
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                good = timing.finish_reason in GOOD_ENDINGS
                return None if good else (f"finish_reason {timing.finish_reason or 'missing'}", "")
            try:
                event = json.loads(data)
            except ValueError:
                return ("not JSON", data)
            if "error" in event:
                code, message = _error_of(data.encode())
                return (f"event {code}".rstrip(), message)
            _take(event, timing, clock())
        return ("cut off", "the stream ended without [DONE]")

    async def _get_json(self, path: str) -> dict[str, Any]:
        try:
            response = await self._http.get(path)
        except FAILURES as error:
            raise ConfigError(f"the server cannot be reached: {_words(error)}") from None
        if response.status_code != 200:
            raise ConfigError(f"the server's {path} answered {response.status_code}: {_error_of(response.content)[1]}")
        try:
            decoded = response.json()
        except ValueError:
            raise ConfigError(f"the server's {path} did not answer in JSON") from None
        return decoded if isinstance(decoded, dict) else {}


def _take(event: dict[str, Any], timing: Timing, now: float) -> None:
    """One chunk: text that came, an ending, or the usage at last."""
    for choice in event.get("choices") or ():
        if choice.get("text") or (choice.get("delta") or {}).get("content"):
            timing.pieces.append(now)
        timing.chunks.append(now)
        timing.finish_reason = choice.get("finish_reason") or timing.finish_reason
    usage = event.get("usage")
    if usage:
        timing.prompt_tokens = usage.get("prompt_tokens", 0)
        timing.output_tokens = usage.get("completion_tokens", 0)
        timing.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus' text form: name behind the prefix ``quire:`` to value, series of one name summed."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("quire:"):
            key = name.removeprefix("quire:").partition("{")[0]
            found[key] = found.get(key, 0.0) + float(value)
    return found


def _error_of(content: bytes) -> tuple[str, str]:
    """(code, message) of an answer in OpenAI's error form, as far as it is one."""
    try:
        error = json.loads(content)["error"]
        return str(error.get("code") or ""), str(error.get("message") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", content[:200].decode("utf-8", "replace")


def _words(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()
