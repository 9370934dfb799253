"""Fields that clients send beyond those that the server knows: ignored, refused, or with an effect on the template."""

import json
from typing import Any

import pytest

from quire.frontend.http.app import make_app
from quire.frontend.http.schema import bodies
from quire.frontend.http.schema.foreign_fields import ASKED_BY_FALSE, UNSUPPORTED, WITHOUT_EFFECT, suggest
from quire.frontend.http.schema.tools import parse_tools
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.text_in import TextIn
from quire.protocol.errors import InvalidRequest

HEADER = "x-quire-ignored-fields"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
NESTED: list[tuple[dict[str, Any], str]] = [
    ({"temprature": 1}, "temprature"),
    ({"stream": True, "stream_options": {"include_use": True}}, "stream_options.include_use"),
    ({"structured_outputs": {"regex": "a+", "jsn": {}}}, "structured_outputs.jsn"),
    ({"repetition_detection": {"max_pattern_size": 5, "min_pattern": 1}}, "repetition_detection.min_pattern"),
    ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "x": 1}}},
        "response_format.json_schema.x",
    ),
]
OF_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}]}, "tools.cache_control"),
    ({"tools": [{**TOOL, "function": {**TOOL["function"], "args": 1}}]}, "tools.function.args"),  # type: ignore[dict-item]
]


def served(client: Any, engine: Any, text_in: TextIn, **settings: Any) -> Any:
    return type(client)(make_app(engine, ServerSettings(text_in=text_in, served_model_names=("tiny",), **settings)))


class TestUnknownFields:
    @pytest.mark.parametrize(("fields", "name"), [*NESTED, *OF_TOOLS])
    def test_header_names_them(self, client: Any, fields: Any, name: str) -> None:
        for ask in (client.chat, client.complete) if "tools" not in fields else (client.chat,):
            response = ask(**fields)
            assert (response.status_code, response.headers[HEADER]) == (200, name), response.text

    @pytest.mark.parametrize(("fields", "name"), [*NESTED, *OF_TOOLS])
    def test_policy_refuse(self, client: Any, engine: Any, text_in: TextIn, fields: Any, name: str) -> None:
        client = served(client, engine, text_in, unknown_fields="refuse")
        response = client.chat(**fields)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "unknown_parameter")
        assert error["param"].replace("[0]", "") == name and f"unknown field '{error['param']}'" in error["message"]
        assert HEADER not in response.headers

    def test_policy_refuse_suggests_a_name(self, client: Any, engine: Any, text_in: TextIn) -> None:
        client = served(client, engine, text_in, unknown_fields="refuse")
        for fields, near in (
            ({"temprature": 1}, "; did you mean temperature?"),
            ({"structured_outputs": {"jsn": {}}}, "; did you mean structured_outputs.json?"),
            ({"\ud800": 1}, "unknown field '\\ud800'"),
        ):
            body = json.dumps({"prompt": "x", **fields}).encode()
            response = client.post("/v1/completions", content=body)
            assert response.status_code == 400 and near in response.json()["error"]["message"]

    def test_null_is_absent_everywhere(self, client: Any, engine: Any, text_in: TextIn) -> None:
        client = served(client, engine, text_in, unknown_fields="refuse")
        nulls = {"x": None, "functions": None, "audio": None}
        tool = {**TOOL, "x": None, "function": {**TOOL["function"], "strict": None, "y": None}}  # type: ignore[dict-item]
        message = {"role": "user", "content": "hello", "annotations": None, "audio": None, "function_call": None}
        formats = {"response_format": {"type": "json_object", "json_schema": None, "schema": None}}
        response = client.chat(messages=[message], tools=[tool], **nulls, **formats)
        assert response.status_code == 200, response.text

    def test_one_warning_per_name(self, client: Any, caplog: pytest.LogCaptureFixture) -> None:
        for _ in range(3):
            client.complete(temprature=1, colour=2)
            client.chat(tools=[{**TOOL, "colour": 1}, {**TOOL, "function": {"name": "g"}, "colour": 1}])
        texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert texts == [
            "unknown request field ignored; did you mean temperature? field=temprature",
            "unknown request field ignored field=colour",
            "unknown request field ignored field=tools.colour",
        ]

    def test_small_routes(self, client: Any) -> None:
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
            response = client.post(path, {**body, "colour": 1})
            assert (response.status_code, response.headers[HEADER]) == (200, "colour")

    def test_hints_for_fields_of_other_servers_are_not_by_letters(self, client: Any, caplog: Any) -> None:
        assert client.complete(cache_prompt=True).headers[HEADER] == "cache_prompt"
        assert "unknown request field ignored; equal prefixes are always reused field=cache_prompt" in caplog.text
        assert not {name for name in WITHOUT_EFFECT if "did you mean" in suggest(name, bodies.SAMPLING_FIELDS)}
        assert not {name for name in UNSUPPORTED if "did you mean" in suggest(name, UNSUPPORTED)}

    def test_streams_have_the_header(self, client: Any) -> None:
        assert client.chat(stream=True, cache_prompt=True).headers[HEADER] == "cache_prompt"

    def test_ignored_fields_of_tools_do_not_reach_the_template(self, client: Any, engine: Any) -> None:
        engine.max_model_len = 2000
        client.chat(tools=[TOOL])
        client.chat(tools=[{**TOOL, "cache_control": {"type": "ephemeral"}, "x": None}])
        assert engine.added[0].prompt == engine.added[1].prompt


