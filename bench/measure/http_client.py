"""HTTP client of an OpenAI-compatible server: model list, tokenizer, timed streams, metrics."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.protocol.errors import ConfigError
from quire.version import install_command

try:
    import httpx
except ImportError:
    raise ConfigError(f"httpx not found: {install_command('bench')}") from None

FAILURES = (httpx.HTTPError, httpx.InvalidURL)
TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 10.0
COMPLETE_REASONS = ("stop", "length")

Prompt = str | list[int] | list[dict[str, Any]]
"""``dict``: parts of a chat message."""
Transport = httpx.AsyncBaseTransport


@dataclass(slots=True)
class Timing:
    """Measurements of one request. Times are in seconds on one clock.

    Attributes:
        pieces: arrival times of the chunks with text (one chunk may have several tokens).
        error: (kind, message) of an incomplete response, or None.
        chunks: arrival times of all chunks, also of those without text: part of a character, the role, the end.
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
        """Mean seconds per token after the first, independent of how many tokens each chunk has."""
        if len(self.pieces) < 2 or self.output_tokens < 2:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """Fields shared by all requests of a run. ``further``: fields that OpenAI does not define."""

    model: str
    max_tokens: int
    temperature: float
    seed: int
    chat: bool
    ignore_eos: bool
    further: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: Prompt) -> dict[str, Any]:
        prompt_fields = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        body = {
            "model": self.model,
            **prompt_fields,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        # Not an OpenAI field: sent only if set, so that other servers accept the request.
        return body | ({"ignore_eos": True} if self.ignore_eos else {}) | dict(self.further)


class ServerClient:
    """Client of one server. An asynchronous context manager that owns the connections."""

    def __init__(self, url: str, api_key: str | None, transport: Transport | None = None) -> None:
        """``transport``: replaces sockets in tests.

        Raises:
            ConfigError: the URL is invalid.
        """
        key = api_key or os.environ.get("QUIRE_API_KEY", "")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url}: must start with http:// or https://")
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # a proxy would be part of the measurement
            transport=transport,
        )

    async def __aenter__(self) -> "ServerClient":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def find_model(self, wanted: str | None) -> tuple[str, int]:
        """Return (name, max_model_len) of the model ``wanted``, or of the first one listed.

        Raises:
            ConfigError: the model is not listed, or without max_model_len.
        """
        name, context = await self.find_card(wanted)
        if context is None:
            raise ConfigError("server's /v1/models has no max_model_len")
        return name, context

    async def find_card(self, wanted: str | None) -> tuple[str, int | None]:
        """As ``find_model``, with None for a model that is listed without max_model_len."""
        body = await self._get_json("/v1/models")
        listed = body.get("data")
        cards = {card["id"]: card for card in listed if "id" in card} if isinstance(listed, list) else {}
        if not cards:
            raise ConfigError("server lists no models")
        if wanted is not None and wanted not in cards:
            raise ConfigError(f"--model {wanted}: not found on the server (models: {', '.join(cards)})")
        card = cards[wanted] if wanted is not None else next(iter(cards.values()))
        context = card.get("max_model_len")
        return card["id"], context if isinstance(context, int) else None

    async def tokenize(self, model: str, prompt: str, *, chat: bool) -> list[int] | None:
        """Return the token ids of a prompt, or with ``chat`` of a conversation with it as the only message. None if it
        is longer than the context.

        Raises:
            ConfigError: the server did not tokenize it.
        """
        prompt_fields = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        try:
            response = await self._http.post("/tokenize", json={"model": model, **prompt_fields})
        except FAILURES as error:
            raise ConfigError(f"cannot reach the server: {_describe(error)}") from None
        if response.status_code == 400 and _error_of(response.content)[0] == "context_length_exceeded":
            return None
        if response.status_code != 200:
            raise ConfigError(f"server's /tokenize returned {response.status_code}: {_error_of(response.content)[1]}")
        tokens: list[int] = response.json()["tokens"]
        return tokens

    async def stream(self, settings: RequestSettings, prompt: Prompt, clock: Callable[[], float]) -> Timing:
        """Send one request and time its stream. Errors of the server and the connection are recorded, not raised."""
        path = "/v1/chat/completions" if settings.chat else "/v1/completions"
        timing = Timing(clock())
        try:
            async with self._http.stream("POST", path, json=settings.body(prompt)) as response:
                if response.status_code != 200:
                    code, message = _error_of(await response.aread())
                    timing.error = (f"http {response.status_code} {code}".rstrip(), message)
                else:
                    timing.error = await self._read_events(response, timing, clock)
        except httpx.TimeoutException as error:
            timing.error = ("timeout", _describe(error))
        except FAILURES as error:
            timing.error = ("connection", _describe(error))
        timing.ended = clock()
        return timing

    async def metrics(self) -> dict[str, float]:
        """Return ``parse_metrics`` of the server's /metrics, or an empty dict if the server has none."""
        try:
            response = await self._http.get("/metrics")
        except FAILURES:
            return {}
        return parse_metrics(response.text) if response.status_code == 200 else {}

    async def _read_events(
        self, response: httpx.Response, timing: Timing, clock: Callable[[], float]
    ) -> tuple[str, str] | None:
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                complete = timing.finish_reason in COMPLETE_REASONS
                return None if complete else (f"finish_reason {timing.finish_reason or 'missing'}", "")
            try:
                event = json.loads(data)
            except ValueError:
                return ("not JSON", data)
            if "error" in event:
                code, message = _error_of(data.encode())
                return (f"event {code}".rstrip(), message)
            _record(event, timing, clock())
        return ("cut off", "stream ended without [DONE]")

    async def _get_json(self, path: str) -> dict[str, Any]:
        try:
            response = await self._http.get(path)
        except FAILURES as error:
            raise ConfigError(f"cannot reach the server: {_describe(error)}") from None
        if response.status_code != 200:
            raise ConfigError(f"server's {path} returned {response.status_code}: {_error_of(response.content)[1]}")
        try:
            decoded = response.json()
        except ValueError:
            raise ConfigError(f"server's {path} did not return JSON") from None
        return decoded if isinstance(decoded, dict) else {}


def _record(event: dict[str, Any], timing: Timing, now: float) -> None:
    """Add one chunk to ``timing``: its text, finish reason or usage."""
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
    """Parse the Prometheus text format: a map from name without its prefix to value, summed over labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        prefix, colon, key = name.partition("{")[0].partition(":")
        if colon and prefix.isidentifier():
            found[key] = found.get(key, 0.0) + float(value)
    return found


def _error_of(content: bytes) -> tuple[str, str]:
    """Return (code, message) of an OpenAI error object; for other content, the message is its first 200 bytes."""
    try:
        error = json.loads(content)["error"]
        return str(error.get("code") or ""), str(error.get("message") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", content[:200].decode("utf-8", "replace")


def _describe(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()
