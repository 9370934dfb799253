"""Refusals: invalid fields, bodies, paths and keys; and that the next valid request is served."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from quire.frontend.http.schema import bodies, schema
from quire.frontend.http.schema.foreign_fields import UNSUPPORTED
from quire.frontend.http.serving.body import MAX_BODY_BYTES

VOCAB = 420
MESSAGES = [{"role": "user", "content": "hello"}]


def short(value: Any) -> str:
    return repr(value)[:24]


def refused(response: Any, status: int, param: str | None, says: str) -> None:
    """Check that the response is an OpenAI error with this status, field and message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert says in error["message"], error["message"]
    if re.match(r"\S+ must be ", error["message"]):
        assert "(got " in error["message"], error["message"]
    assert len(response.content) < 2_000


class TestFields:
    """One case of each kind; test_field_refusals.py has the table of fields."""

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/responses"])
    def test_a_refusal_names_the_field_and_the_next_request_is_served(self, client: Any, path: str) -> None:
        refused(client.post(path, {"model": 7}), 400, "model", "model must be a string")
        body = {"messages": MESSAGES} if "chat" in path else {"input" if "responses" in path else "prompt": "x"}
        refused(client.post(path, {**body, "model": "other"}), 404, "model", "does not exist")
        assert client.complete().status_code == 200

    def test_refusals_that_need_the_length_of_the_prompt(self, client: Any, engine: Any) -> None:
        for ask in (client.complete, client.chat):
            refused(ask(max_tokens=256), 400, "max_tokens", "maximum context length is 256 tokens and your prompt has")
        refused(client.complete(prompt=[5] * 250, min_tokens=10), 400, "min_tokens", "which is 6 (got 10)")
        for length, wanted in ((2, 255), (255, 2), (251, 6)):
            response = client.complete(prompt=[5] * length, max_tokens=wanted)
            refused(response, 400, "max_tokens", f"max_tokens must be from 1 to {256 - length}")
        for prompts, n in (100, 100), (2048, 2), (17, 128):
            refused(client.complete(prompt=["a"] * prompts, n=n), 400, "n", "prompts times n must be at most 2048")
        assert engine.added == []

    @pytest.mark.parametrize("depth", [20, 3_000])
    def test_deeply_nested_schemas(self, client: Any, engine: Any, depth: int) -> None:
        engine.max_model_len = 10_000
        text = '{"items":' * depth + "{}" + "}" * depth
        for field in (
            f'"response_format": {{"type": "json_schema", "json_schema": {{"name": "a", "schema": {text}}}}}',
            f'"tools": [{{"type": "function", "function": {{"name": "f", "parameters": {text}}}}}]'
            ', "tool_choice": "required"',
        ):
            body = f'{{"messages": [{{"role": "user", "content": "x"}}], {field}}}'
            status = client.post("/v1/chat/completions", content=body.encode()).status_code
            assert status == (200 if depth == 20 else 400)

    def test_all_openai_fields_are_accepted(self, client: Any) -> None:
        shared = {"presence_penalty": 1, "frequency_penalty": -1, "user": "me", "logit_bias": {"5": -100, "419": 1}}
        shared["response_format"] = {"type": "text"}
        nothing = {"best_of": 1, "suffix": "", "echo": False, "top_k": None, "stop": None}
        response = client.complete(**shared, **nothing)
        assert response.status_code == 200 and "x-quire-ignored-fields" not in response.headers
        objects = {key: {} for key in ("metadata", "prediction", "audio", "web_search_options")}
        words = ("service_tier", "verbosity", "safety_identifier", "prompt_cache_key")
        chat = {
            **objects,
            **dict.fromkeys((*words, "prompt_cache_retention", "tool_choice", "function_call"), "auto"),
            **dict.fromkeys(("parallel_tool_calls", "store"), True),
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "functions": [],
            "modalities": ["text"],
            "moderation": {},
            "prompt_cache_options": {},
            "seed": None,
        }
        response = client.chat(**shared, **chat)
        assert response.status_code == 200 and "x-quire-ignored-fields" not in response.headers