ASKING = {"guided_whitespace_pattern": " *", "truncate_prompt_tokens": 5, "kv_transfer_params": {"do": 1}, "echo": True}
NEUTRAL_ONES = {"truncate_prompt_tokens": -1, "n_predict": -1, "repeat_penalty": 1.0, "include_reasoning": True}


class TestFieldsThatWouldChangeTheAnswer:
    @pytest.mark.parametrize("kind", [bodies.CompletionBody, bodies.ChatBody])
    def test_each_is_refused_by_the_routes_without_it(self, client: Any, kind: Any) -> None:
        ask = client.chat if kind is bodies.ChatBody else client.complete
        for name in {text: name for name, text in UNSUPPORTED.items()}.values():
            if name not in (*kind.__struct_fields__, *bodies.SAMPLING_FIELDS):
                value = ASKING.get(name, ["x"])
                error = ask(**{name: value}).json()["error"]
                said = f"{name} is not supported: {UNSUPPORTED[name]}"
                assert (error["param"], error["code"], error["message"]) == (name, "unsupported", said)

    def test_values_that_ask_for_nothing(self, client: Any) -> None:
        nothing = {name: value for name in UNSUPPORTED if name not in ASKED_BY_FALSE for value in (None, False)}
        values = nothing | NEUTRAL_ONES | {"modalities": ["text"], "function_call": "auto"}
        known = (*bodies.ChatBody.__struct_fields__, *bodies.SAMPLING_FIELDS)
        response = client.chat(**{name: value for name, value in values.items() if name not in known})
        assert response.status_code == 200 and HEADER not in response.headers, response.text

    @pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
    def test_all_routes_of_answers(self, client: Any, engine: Any, path: str) -> None:
        plain = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
        body = {"input": "x"} if path == "/v1/responses" else plain
        for name, value in (("kv_transfer_params", {"do_remote_decode": True}), ("enable_thinking", False)):
            error = client.post(path, {**body, name: value}).json()["error"]
            assert f"{name} is not supported: " in error["message"]
        assert client.post(path, {**body, "regex": "a+", "skip_reading_prefix_cache": True}).status_code == 200
        params = engine.added[-1].params
        assert params.structured_outputs.regex == "a+" and params.skip_reading_prefix_cache

    def test_members_of_structured_outputs(self, client: Any) -> None:
        error = client.chat(structured_outputs={"json": {}, "whitespace_pattern": " "}).json()["error"]
        assert error["param"] == "structured_outputs.whitespace_pattern" and error["code"] == "unsupported"


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


class TestConstraintsOfOtherServers:
    @pytest.mark.parametrize(
        ("name", "kind", "value"),
        [
            *[
                (name, "json", given)
                for name in ("guided_json", "json_schema")
                for given in (SCHEMA, json.dumps(SCHEMA))
            ],
            *[(name, "regex", "[ab]+") for name in ("guided_regex", "regex")],
            ("guided_choice", "choice", ["yes", "no"]),
            *[(name, "grammar", 'root ::= "a"') for name in ("guided_grammar", "ebnf", "grammar")],
        ],
    )
    def test_aliases(self, client: Any, engine: Any, name: str, kind: str, value: Any) -> None:
        for ask in (client.chat, client.complete):
            assert ask(**{name: value}).status_code == 200
            found = getattr(engine.added[-1].params.structured_outputs, kind)
            assert (json.loads(found) == SCHEMA) if kind == "json" else found == value
            for other in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "x"}}):
                error = ask(**{name: value}, **other).json()["error"]
                assert error["message"] == f"{next(iter(other))} and {name} cannot be combined"
        error = client.chat(**{name: 7}).json()["error"]
        assert error["message"].startswith(f"{name} must be a ") and error["param"] == name

    def test_two_of_them(self, client: Any) -> None:
        error = client.chat(regex="a", ebnf='root ::= "a"').json()["error"]
        assert error["message"] == "ebnf and regex cannot be combined"


