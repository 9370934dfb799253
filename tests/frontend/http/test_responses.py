"""OpenAI's Responses API over a fake engine."""

import base64
import json
from typing import Any

import pytest

from quire.frontend.http.app import make_app
from quire.frontend.http.dialects.responses_input import chat_messages
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.text.thinking import Thinking

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}
PATCH = {"type": "custom", "name": "patch", "description": "Apply it."}
LARK = {**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}}
REGEX = {**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": "a|b"}}
REMOTE = {"type": "namespace", "name": "mcp__git__", "description": "", "tools": [{"type": "function", "name": "log"}]}
CALLS = [
    {"name": "weather", "parameters": {"place": "Köln"}},
    {"name": "patch", "parameters": {"input": '*** "a"\n+b'}},
    {"name": "mcp__git__log", "parameters": {}},
]
REQUIRED_FIELDS = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text"),
    *("top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "user"),
    *("usage", "max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata"),
    *("safety_identifier", "prompt_cache_key"),
}
"""What the specification of Open Responses requires of a response, null or not."""
REQUIRED = {"tools": [WEATHER, PATCH, REMOTE], "tool_choice": "required"}


@pytest.fixture
def ask(client: Any, engine: Any) -> Any:
    engine.max_model_len = 4000

    def ask(path: str = "", **fields: Any) -> Any:
        return client.post(f"/v1/responses{path}", {"model": "tiny", "input": "hello", **fields})

    return ask


@pytest.fixture
def prompt(engine: Any, tokenizer: Any) -> Any:
    """The text of the newest prompt."""
    return lambda: tokenizer.decode(engine.added[-1].prompt, skip_special_tokens=False)


def named_events(response: Any) -> list[Any]:
    """Return a stream's events, whose names must be their types and whose numbers must count up."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, end, rest = response.text.split("\n\n")
    assert rest == ""
    if "response.failed" in end:
        blocks.append(end)
    else:
        assert end == "data: [DONE]"
    found = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event.pop("sequence_number") == number
        found.append(event)
    return found


TEXT_OF = {
    "response.output_text": "text",
    "response.reasoning_text": "text",
    "response.function_call_arguments": "arguments",
    "response.custom_tool_call_input": "input",
}


def assembled(events: list[Any]) -> dict[str, Any]:
    """Check each event against those before it; return the final response."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress"
    items: list[Any] = []
    text = ""
    for event in events[2:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            assert event["item"].get("status", "in_progress") == "in_progress"
            items.append(event["item"])
            text = ""
            continue
        assert event["output_index"] == len(items) - 1
        if kind == "response.output_item.done":
            assert event["item"]["id"] == items[-1]["id"]
            items[-1] = event["item"]
            continue
        assert event["item_id"] == items[-1]["id"]
        if kind.endswith(".delta"):
            text += event["delta"]
        elif kind.removesuffix(".done") in TEXT_OF:
            assert event[TEXT_OF[kind.removesuffix(".done")]] == text
        else:
            assert kind in ("response.content_part.added", "response.content_part.done")
            assert event["part"]["text"] == text
    response: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    assert response["output"] == items
    return response


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    assert response["id"].startswith("resp_")
    items = [{**item, "id": "", **({"call_id": ""} if "call_id" in item else {})} for item in response["output"]]
    times = {"created_at": 0, "completed_at": 0}
    return {**response, "id": "", "output": items, **times}


def call_ids(response: dict[str, Any]) -> list[str]:
    return [item["call_id"] for item in response["output"]]


class TestAnswer:
    def test_text(self, ask: Any, engine: Any) -> None:
        response = ask(metadata={"a": "b"}, instructions="Be good.").json()
        num_prompt = len(engine.added[-1].prompt)
        (item,) = response["output"]
        assert item["id"].startswith("msg_")
        assert {**item, "id": ""} == {
            "id": "",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "one two three four five", "annotations": [], "logprobs": []}],
        }
        assert response["usage"] == {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": num_prompt // 2, "cache_write_tokens": 0},
            "output_tokens": 6,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + 6,
        }
        assert response.keys() >= REQUIRED_FIELDS
        for name, value in (("object", "response"), ("status", "completed"), ("error", None), ("store", True)):
            assert response[name] == value
        assert (response["metadata"], response["instructions"]) == ({"a": "b"}, "Be good.")

    @pytest.mark.parametrize("per_update", [1, 3, 1000])
    @pytest.mark.parametrize("fields", [{}, REQUIRED], ids=["text", "calls"])
    def test_stream_equals_the_whole(self, ask: Any, engine: Any, fields: Any, per_update: int) -> None:
        engine.per_update = per_update
        engine.reply = json.dumps(CALLS) if fields else "one two three"
        whole = ask(**fields).json()
        streamed = named_events(ask(**fields, stream=True))
        assert without_ids(assembled(streamed)) == without_ids(whole)

    def test_calls(self, ask: Any, engine: Any) -> None:
        engine.reply = json.dumps(CALLS)
        function, custom, remote = ask(**REQUIRED).json()["output"]
        assert (function["type"], function["name"]) == ("function_call", "weather")
        assert json.loads(function["arguments"]) == {"place": "Köln"}
        assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", '*** "a"\n+b')
        assert (remote["name"], remote["namespace"], remote["arguments"]) == ("log", "mcp__git__", "{}")

    @pytest.mark.parametrize("name", ["weather", "patch"])
    def test_one_tool(self, ask: Any, engine: Any, name: str) -> None:
        kind = "custom" if name == "patch" else "function"
        engine.reply = json.dumps({"input": "x"})
        choice = {"type": kind, "name": name}
        (item,) = ask(tools=[WEATHER, PATCH], tool_choice=choice).json()["output"]
        assert item["name"] == name
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [choice]}
        ask(tools=[WEATHER, PATCH], tool_choice=allowed)
        assert [each["properties"]["name"]["enum"] for each in
                json.loads(engine.added[-1].params.structured_outputs.json)["items"]["anyOf"]] == [[name]]  # fmt: skip

    @pytest.mark.parametrize("stream", [False, True])
    def test_grammar_of_a_named_custom_tool(self, ask: Any, engine: Any, stream: bool) -> None:
        """The model writes the text itself, which may look like JSON."""
        engine.reply = '{"input": "raw"}'
        choice = {"type": "custom", "name": "patch"}
        answer = ask(tools=[WEATHER, LARK], tool_choice=choice, stream=stream)
        (item,) = (assembled(named_events(answer)) if stream else answer.json())["output"]
        assert (item["type"], item["input"]) == ("custom_tool_call", engine.reply)
        assert engine.added[-1].params.structured_outputs.grammar == "start: /x/"
        assert "x-quire-ignored-fields" not in answer.headers

    @pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "patch"}])
    def test_regular_expression_of_a_custom_tool(self, ask: Any, engine: Any, choice: Any) -> None:
        engine.reply = "[]" if choice == "required" else '{"input": "a"}'
        assert ask(tools=[WEATHER, REGEX], tool_choice=choice).status_code == 200
        assert '"pattern":"^(?:a|b)$"' in engine.added[-1].params.structured_outputs.json

    @pytest.mark.parametrize(
        ("tool", "choice", "param"),
        [
            (LARK, "required", "tools[1].format.definition"),
            ({**LARK, "format": {**LARK["format"], "definition": ""}}, {"type": "custom", "name": "patch"}, None),
            ({**LARK, "format": {**LARK["format"], "definition": 5}}, "auto", "tools[1].format.definition"),
            ({**LARK, "format": {"type": "grammar", "syntax": "bnf"}}, "auto", "tools[1].format"),
            ({**PATCH, "format": 5}, "auto", "tools[1].format"),
        ],
    )
    def test_grammar_that_cannot_be_enforced(self, ask: Any, tool: Any, choice: Any, param: str | None) -> None:
        answer = ask(tools=[WEATHER, tool], tool_choice=choice)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == (param or "tools[1].format.definition")

    @pytest.mark.parametrize("stream", [False, True])
    def test_thought(self, text_in: Any, engine: Any, client: Any, prompt: Any, stream: bool) -> None:
        settings = ServerSettings(
            text_in=text_in,
            served_model_names=("tiny",),
            thinking=Thinking((0,), (1,), "<|im_start|>", "<|endoftext|>"),
        )
        engine.max_model_len, engine.reply = 4000, "well, ok<|im_start|>" + json.dumps(CALLS)
        body = {"input": "hello", **REQUIRED, "thinking_token_budget": 99, "chat_template_kwargs": {"bare": True}}
        body["include"] = ["reasoning.encrypted_content"]
        response = type(client)(make_app(engine, settings)).post("/v1/responses", {**body, "stream": stream})
        whole = assembled(named_events(response)) if stream else response.json()
        thought = whole["output"][0]
        assert (thought["type"], thought["summary"]) == ("reasoning", [])
        assert thought["content"] == [{"type": "reasoning_text", "text": "well, ok"}]
        assert len(whole["output"]) == 4
        assert 1 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] < 12

    def test_cut_off(self, ask: Any, engine: Any) -> None:
        for stream in (False, True):
            response = ask(max_output_tokens=2, stream=stream)
            whole = assembled(named_events(response)) if stream else response.json()
            assert (whole["status"], whole["output"][0]["status"]) == ("incomplete", "incomplete")
            assert whole["incomplete_details"] == {"reason": "max_output_tokens"}

    def test_log_probabilities(self, ask: Any) -> None:
        include = ["message.output_text.logprobs"]
        (item,) = ask(include=include, top_logprobs=2).json()["output"]
        (part,) = item["content"]
        assert "".join(each["token"] for each in part["logprobs"]) == part["text"]
        assert len(part["logprobs"][0]["top_logprobs"]) == 2
        (item,) = assembled(named_events(ask(include=include, top_logprobs=2, stream=True)))["output"]
        assert item["content"] == [part]

    def test_structured_text(self, ask: Any, engine: Any) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
        assert ask(text={"format": form, "verbosity": "low"}).json()["text"] == {"format": form, "verbosity": "low"}
        assert json.loads(engine.added[-1].params.structured_outputs.json)["properties"] == schema["properties"]

    def test_error_in_a_stream(self, ask: Any, engine: Any) -> None:
        engine.ending = RuntimeError("x")
        *_, error, failed = named_events(ask(stream=True))
        assert (error["type"], error["message"]) == ("error", "internal error")
        assert failed["response"]["error"] == {"code": "internal_error", "message": "internal error"}


