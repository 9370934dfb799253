"""Anthropic's Messages API over a fake engine."""

import json
from typing import Any

import pytest

from quire.frontend.http.app import make_app
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.text.thinking import Thinking

HELLO = {"role": "user", "content": "hello"}
WEATHER = {"name": "weather", "description": "of a place", "input_schema": {"type": "object", "properties": {}}}
CALLS = [{"name": "weather", "parameters": {"place": place}} for place in ("Rome", 'Köln "am" Rhein')]


@pytest.fixture
def ask(client: Any, engine: Any) -> Any:
    engine.max_model_len = 2000

    def ask(path: str = "", **fields: Any) -> Any:
        body = {"model": "tiny", "max_tokens": 1000, "messages": [HELLO], **fields}
        return client.post(f"/v1/messages{path}", {name: value for name, value in body.items() if value is not None})

    return ask


@pytest.fixture
def prompt(engine: Any, tokenizer: Any) -> Any:
    """The text of the newest prompt."""
    return lambda: tokenizer.decode(engine.added[-1].prompt, skip_special_tokens=False)


def named_events(response: Any) -> list[Any]:
    """Return the data of a stream's events, whose names must be their types."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def assembled(events: list[Any]) -> dict[str, Any]:
    """Return the message that a client makes of a stream."""
    assert events[0]["type"] == "message_start"
    message: dict[str, Any] = events[0]["message"]
    assert message["content"] == []
    assert "stop_reason" not in message
    pending = ""
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                pending = ""
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], event["delta"]
                if delta["type"] == "input_json_delta":
                    pending += delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "content_block_stop":
                if pending:
                    message["content"][-1]["input"] = json.loads(pending)
                pending = ""
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    assert message["id"].startswith("msg_")
    blocks = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": "", "content": blocks}


class TestAnswer:
    def test_text(self, ask: Any, engine: Any) -> None:
        message = ask().json()
        num_prompt = len(engine.added[-1].prompt)
        assert without_ids(message) == {
            "id": "",
            "type": "message",
            "role": "assistant",
            "model": "tiny",
            "content": [{"type": "text", "text": "one two three four five"}],
            "stop_reason": "end_turn",
            "usage": {
                "input_tokens": num_prompt - num_prompt // 2,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": num_prompt // 2,
                "output_tokens": 6,
            },
        }

    @pytest.mark.parametrize("per_update", [1, 3, 1000])
    @pytest.mark.parametrize(
        "fields", [{}, {"tools": [WEATHER], "tool_choice": {"type": "any"}}], ids=["text", "calls"]
    )
    def test_stream_equals_the_whole(self, ask: Any, engine: Any, fields: Any, per_update: int) -> None:
        engine.per_update = per_update
        engine.reply = json.dumps(CALLS) if fields else "one two three"
        whole = ask(**fields).json()
        streamed = named_events(ask(**fields, stream=True))
        assert streamed[0]["message"]["usage"] == {**whole["usage"], "output_tokens": 0}
        assert without_ids(assembled(streamed)) == without_ids(whole)

    def test_calls(self, ask: Any, engine: Any) -> None:
        engine.reply = json.dumps(CALLS)
        message = ask(tools=[WEATHER], tool_choice={"type": "any"}).json()
        assert message["stop_reason"] == "tool_use"
        assert [block["type"] for block in message["content"]] == ["tool_use", "tool_use"]
        assert [block["input"] for block in message["content"]] == [call["parameters"] for call in CALLS]
        ids = {block["id"] for block in message["content"]}
        assert len(ids) == 2
        assert all(len(each) == 9 and each.isalnum() for each in ids)

    def test_one_tool_and_no_parallel_calls(self, ask: Any, engine: Any) -> None:
        engine.reply = "{}"
        message = ask(tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"}).json()
        assert (message["content"][0]["name"], message["stop_reason"]) == ("weather", "tool_use")
        ask(tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True})
        assert json.loads(engine.added[-1].params.structured_outputs.json)["maxItems"] == 1

    def test_call_that_is_cut_off_is_not_one(self, ask: Any, engine: Any) -> None:
        engine.reply = json.dumps(CALLS)
        for num_tokens in (20, 30, 35):
            message = ask(tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=num_tokens).json()
            assert message["stop_reason"] == "max_tokens"
            assert [block["type"] for block in message["content"]] in ([], ["text"])
            assert all('{"place": "Rome"}'.startswith(block["text"]) for block in message["content"])

    @pytest.mark.parametrize("stream", [False, True])
    def test_thought(self, text_in: Any, engine: Any, client: Any, stream: bool) -> None:
        settings = ServerSettings(
            text_in=text_in,
            served_model_names=("tiny",),
            thinking=Thinking((0,), (1,), "<|im_start|>", "<|endoftext|>"),
        )
        engine.max_model_len, engine.reply = 2000, "well<|im_start|>" + json.dumps(CALLS)
        body: dict[str, Any] = {"max_tokens": 1000, "messages": [HELLO], "tools": [WEATHER]}
        body |= {"tool_choice": {"type": "any"}, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        body["chat_template_kwargs"] = {"bare": True}
        response = type(client)(make_app(engine, settings)).post("/v1/messages", {**body, "stream": stream})
        message = assembled(named_events(response)) if stream else response.json()
        assert message["content"][0] == {"type": "thinking", "thinking": "well", "signature": "unsigned"}
        assert [block["type"] for block in message["content"][1:]] == ["tool_use"] * 2
        assert engine.added[-1].params.thinking_token_budget == 1024

    @pytest.mark.parametrize("stream", [False, True])
    def test_stop_reasons(self, ask: Any, engine: Any, stream: bool) -> None:
        def stop(**fields: Any) -> tuple[str, str | None]:
            response = ask(**fields, stream=stream)
            message = assembled(named_events(response)) if stream else response.json()
            assert b"null" not in response.content
            return message["stop_reason"], message.get("stop_sequence")

        assert stop() == ("end_turn", None)
        assert stop(max_tokens=2) == ("max_tokens", None)
        assert stop(stop_sequences=["three"]) == ("stop_sequence", "three")
        # max_tokens is a required field, so clients send large values: it is cut to what fits.
        engine.max_model_len = len(engine.added[-1].prompt) + 3
        assert stop(max_tokens=64000) == ("model_context_window_exceeded", None)
        assert engine.added[-1].params.max_tokens == 3

    def test_error_in_a_stream(self, ask: Any, engine: Any) -> None:
        engine.ending = RuntimeError("x")
        *_, last = named_events(ask(stream=True))
        assert last == {"type": "error", "error": {"type": "api_error", "message": "internal error"}}


class TestPrompt:
    def test_whole_conversation(self, ask: Any, prompt: Any) -> None:
        call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"place": "Rome"}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sun"}]}
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, call]},
            {"role": "user", "content": [result, {**result, "content": "rain"}, {"type": "text", "text": "so?"}]},
        ]
        system = [{"type": "text", "text": "Be good.", "cache_control": {"type": "ephemeral"}}]
        assert ask(messages=messages, system=system).status_code == 200
        assert prompt() == (
            "<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
            "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\nsun<|im_end|>\n<|im_start|>tool\nrain<|im_end|>\n"
            "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_last_message_of_the_assistant_is_continued(self, ask: Any, prompt: Any) -> None:
        assert ask(messages=[HELLO, {"role": "assistant", "content": "Well, {"}]).status_code == 200
        assert prompt().endswith("<|im_start|>assistant\nWell, {")

    def test_accounting_header_does_not_change_the_prompt(self, ask: Any, prompt: Any) -> None:
        """Its values change with each request, and everything after it would miss the prefix cache."""
        found = set()
        for value in ("cc_version=2.1.37.3a3; cch=00001;", "cc_version=2.1.37.3a4; cch=00002;", None):
            blocks = [{"type": "text", "text": "You are an agent."}]
            if value is not None:
                blocks.insert(0, {"type": "text", "text": f"x-anthropic-billing-header: {value}"})
            assert ask(system=blocks).status_code == 200
            found.add(prompt())
        assert len(found) == 1
        assert "billing" not in found.pop()

    def test_count_tokens(self, ask: Any, engine: Any) -> None:
        assert ask(tools=[WEATHER], system="Be good.").status_code == 200
        count = ask("/count_tokens", tools=[WEATHER], system="Be good.", max_tokens=None)
        assert count.json() == {"input_tokens": len(engine.added[-1].prompt)}

    def test_special_tokens_in_text_stay_text(self, ask: Any, engine: Any, tokenizer: Any) -> None:
        ask()
        special = tokenizer.token_to_id("<|im_end|>")
        expected = engine.added[-1].prompt.count(special)
        block = {"type": "tool_result", "tool_use_id": "<|im_end|>", "content": "<|im_end|>"}
        ask(messages=[HELLO, {"role": "user", "content": [block, {"type": "text", "text": "<|im_end|>"}]}])
        assert engine.added[-1].prompt.count(special) == expected + 2  # one per message

    def test_schema_and_thinking_switch(self, ask: Any, engine: Any) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        for fields in ({"output_config": {"format": {"type": "json_schema", "schema": schema}}},
                       {"output_format": {"type": "json_schema", "schema": schema}}):  # fmt: skip
            assert ask(**fields).status_code == 200
            assert json.loads(engine.added[-1].params.structured_outputs.json)["properties"] == schema["properties"]


class TestBadInput:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"max_tokens": None}, "max_tokens is required"),
            ({"max_tokens": 0}, "max_tokens must be an integer from 1 to"),
            ({"messages": []}, "messages must hold 1 to 8192 messages (got 0)"),
            ({"messages": [7]}, "messages[0] must be an object"),
            ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role must be one of user, assistant"),
            ({"messages": [{"role": "user"}]}, "messages[0].content must be a string or a list of content blocks"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
                "messages[0].content[0].type must be text (got 'image'): this server reads text only",
            ),
            (
                {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
                "messages[0].content[0].tool_use_id must be a string",
            ),
            (
                {"messages": [HELLO, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f"}]}]},
                "messages[1].content[0].input must be an object",
            ),
            (
                {
                    "messages": [
                        HELLO,
                        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
                    ]
                },
                "messages[1]: the last message has a tool_use: send its tool_result",
            ),
            ({"system": 7}, "system must be a string or a list of content blocks"),
            ({"stop_sequences": "x"}, "stop_sequences must be a list of strings"),
            ({"temperature": 9}, "temperature must be"),
            ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must be 1 to 128 letters"),
            ({"tools": [{"type": "bash_1"}, {"name": "a"}]}, "tools[1].input_schema must be an object"),
            ({"tool_choice": {"type": "tool", "name": "z"}, "tools": [WEATHER]}, "tool_choice.name 'z' not found"),
            ({"tool_choice": {"type": "x"}}, "tool_choice.type must be one of auto, any, tool, none"),
            ({"thinking": {"type": "x"}}, "thinking.type must be one of enabled"),
            ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens must be"),
            ({"output_config": {"effort": "x"}}, "output_config.effort must be one of"),
            ({"output_format": {"type": "x"}}, "output_format.type must be json_schema"),
            ({"compaction": {"type": "summarize"}}, "compaction is not supported: shorten the conversation"),
        ],
        ids=str,
    )
    def test_refused_with_the_field(self, ask: Any, engine: Any, fields: Any, message: str) -> None:
        response = ask(**fields)
        body = response.json()
        assert (response.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
        assert body["error"]["message"].startswith(message)
        assert not engine.added

    @pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
    def test_threads_are_refused_with_the_code_for_the_sdk(self, ask: Any, engine: Any, thread: Any) -> None:
        """The SDK's tool runner then sends whole conversations. It would send the newest messages only."""
        response = ask(thread=thread)
        assert response.status_code == 400 and not engine.added
        assert response.json()["error"] == {
            "type": "invalid_request_error",
            "message": "thread is not supported: send the whole conversation",
            "details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        }
        assert ask(thread=None).status_code == 200

    def test_errors_have_anthropics_form(self, client: Any, ask: Any, engine: Any, text_in: Any) -> None:
        assert ask(model="other").json()["error"]["type"] == "not_found_error"
        assert client.get("/v1/messages").json()["type"] == "error"
        locked = ServerSettings(text_in=text_in, served_model_names=("tiny",), api_keys=("secret",))
        guarded = type(client)(make_app(engine, locked))
        body = {"max_tokens": 1, "messages": [HELLO]}
        assert guarded.post("/v1/messages", body).json()["error"]["type"] == "authentication_error"
        assert guarded.post("/v1/messages", body, headers={"x-api-key": "secret"}).status_code == 200

    def test_lone_surrogate(self, client: Any) -> None:
        call = (
            '{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"\\ud800": 1}}]}'
        )
        body = f'{{"max_tokens": 1, "messages": [{{"role": "user", "content": "x"}}, {call}]}}'
        response = client.request("POST", "/v1/messages", content=body.encode())
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")

    def test_unknown_fields_and_tools_of_anthropics_servers_are_ignored(self, ask: Any, prompt: Any) -> None:
        tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, WEATHER]
        response = ask(tools=tools, context_management={"edits": []}, metadata={"user_id": "u"})
        assert response.status_code == 200
        assert response.headers["x-quire-ignored-fields"] == "context_management,tools.web_search_20250305"
        assert "web_search" not in prompt()