class TestTokenIds:
    """vLLM's ``return_token_ids``: of the prompt once, and of each choice, also of the token that ends it."""

    def test_chat(self, client: Any, engine: Any, events: Any) -> None:
        fields = {"return_token_ids": True, "n": 2, "logprobs": True}
        whole = client.chat(**fields).json()
        prompt = engine.added[-1].prompt
        assert whole["prompt_token_ids"] == prompt
        assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]
        for choice in whole["choices"]:
            assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        chunks = events(client.chat(**fields, stream=True))[:-1]
        assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt, *[None] * (len(chunks) - 1)]
        for choice in whole["choices"]:
            of_choice = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
            assert [token for each in of_choice for token in each["token_ids"]] == choice["token_ids"]
        assert b"token_ids" not in client.chat().content + client.complete().content

    def test_completions(self, client: Any, events: Any) -> None:
        prompts = [[5, 6, 7], [8, 9]]
        fields = {"prompt": prompts, "return_token_ids": True, "n": 2}
        whole = client.complete(**fields).json()["choices"]
        assert [choice["prompt_token_ids"] for choice in whole] == [prompts[0]] * 2 + [prompts[1]] * 2
        chunks = [event["choices"][0] for event in events(client.complete(**fields, stream=True))[:-1]]
        for choice in whole:
            of_choice = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
            assert [chunk.get("prompt_token_ids") for chunk in of_choice][:2] == [choice["prompt_token_ids"], None]
            assert [token for each in of_choice for token in each["token_ids"]] == choice["token_ids"] != []

    def test_other_routes_refuse(self, client: Any) -> None:
        error = client.post("/v1/responses", {"input": "x", "return_token_ids": True}).json()["error"]
        assert error["message"].startswith("return_token_ids is not supported: use /v1/chat/completions")


class TestRequestId:
    def test_the_clients_id_is_taken_over(self, client: Any, engine: Any) -> None:
        ids = set()
        for stream in (False, True, False):
            body = {"messages": [{"role": "user", "content": "x"}], "stream": stream}
            response = client.post("/v1/chat/completions", body, headers={"X-Request-Id": "trace-7/a"})
            assert response.headers.get_list("x-request-id") == ["trace-7/a"]
            ids.add(engine.added[-1].request_id)
        assert len(ids) == 3 and all(each.startswith("chatcmpl-trace-7/a-") for each in ids)

    @pytest.mark.parametrize(("path", "status"), [("/nothing", 404), ("/v1/models", 200), ("/health", 200)])
    def test_every_response_has_it(self, client: Any, path: str, status: int) -> None:
        response = client.get(path, headers={"x-request-id": "abc"})
        assert (response.status_code, response.headers["x-request-id"]) == (status, "abc")

    def test_refusals_have_it(self, client: Any, engine: Any, text_in: TextIn) -> None:
        client = served(client, engine, text_in, api_keys=("secret",))
        response = client.get("/v1/models", headers={"x-request-id": "abc"})
        assert (response.status_code, response.headers["x-request-id"]) == (401, "abc")
        assert response.headers["www-authenticate"] == "Bearer"

    @pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é", 'a"b', "a,b"])
    def test_an_unusable_id_is_replaced(self, client: Any, given: str) -> None:
        response = client.post("/v1/completions", {"prompt": "x"}, headers=[(b"x-request-id", given.encode())])
        assert response.headers["x-request-id"] == response.json()["id"]


DEFAULTS = {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.5, "max_tokens": 3}