class TestPrompt:
    def test_whole_conversation(self, ask: Any, prompt: Any) -> None:
        items = [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"role": "user", "content": "weather?"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
            {"role": "developer", "content": "Go on."},
        ]
        assert ask(input=items, instructions="Be good.").status_code == 200
        assert prompt() == (
            "<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\nweather?<|im_end|>\n"
            "<|im_start|>assistant\nI look.<|im_end|>\n<|im_start|>tool\nsun<|im_end|>\n"
            "<|im_start|>tool\ndone<|im_end|>\n"
            "<|im_start|>system\nGo on.<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_items_of_one_answer_are_one_message(self) -> None:
        call = {"type": "function_call", "call_id": "c", "name": "log", "namespace": "mcp__git__", "arguments": "{}"}
        sealed = "quire-thought:" + base64.b64encode(b"hm").decode()
        thoughts = [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": sealed},
        ]
        for thought in thoughts:
            messages = chat_messages("", [thought, {"role": "assistant", "content": "I look."}, call, thought, call])
            assert [message["reasoning_content"] for message in messages] == ["hm", "hm"]
            assert [message["content"] for message in messages] == ["I look.", None]
            names = [each["function"]["name"] for message in messages for each in message["tool_calls"]]
            assert names == ["mcp__git__log"] * 2
        foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAAB"}
        assert chat_messages("", [foreign, {"role": "user", "content": "x"}]) == [{"role": "user", "content": "x"}]

    def test_custom_tools_and_namespaces_are_functions(self, ask: Any, prompt: Any) -> None:
        response = ask(tools=[LARK, REMOTE, {"type": "web_search"}])
        assert response.headers["x-quire-ignored-fields"] == "tools.web_search,tools.format"
        assert '"description": "Apply it.\\n\\nThe input must match this lark grammar:\\nstart: /x/"' in prompt()
        assert '"name": "mcp__git__log"' in prompt()

    def test_count_tokens(self, ask: Any, engine: Any) -> None:
        ask(instructions="Be good.", tools=[WEATHER])
        count = ask("/input_tokens", instructions="Be good.", tools=[WEATHER]).json()
        assert count == {"object": "response.input_tokens", "input_tokens": len(engine.added[-1].prompt)}


class TestStored:
    def test_conversation_continues(self, ask: Any, engine: Any, prompt: Any) -> None:
        engine.reply = json.dumps(CALLS)
        first = ask(**REQUIRED, instructions="Be good.").json()
        engine.reply = "fine"
        results = [
            {"type": f"{kind}_output", "call_id": each, "output": "sun"}
            for kind, each in zip(("function_call", "custom_tool_call", "function_call"), call_ids(first), strict=True)
        ]
        second = ask(previous_response_id=first["id"], input=results).json()
        assert second["previous_response_id"] == first["id"]
        third = ask(previous_response_id=second["id"], input="so?")
        assert third.status_code == 200
        tool = "<|im_start|>tool\nsun<|im_end|>\n"
        # Instructions are those of the request alone.
        assert prompt() == (
            f"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n{tool * 3}"
            "<|im_start|>assistant\nfine<|im_end|>\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_get_list_delete(self, ask: Any, client: Any) -> None:
        response = ask(input=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], stream=True)
        whole = assembled(named_events(response))
        path = f"/v1/responses/{whole['id']}"
        assert client.get(path).json() == whole
        listed = client.get(f"{path}/input_items").json()
        assert [item["content"][0]["text"] for item in listed["data"]] == ["b", "a"]
        assert client.request("DELETE", path).json() == {"id": whole["id"], "object": "response", "deleted": True}
        for method, at in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items")):
            assert client.request(method, at).status_code == 404
        refused = ask(previous_response_id=whole["id"])
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "previous_response_id")
        assert refused.json()["error"]["code"] == "previous_response_not_found"

    def test_reference_to_an_item(self, ask: Any, prompt: Any) -> None:
        item_id = ask().json()["output"][0]["id"]
        for reference in ({"type": "item_reference", "id": item_id}, {"id": item_id}):
            assert ask(input=[{"role": "user", "content": "a"}, reference]).status_code == 200
            assert "<|im_start|>assistant\none two three four five<|im_end|>" in prompt()
        refused = ask(input=[{"type": "item_reference", "id": "msg_1"}])
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "input[0].id")

    def test_not_stored(self, ask: Any, client: Any) -> None:
        response = ask(store=False).json()
        assert response["store"] is False
        assert client.get(f"/v1/responses/{response['id']}").status_code == 404

    def test_server_that_stores_nothing(self, client: Any, engine: Any, text_in: Any) -> None:
        settings = ServerSettings(text_in=text_in, served_model_names=("tiny",), max_stored_response_bytes=0)
        stateless = type(client)(make_app(engine, settings))
        response = stateless.post("/v1/responses", {"input": "hello", "store": True}).json()
        assert response["store"] is False
        refused = stateless.post("/v1/responses", {"input": "x", "previous_response_id": response["id"]})
        assert refused.status_code == 404
        assert "stores no responses" in refused.json()["error"]["message"]


