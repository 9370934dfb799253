"""What a running server answers ``quire chat``, ``quire generate`` and ``quire embed`` over HTTP."""

import base64
import http.client
import json
import urllib.error
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.launch.offline.terminal_answer import OnText, TerminalAnswer
from quire.launch.plain_http import PlainServer, bearer, server_key
from quire.protocol.errors import ConfigError, EngineError
from quire.protocol.request.sampling_params import SamplingParams

TIMEOUT_S = 600.0
"""Seconds without any data from the server, after which a request fails."""
MAX_EVENT_BYTES = 2**20


class _Vector(msgspec.Struct):
    embedding: str | None = None
    error: dict[str, Any] | None = None


class _Vectors(msgspec.Struct):
    data: list[_Vector]


class RemoteModel:
    """One model of a server with OpenAI's API."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        """
        Args:
            url: as of PlainServer.
            model: name of the model; None: the first one that the server lists.
            api_key: sent as the bearer token; None: the variable QUIRE_API_KEY, if it is set.

        Raises:
            ConfigError: the URL is invalid, the server cannot be reached, or it does not serve ``model``.
        """
        self._server = PlainServer(url, TIMEOUT_S)
        self._headers = {"Content-Type": "application/json", **bearer(server_key(api_key))}
        names = self._model_names()
        if model is not None and model not in names:
            raise ConfigError(f"{model} is not served at {url} (models: {', '.join(names)})")
        self.name = model or names[0]

    def chat(self, messages: list[dict[str, Any]], params: SamplingParams, on_text: OnText) -> TerminalAnswer:
        """Answer a conversation; ``on_text`` is called with each new part of the text.

        Raises:
            ConfigError: the server refused the request.
            EngineError: the server failed, or the connection ended before the answer did.
        """
        return self._run("/v1/chat/completions", {"messages": messages}, params, on_text)

    def generate(self, prompt: str, params: SamplingParams, on_text: OnText) -> TerminalAnswer:
        """Complete ``prompt``; otherwise as ``chat``."""
        return self._run("/v1/completions", {"prompt": prompt}, params, on_text)

    def embed(self, texts: list[str], fields: dict[str, Any]) -> list[bytes | str]:
        """Return the vector of each text, as little-endian float32, or the reason why it has none.

        ``fields``: further ones of the request.

        Raises:
            ConfigError: the server refused the request.
            EngineError: the server failed, or the connection ended before the response did.
        """
        body = {"model": self.name, "input": texts, "encoding_format": "base64", **fields}
        try:
            with self._open("/v1/embeddings", body) as response:
                entries = msgspec.json.decode(response.read(), type=_Vectors).data
        except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
            raise EngineError(f"the connection failed: {error}") from None
        return [
            str((entry.error or {}).get("message", "failed"))
            if entry.embedding is None
            else base64.b64decode(entry.embedding)
            for entry in entries
        ]

    def _run(self, path: str, fields: dict[str, Any], params: SamplingParams, on_text: OnText) -> TerminalAnswer:
        body = {"model": self.name, **fields, **_fields(params), "stream": True}
        answer = TerminalAnswer()
        for event in self._events(path, body | {"stream_options": {"include_usage": True}}):
            for choice in event.get("choices") or ():
                text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                answer.text += text
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                answer.stop_reason = choice.get("stop_reason") or answer.stop_reason
                if text:
                    on_text(text)
            if usage := event.get("usage"):
                answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if answer.finish_reason is None:
            raise EngineError("the connection ended before the answer did")
        return answer

    def _model_names(self) -> list[str]:
        with self._open("/v1/models", None) as response:
            listed = json.loads(response.read()).get("data") or []
        names = [card["id"] for card in listed]
        if not names:
            raise ConfigError(f"{self._server.url} lists no models")
        return names

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the server-sent events; raise EngineError for an error event."""
        try:
            with self._open(path, body) as response:
                while line := response.readline(MAX_EVENT_BYTES):
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    if data and line.startswith(b"data:"):
                        event = json.loads(data)
                        if error := event.get("error"):
                            raise EngineError(str(error.get("message", error)))
                        yield event
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"the connection failed: {error}") from None

    def _open(self, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        data, method = (None, "GET") if body is None else (msgspec.json.encode(body), "POST")
        try:
            return self._server.open(path, self._headers, method, data)
        except urllib.error.HTTPError as error:
            with error:
                text = f"{error.code} {_message(error.read(MAX_EVENT_BYTES))}"
            raise ConfigError(f"{self._server.url}{path}: {text}") from None


def _fields(params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a request body that differ from the defaults of ``SamplingParams``."""
    default = SamplingParams()
    names = ("temperature", "top_p", "top_k", "seed", "max_tokens", "stop", "thinking_token_budget")
    fields = {name: getattr(params, name) for name in names if getattr(params, name) != getattr(default, name)}
    required = params.structured_outputs
    if required is not None:
        fields["structured_outputs"] = {"regex": required.regex} if required.json is None else {"json": required.json}
    return fields


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]
