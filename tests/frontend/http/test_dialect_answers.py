"""Thoughts and calls that the model chooses to write, in Messages and Responses."""

import json
from typing import Any

import pytest

from quire.frontend.http.app import make_app
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.text.parsing.choose_format import choose_format
from tests.frontend.http.test_messages import WEATHER as ANTHROPIC_TOOL
from tests.frontend.http.test_messages import assembled as message_of
from tests.frontend.http.test_messages import named_events as message_events
from tests.frontend.http.test_responses import PATCH, REMOTE, assembled, named_events
from tests.frontend.http.test_responses import WEATHER as OPENAI_TOOL

SAID = [
    ("weather", {"place": 'Köln "am" Rhein'}),
    ("patch", {"input": '*** "a"\n+b'}),
    ("mcp__git__log", {}),
]


OFFERED = [{**ANTHROPIC_TOOL, "name": name} for name, _ in SAID]


def written(calls: list[tuple[str, Any]]) -> str:
    texts = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


ANSWER = f"<think>\nwell\n</think>\n\nI look.\n{written(SAID)}"
BROKEN = 'See <tool_call>\n{"name": "weather", "arguments": {"place": Rome}}\n</tool_call> there.'


@pytest.fixture
def ask(engine: Any, text_in: Any, client: Any) -> Any:
    form = choose_format(text_in.special_tokens, "<tool_call>", None, markers=("<think>", "</think>"))
    settings = ServerSettings(text_in=text_in, served_model_names=("tiny",), answer_format=form)
    app = make_app(engine, settings)
    engine.max_model_len = 4000
    return type(client)(app).post


def message(ask: Any, *, stream: bool, **fields: Any) -> Any:
    body = {"max_tokens": 2000, "messages": [{"role": "user", "content": "hello"}], "tools": OFFERED}
    response = ask("/v1/messages", {**body, "stream": stream, **fields})
    return message_of(message_events(response)) if stream else response.json()


def response(ask: Any, *, stream: bool, **fields: Any) -> Any:
    body = {"input": "hello", "tools": [OPENAI_TOOL, PATCH, REMOTE], "stream": stream, **fields}
    answer = ask("/v1/responses", body)
    return assembled(named_events(answer)) if stream else answer.json()


@pytest.mark.parametrize("per_update", [1, 3, 1000])
@pytest.mark.parametrize("stream", [False, True])
class TestChosenCalls:
    def test_messages(self, ask: Any, engine: Any, stream: bool, per_update: int) -> None:
        engine.reply, engine.per_update = ANSWER, per_update
        answer = message(ask, stream=stream)
        thought, text, *calls = answer["content"]
        assert (thought["type"], thought["thinking"], text["text"]) == ("thinking", "well", "I look.")
        assert [(call["name"], call["input"]) for call in calls] == SAID
        assert answer["stop_reason"] == "tool_use"

    def test_responses(self, ask: Any, engine: Any, stream: bool, per_update: int) -> None:
        engine.reply, engine.per_update = ANSWER, per_update
        answer = response(ask, stream=stream)
        thought, text, function, custom, remote = answer["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "well"}]
        assert text["content"][0]["text"] == "I look."
        assert json.loads(function["arguments"]) == SAID[0][1]
        assert (custom["type"], custom["input"]) == ("custom_tool_call", SAID[1][1]["input"])
        assert (remote["namespace"], remote["name"], remote["arguments"]) == ("mcp__git__", "log", "{}")

    def test_first_call_ends_an_answer_without_parallel_calls(
        self, ask: Any, engine: Any, stream: bool, per_update: int
    ) -> None:
        engine.reply, engine.per_update = ANSWER, per_update
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        blocks = message(ask, stream=stream, tool_choice=choice)["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
        items = response(ask, stream=stream, parallel_tool_calls=False)["output"]
        assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]

    def test_malformed_call_comes_back_as_text(self, ask: Any, engine: Any, stream: bool, per_update: int) -> None:
        engine.reply, engine.per_update = BROKEN, per_update
        output = response(ask, stream=stream)["output"]
        response_text = "".join(
            part["text"] for item in output if item["type"] == "message" for part in item["content"]
        )
        assert "Rome}}" in response_text
        begun = [item["status"] for item in output if item["type"] == "function_call"]
        assert begun == (["incomplete"] if stream and per_update < 1000 else [])
        if stream and per_update < 1000:
            # The beginning of a call was sent, whose input is not complete.
            body = {"max_tokens": 2000, "messages": [{"role": "user", "content": "hello"}], "tools": [ANTHROPIC_TOOL]}
            events = message_events(ask("/v1/messages", {**body, "stream": True}))
            text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
            stop = events[-2]["delta"]["stop_reason"]
        else:
            answer = message(ask, stream=stream)
            text = "".join(block["text"] for block in answer["content"])
            stop = answer["stop_reason"]
        assert ("Rome}}" in text, stop) == (True, "end_turn")


def test_stop_sequences_act_on_the_answer(ask: Any, engine: Any) -> None:
    engine.reply = "<think>a STOP b</think>yes STOP no"
    answer = message(ask, stream=False, stop_sequences=["STOP"])
    assert [block.get("thinking", block.get("text")) for block in answer["content"]] == ["a STOP b", "yes "]
    assert answer["stop_reason"] == "stop_sequence"


def test_second_turn_with_the_unchanged_answer(ask: Any, engine: Any, tokenizer: Any) -> None:
    engine.reply = ANSWER
    first = message(ask, stream=False)
    calls = [block for block in first["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "sun"} for call in calls]
    turns = [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
    engine.reply = "Sunny."
    fields = {"messages": [{"role": "user", "content": "hello"}, *turns]}
    assert message(ask, stream=False, **fields)["content"][0]["text"] == "Sunny."
    by_messages = tokenizer.decode(engine.added[-1].prompt, skip_special_tokens=False)
    engine.reply = ANSWER
    items = response(ask, stream=False)["output"]
    outputs = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "sun"}
        for item in items
        if "call_id" in item
    ]
    engine.reply = "Sunny."
    second = response(ask, stream=False, input=[{"role": "user", "content": "hello"}, *items, *outputs])
    assert second["output"][0]["content"][0]["text"] == "Sunny."
    by_responses = tokenizer.decode(engine.added[-1].prompt, skip_special_tokens=False)
    # Both APIs give the model the same conversation; only the tools differ here.
    assert by_messages.split("<|im_start|>user", 1)[1] == by_responses.split("<|im_start|>user", 1)[1]