class TestBadInput:
    @pytest.mark.parametrize("text", ['"\\ud800"', '[{"role": "user", "content": "x", "\\ud800": 1}]'])
    def test_lone_surrogate(self, client: Any, text: str) -> None:
        response = client.request("POST", "/v1/responses", content=f'{{"input": {text}}}'.encode())
        assert response.status_code == 400

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"input": None}, "input is required"),
            ({"input": 7}, "input must be a list"),
            ({"input": [7]}, "input[0] must be an object"),
            ({"input": [{"role": "x", "content": ""}]}, "input[0].role must be one of user"),
            ({"input": [{"role": "user"}]}, "input[0].content is required"),
            ({"input": [{"type": "computer_call"}]}, "input[0].type must be message, reasoning"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type must be"),
            ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input[0].call_id must be a string"),
            ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments must be"),
            ({"input": [{"type": "function_call_output", "output": ""}]}, "input[0].call_id must be a string"),
            ({"input": [{"role": "user", "content": "x"}] * 10_000}, "input must hold at most 8192 items (got 10000)"),
            ({"input": "hello " * 10_000}, "This model's maximum context length is 4000 tokens"),
            ({"instructions": 7}, "instructions must be a string"),
            ({"max_output_tokens": 0}, "max_output_tokens must be an integer from 1 to"),
            ({"temperature": 9}, "temperature must be"),
            ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name must be 1 to 128 letters"),
            ({"tools": [{"type": "custom", "name": "a", "format": {"type": "x"}}]}, "tools[0].format must be text"),
            ({"tools": [{"name": "x"}]}, "tools[0].type must be function, custom or namespace"),
            (
                {"tools": [{"type": "web_search"}, WEATHER, {**REMOTE, "tools": [WEATHER, WEATHER]}]},
                "duplicate function name mcp__git__weather in tools",
            ),
            ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "z"}}, "tool_choice.name 'z' not found"),
            ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice.type must be function, custom"),
            ({"tool_choice": "required"}, "tool_choice requires tools"),
            ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema is required"),
            ({"text": {"format": {"type": "x"}}}, "text.format.type must be one of text"),
            ({"reasoning": {"effort": "x"}}, "reasoning.effort must be one of"),
            ({"conversation": "conv_1"}, "conversation is not supported: use previous_response_id"),
            ({"truncation": "x"}, "truncation must be auto or disabled"),
            ({"truncation": "auto", "input": "hello " * 10_000}, "This model's maximum context length is 4000"),
            ({"top_logprobs": 99}, "top_logprobs must be an integer from 0 to 20"),
        ],
        ids=lambda value: str(value)[:60],
    )
    def test_refused_with_the_field(self, ask: Any, engine: Any, fields: Any, message: str) -> None:
        response = ask(**fields)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["message"].startswith(message)
        assert error["param"].split(".")[0].split("[")[0] in fields
        assert not engine.added