class TestSamplingDefaults:
    def test_fields_that_are_left_out(self, client: Any, engine: Any, text_in: TextIn) -> None:
        client = served(client, engine, text_in, sampling_defaults=DEFAULTS)
        client.chat()
        params = engine.added[-1].params
        assert {name: getattr(params, name) for name in DEFAULTS} == DEFAULTS
        client.chat(temperature=0, top_k=-1, max_completion_tokens=4, repetition_penalty=None)
        params = engine.added[-1].params
        assert (params.temperature, params.top_k, params.max_tokens, params.repetition_penalty) == (0, -1, 4, 1.5)

    def test_completions_keep_their_default_of_16_tokens(self, client: Any, engine: Any, text_in: TextIn) -> None:
        client = served(client, engine, text_in, sampling_defaults=DEFAULTS)
        client.complete()
        assert (engine.added[-1].params.max_tokens, engine.added[-1].params.temperature) == (16, 0.5)

    def test_default_max_tokens_fits_in_the_context(self, client: Any, engine: Any, text_in: TextIn) -> None:
        client = served(client, engine, text_in, sampling_defaults={"max_tokens": 100_000})
        assert client.chat().status_code == 200
        assert engine.added[-1].params.max_tokens < 256


class TestTemplateVariables:
    SOURCE = "[{{ reasoning_effort }}|{{ enable_thinking }}|{{ thinking }}]"

    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({}, "[||]"),
            ({"reasoning_effort": None}, "[||]"),
            ({"reasoning_effort": "high"}, "[high|True|True]"),
            ({"reasoning_effort": "none"}, "[none|False|False]"),
            ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "[low|False|True]"),
            ({"chat_template_kwargs": {"reasoning_effort": "x"}}, "[x||]"),
        ],
    )
    def test_effort_reaches_the_template(
        self, client: Any, engine: Any, tokenizer: Any, fields: dict[str, Any], text: str
    ) -> None:
        own = TextIn(tokenizer, ChatTemplate(self.SOURCE, {}, "test"))
        client = served(client, engine, own)
        assert client.chat(**fields).status_code == 200
        assert tokenizer.decode(engine.added[-1].prompt) == text
        messages = [{"role": "user", "content": "x"}]
        assert client.post("/tokenize", {"messages": messages, **fields}).json()["tokens"] == engine.added[-1].prompt


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


TOOLS = [tool(name) for name in "abc"]


class TestAllowedTools:
    def test_auto_shows_only_these(self) -> None:
        assert parse_tools(TOOLS, allowed("auto", "c", "a"), parallel=True) == ([tool("c"), tool("a")], None)

    def test_required_shows_all_and_allows_these(self) -> None:
        tools, use = parse_tools(TOOLS, allowed("required", "b", "b"), parallel=True)
        assert tools == TOOLS and use is not None and use.function is None
        schema = json.loads(str(use.constraint.json))
        assert [each["properties"]["name"]["enum"] for each in schema["items"]["anyOf"]] == [["b"]]

    @pytest.mark.parametrize(
        ("choice", "says"),
        [
            (allowed("auto"), "must have mode"),
            (allowed("none", "a"), "must have mode"),
            ({"type": "allowed_tools"}, "must have mode"),
            ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [7]}}, "must name one of tools"),
            (allowed("auto", "a", "d"), "tools[1] must name one of tools (got 'd')"),
        ],
    )
    def test_refusals(self, choice: Any, says: str) -> None:
        with pytest.raises(InvalidRequest) as refused:
            parse_tools(TOOLS, choice, parallel=True)
        assert says in refused.value.message and str(refused.value.param).startswith("tool_choice.allowed_tools")


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
@pytest.mark.parametrize("name", ["schema", "value"])
def test_schema_in_the_form_of_other_servers(client: Any, engine: Any, kind: str, name: str) -> None:
    """llama.cpp names it ``schema``; TGI, and therefore Hugging Face's client, ``value``."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert client.chat(response_format={"type": kind, name: schema}).status_code == 200
    assert json.loads(engine.added[-1].params.structured_outputs.json) == schema


def test_special_tokens_of_a_raw_prompt(client: Any, engine: Any, text_in: TextIn, monkeypatch: Any) -> None:
    seen: list[bool] = []
    encode = text_in.encode

    def watched(text: str, *, add_special_tokens: bool = True, **more: Any) -> list[int]:
        seen.append(add_special_tokens)
        return encode(text, add_special_tokens=add_special_tokens, **more)

    monkeypatch.setattr(text_in, "encode", watched)
    client.complete()
    client.complete(add_special_tokens=False)
    assert seen == [True, False]