class TestBodies:
    @pytest.mark.parametrize(
        ("body", "says"),
        [
            (b"[1]", "must be a JSON object"),
            (b'{"prompt": "x"} x', "not valid JSON"),
            (b"[" * 50_000, "nested too deeply"),
            (b'{"prompt":' * 100_000, "too many values"),
            (b'{"seed": ' + b"1" * 10**6 + b"}", "not valid JSON"),
            (b'{"prompt": "x", "user": NaN}', "user must be a string"),
        ],
        ids=short,
    )
    def test_body_that_is_not_a_json_object(self, client: Any, body: bytes, says: str) -> None:
        response = client.post("/v1/completions", content=body)
        assert response.status_code == 400
        assert says in response.json()["error"]["message"]
        assert len(response.content) < 2_000
        assert client.complete().status_code == 200

    def test_deep_nesting_within_a_message(self, client: Any) -> None:
        deep: Any = {}
        for _ in range(900):
            deep = {"x": deep}
        message = {"role": "assistant", "content": "x", "tool_calls": [deep]}
        assert client.chat(messages=[message, {"role": "user", "content": "x"}]).status_code in (200, 400)
        assert client.chat().status_code == 200

    def test_too_large_content_length_is_refused_unread(self, app: Starlette, finish: Any) -> None:
        sent = feed(app, finish, [], {"content-length": str(MAX_BODY_BYTES + 1)})
        assert sent[0]["status"] == 413
        assert feed(app, finish, [], {"content-length": "9" * 5_000})[0]["status"] == 413

    def test_body_without_length_is_counted_while_read(self, app: Starlette, finish: Any) -> None:
        chunks = [b"x" * 2**20] * 33
        sent = feed(app, finish, chunks, {})
        assert sent[0]["status"] == 413
        assert b"at most 32 MiB" in sent[1]["body"]
        assert feed(app, finish, [b'{"prompt"', b": [3", b"]}"], {})[0]["status"] == 200

    @pytest.mark.parametrize(
        "headers", [{"x": "y" * 70_000}, {f"x{i}": "y" for i in range(200)}], ids=["one large", "many"]
    )
    def test_too_large_headers(self, client: Any, headers: dict[str, str]) -> None:
        refused(client.get("/v1/models", headers=headers), 431, None, "headers too large")

    def test_too_long_path(self, client: Any) -> None:
        refused(client.get("/v1/models/" + "x" * 10_000), 431, None, "too large")


def feed(app: Starlette, finish: Any, chunks: list[bytes], headers: dict[str, str]) -> list[Any]:
    """POST the chunks to /v1/completions; return the messages that the application sends."""
    left = [*chunks]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        assert left or sent == [], "read after the end"
        if not left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "scheme": "http",
        "server": ("test", 80),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    finish(app(scope, receive, send))
    return sent


class TestRoutes:
    def test_unknown_models_are_not_found(self, client: Any) -> None:
        refused(client.get("/v1/models/other"), 404, "model", "'other' does not exist")
        refused(client.get("/v1/models/..%2f..%2fetc"), 404, "model", "does not exist")

    def test_a_base_url_with_too_much_or_too_little_is_named(self, client: Any) -> None:
        for path, meant in (("/chat/completions", "/v1/chat/completions"), ("/v1/v1/responses", "/v1/responses")):
            refused(client.post(path, {}), 404, None, f"{path!r} not found: the route is {meant} (check the base URL")
        refused(client.get("/v1/other"), 404, None, "'/v1/other' not found")
        assert "the route is /api/chat" in client.post("/v1/api/chat", {}).text

    def test_web_sockets_are_closed(self, app: Starlette, finish: Any) -> None:
        sent: list[Any] = []

        async def scenario() -> None:
            async def receive() -> dict[str, Any]:
                return {"type": "websocket.connect"}

            async def send(message: Any) -> None:
                sent.append(message)

            await app({"type": "websocket", "path": "/v1/completions", "headers": []}, receive, send)

        finish(scenario())
        assert sent == [{"type": "websocket.close", "code": 1008}]


def test_readme_lists_every_field() -> None:
    text = Path(schema.__file__).with_name("README.md").read_text(encoding="utf-8")
    structs: tuple[Any, ...] = (bodies.CompletionBody, bodies.ChatBody, bodies.StreamOptions)
    fields = {name for struct in structs for name in struct.__struct_fields__}
    assert fields | set(bodies.SAMPLING_FIELDS) | UNSUPPORTED.keys() <= set(re.findall(r"[a-z_]+", text))
