"""Refusals: invalid fields, bodies, paths and keys; and that the next valid request is served."""

import asyncio
import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

from quire.frontend.http.schema import bodies, schema
from quire.frontend.http.schema.foreign_fields import UNSUPPORTED
from quire.frontend.http.serving.body import MAX_BODY_BYTES
from quire.protocol.errors import InvalidRequest

VOCAB = 420
MESSAGES = [{"role": "user", "content": "hello"}]
TEMPERATURE_RANGE = "temperature must be a number from 0 to 2"
IDS_RANGE = f"prompt must hold token ids, integers from 0 to {VOCAB - 1}"
CONTEXT = "maximum context length"

# (field, value, part of the error message)
SHARED = [
    # tests/abuse/test_numbers.py has all invalid numbers.
    ("n", 129, "n must be an integer from 1 to 128"),
    ("temperature", 2.1, TEMPERATURE_RANGE),
    ("top_p", 0, "top_p must be a number above 0 and at most 1"),
    ("min_p", 1.01, "min_p must be a number from 0 to 1"),
    ("top_k", -2, "top_k must be an integer from -1 to"),
    ("seed", 2**65, "seed must be an integer from"),
    ("max_tokens", 257, "integer from 1 to 256 (got 257): this model's " + CONTEXT),
    ("max_tokens", 256, "maximum context length is 256 tokens and your prompt has"),
    ("stop", [""], "stop must be a string of 1 to 1024"),
    ("stop", ["x"] * 10_000, "at most 64 strings"),
    ("stop_token_ids", [3, VOCAB], f"integers from 0 to {VOCAB - 1}"),
    ("stop_token_ids", [-1], "stop_token_ids must be a"),
    ("stop_token_ids", [1] * 2000, "at most 1024"),
    *[("ignore_eos", value, "ignore_eos must be true or false") for value in (1, "yes")],
    ("skip_special_tokens", 0, "must be true or false"),
    ("include_stop_str_in_output", "no", "must be true or false"),
    ("stream", "true", "stream must be true or false"),
    ("stream_options", {"include_usage": True}, "only allowed when stream is true"),
    ("priority", 2**40, "priority must be an integer from"),
    ("cache_salt", "", "string of 1 to 1024 characters"),
    ("model", 7, "model must be a string"),
    ("presence_penalty", 3, "presence_penalty must be a number from -2 to 2"),
    ("frequency_penalty", "x", "frequency_penalty must be a number from -2 to 2"),
    ("logit_bias", {"5": 1, "420": 1}, "(got '420')"),
    ("logit_bias", {"7": 101}, "logit_bias of token 7 must be a number"),
    ("logit_bias", [1], "logit_bias must be an object"),
    ("repetition_penalty", 0, "repetition_penalty must be a number from 0.01 to 10"),
    ("min_tokens", -1, "min_tokens must be an integer from 0 to"),
    *[("allowed_token_ids", value, f"0 to {VOCAB - 1}") for value in ([VOCAB], [3, 2**31 - 1])],
    *[("allowed_token_ids", value, "list of 1 to 65536 token ids") for value in ([], [-1], [1.5], ["a"], 7, [True])],
    ("allowed_token_ids", [5] * 100_000, "list of 1 to 65536 token ids"),
    ("allowed_token_ids", [5, 6, 5], "more than once"),
    *[("bad_words", value, "string of 1 to 256 characters") for value in ([""], [7], ["x" * 257])],
    *[("bad_words", value, "at most 1024 strings") for value in ("word", ["x"] * 100_000, {})],
    ("bad_words", ["ж" * 250], "from 1 to 256 tokens long"),
    ("prompt_logprobs", 21, "integer from 0 to 20"),
    ("thinking_token_budget", -1, "thinking_token_budget must be an integer"),
    *[("structured_outputs", value, "exactly one of json, regex") for value in ({}, {"json": {}, "regex": "a"})],
    ("structured_outputs", {"json_object": False}, "exactly one of"),
    ("structured_outputs", {"regex": ""}, "structured_outputs.regex must be a non-empty string"),
    ("structured_outputs", {"choice": []}, "structured_outputs.choice must be a list"),
    ("structured_outputs", {"choice": [1]}, "structured_outputs.choice must be a list"),
    ("structured_outputs", {"json": [1]}, "structured_outputs.json must be a non-empty string"),
    ("structured_outputs", {"grammar": "x" * 600_000}, "at most 524288 bytes"),
    *[("structured_outputs", value, "structured_outputs must be an object") for value in ("json", 7, [])],
    *[("repetition_detection", value, "must have max_pattern_size") for value in ({}, {"min_count": 3})],
    ("repetition_detection", {"max_pattern_size": 0}, "repetition_detection.max_pattern_size must be an integer"),
    ("repetition_detection", {"max_pattern_size": 5, "min_count": 1}, "repetition_detection.min_count must be"),
    ("repetition_detection", {"max_pattern_size": 5, "min_pattern_size": 6}, "from 1 to 5"),
    ("repetition_detection", 7, "repetition_detection must be an object"),
    *[("extra_args", value, "extra_args must be an object") for value in (7, {"a": {"b": 1}}, {"a": "x" * 70_000})],
    ("vllm_xargs", [], "vllm_xargs must be an object"),
    ("vllm_xargs", {"a": {}}, "extra_args must be an object of strings"),
    ("response_format", "json", "response_format must be an object"),
    ("user", 7, "user must be a string"),
]
NESTED = [
    ("response_format", {"type": "xml"}, "response_format.type", "one of text, json_object, json_schema"),
    ("response_format", {}, "response_format.type", "one of text"),
    (
        "response_format",
        {"type": "text", "json_schema": {}},
        "response_format.json_schema",
        "needs response_format.type json_schema",
    ),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema", "must be an object"),
    *[
        ("response_format", {"type": "json_schema", "json_schema": value}, f"response_format.json_schema.{at}", says)
        for value, at, says in (
            ({}, "name", "1 to 128 letters"),
            ({"name": "a b", "schema": {}}, "name", "1 to 128 letters"),
            ({"name": "a"}, "schema", "must be an object"),
            ({"name": "a", "schema": {}, "strict": 1}, "strict", "true or false"),
            ({"name": "a", "schema": {"enum": ["x" * 600_000]}}, "schema", "at most 524288 bytes"),
        )
    ],
]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
TOOLS = [
    ({"tools": [7]}, "tools", "tools must be a list of objects"),
    ({"tools": [TOOL] * 129}, "tools", "at most 128 tools"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type", "must be function"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "must be an object"),
    ({"tools": [TOOL, {"type": "function", "function": {}}]}, "tools[1].function.name", "1 to 128 letters"),
    ({"tools": [TOOL, {"type": "function", "function": {"name": "é"}}]}, "tools[1].function.name", "1 to 128"),
    ({"tools": [{**TOOL, "function": {**FUNCTION, "parameters": []}}]}, "tools[0].function.parameters", "an object"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "duplicate function name f"),
    ({"tools": [{**TOOL, "function": {**FUNCTION, "description": "x" * 600_000}}]}, "tools", "at most 524288 bytes"),
    *[({"tools": [TOOL], "tool_choice": value}, "tool_choice", "must be none, auto") for value in (7, "f", {}, [])],
    *[({"tool_choice": value}, "tool_choice", "requires tools") for value in ("required", {"type": "function"})],
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "'g' not found in tools",
    ),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
    (
        {"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "cannot be combined with a tool_choice",
    ),
]
COMPLETION = [
    *[("prompt", value, IDS_RANGE) for value in ([VOCAB], [-1], [1, 2.0], [1, True], [1, "a"], [1, None], [{}])],
    *[("prompt", value, "must not be empty") for value in ("", [], [""], ["x", ""])],
    ("prompt", [[]], "at least one token"),
    *[("prompt", value, "prompt must be a string, a list of token ids") for value in (7, {}, True)],
    *[("prompt", value, "either strings or lists") for value in (["a", [1]], [[1], "a"], ["a", 1])],
    ("prompt", ["a"] * 2049, "at most 2048 prompts"),
    ("prompt", None, "prompt is required"),
    ("logprobs", 21, "logprobs must be an integer from 0 to 20"),
    ("echo", 1, "echo must be true or false"),
    ("best_of", 0, "best_of must be an integer from 1 to 128"),
    ("best_of", 129, "best_of must be an integer from 1 to 128"),
    ("suffix", 7, "suffix is not supported: write the whole prompt"),
    ("add_special_tokens", 1, "add_special_tokens must be true or false"),
]
CHAT = [
    *[("messages", value, "messages must be a list of at least one message") for value in ([], "x", 7, {})],
    ("messages", None, "messages is required"),
    ("top_logprobs", 3, "top_logprobs needs logprobs to be true"),
    ("top_logprobs", 21, "top_logprobs must be an integer from 0 to 20"),
    ("logprobs", 1, "logprobs must be true or false"),
    ("max_completion_tokens", 0, "max_completion_tokens must be an integer from 1 to 256"),
    ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs must not set messages"),
    ("chat_template_kwargs", {"tokenize": True}, "chat_template_kwargs must not set tokenize"),
    ("chat_template_kwargs", [], "must be an object"),
    ("chat_template", "{{ 1 }}", "chat_template is not supported: start the server with --chat-template"),
    ("functions", [{"name": "f"}], "functions is not supported: use tools and tool_choice"),
    ("function_call", {"name": "f"}, "function_call is not supported: use tools and tool_choice"),
    ("audio", {"voice": "x"}, "audio is not supported: this server writes text only"),
    ("web_search_options", {"x": 1}, "web_search_options is not supported: search in the client"),
    ("structural_tag", {"type": "object"}, "structural_tag is not supported: use structured_outputs"),
    ("reasoning_effort", "maximal", "reasoning_effort must be one of none, minimal, low, medium, high, xhigh, max"),
    ("metadata", [], "metadata must be an object"),
    ("store", "x", "store must be true or false"),
    *[("modalities", value, "this server writes text only") for value in ("text", ["text", "audio"], 7)],
]
WORDS = st.sampled_from(["type", "function", "name", "json_schema", "schema", "json", "regex", "required", "5"])
PLAIN = st.none() | st.booleans() | st.integers(-5, 2**65) | st.floats() | WORDS | st.text(max_size=3)
OBJECT_FIELDS = (
    *("logit_bias", "repetition_detection", "extra_args", "vllm_xargs", "structured_outputs", "response_format"),
    *("tools", "tool_choice", "parallel_tool_calls", "stream_options"),
)
ANY_FIELDS = st.dictionaries(
    st.sampled_from([*bodies.SAMPLING_FIELDS, *OBJECT_FIELDS]),
    st.recursive(
        PLAIN, lambda part: st.lists(part, max_size=3) | st.dictionaries(WORDS, part, max_size=3), max_leaves=8
    ),
    min_size=1,
    max_size=3,
)


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
    @pytest.mark.parametrize(("name", "value", "says"), SHARED + COMPLETION, ids=short)
    def test_completions(self, client: Any, name: str, value: Any, says: str) -> None:
        refused(client.complete(**{name: value}), 400, name, says)
        assert client.complete().status_code == 200

    @pytest.mark.parametrize(("name", "value", "says"), SHARED + CHAT, ids=short)
    def test_chat(self, client: Any, name: str, value: Any, says: str) -> None:
        refused(client.chat(**{name: value}), 400, name, says)
        assert client.chat().status_code == 200

    @pytest.mark.parametrize(("name", "value", "param", "says"), NESTED, ids=short)
    def test_members_of_objects(self, client: Any, name: str, value: Any, param: str, says: str) -> None:
        refused(client.chat(**{name: value}), 400, param, says)
        refused(client.complete(**{name: value}), 400, param, says)

    @pytest.mark.parametrize(("fields", "param", "says"), TOOLS, ids=short)
    def test_tools(self, client: Any, fields: dict[str, Any], param: str, says: str) -> None:
        refused(client.chat(**fields), 400, param, says)

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

    @given(fields=ANY_FIELDS)
    @settings(
        max_examples=150,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    def test_any_value_is_accepted_or_refused(self, engine: Any, fields: dict[str, Any]) -> None:
        """No other exception than InvalidRequest is raised."""
        parser = schema.Parser(served_names=("tiny",), limits=engine)
        for parse, prompt in ((parser.completion, {"prompt": "x"}), (parser.chat, {"messages": MESSAGES})):
            with contextlib.suppress(InvalidRequest):
                parse({**prompt, **fields})

    def test_stream_options(self, client: Any) -> None:
        response = client.complete(stream=True, stream_options={"include_usage": 1})
        refused(response, 400, "stream_options.include_usage", "must be true or false")
        refused(client.complete(stream=True, stream_options=7), 400, "stream_options", "must be an object")

    def test_combinations(self, client: Any) -> None:
        both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
        refused(client.complete(**both), 400, "response_format", "cannot be combined")
        refused(client.complete(extra_args={}, vllm_xargs={}), 400, "vllm_xargs", "another name of extra_args")
        refused(client.complete(max_tokens=0), 400, "max_tokens", "from 1 to 256")
        refused(client.complete(max_tokens=4, min_tokens=5), 400, "min_tokens", "max_tokens, which is 4 (got 5)")
        refused(client.complete(prompt=[5] * 250, min_tokens=10), 400, "min_tokens", "which is 6 (got 10)")
        refused(client.chat(ignore_eos=True, structured_outputs={"regex": "a"}), 400, "ignore_eos", "structured")
        for response in (client.complete(prompt_logprobs=0, stream=True), client.chat(prompt_logprobs=0, stream=True)):
            refused(response, 400, "prompt_logprobs", "require stream to be false")
        refused(client.complete(prompt=["a"] * 100, n=100), 400, "n", "prompts times n must be at most 2048")
        response = client.chat(continue_final_message=True, add_generation_prompt=True)
        refused(response, 400, "continue_final_message", "cannot both be true")

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
            "tools": [TOOL],
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
