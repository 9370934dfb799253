"""Answers that clients send back in the next turn, as each of them writes the message."""

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.message_checks import check_messages
from quire.protocol.errors import InvalidRequest

USER = {"role": "user", "content": "hello"}
TOOL = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
}
CALL = {"id": "call_3520", "function": {"arguments": '{"zone": "UTC"}', "name": "clock"}, "type": "function"}
AS_TEMPLATES_READ_IT = {
    "id": "call_3520",
    "type": "function",
    "function": {"name": "clock", "arguments": {"zone": "UTC"}},
}

# The message of the first answer, recorded from the newest release of each client on 22 November 2026.
PLAIN = {
    "openai model_dump()": {
        "content": "hi",
        "refusal": None,
        "role": "assistant",
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    },
    "litellm model_dump()": {
        "content": "hi",
        "role": "assistant",
        "tool_calls": None,
        "function_call": None,
        "provider_specific_fields": {"refusal": None},
        "refusal": None,
    },
    "vLLM's answer": {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [],
        "reasoning": None,
        "reasoning_content": None,
    },
    "a hosted answer": {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [{"type": "url_citation"}],
        "thinking_blocks": [{"type": "thinking", "thinking": "..."}],
        "cache_control": {"type": "ephemeral"},
        "id": "msg_1",
        "index": 0,
        "images": [],
    },
    "text parts": {"role": "assistant", "content": [{"type": "text", "text": "hi", "cache_control": {}}]},
}
CALLING = {
    "openai model_dump()": {**PLAIN["openai model_dump()"], "content": None, "tool_calls": [CALL]},
    "litellm model_dump()": {**PLAIN["litellm model_dump()"], "content": None, "tool_calls": [CALL]},
    "langchain": {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "id": "call_3520", "function": CALL["function"]}],
    },
    "a streamed call, collected": {
        "role": "assistant",
        "content": "",
        "tool_calls": [{**CALL, "index": 0, "extra_content": None}],
    },
}
RESULTS = [
    {"role": "tool", "tool_call_id": "call_3520", "content": "12:00"},
    {"role": "tool", "tool_call_id": "call_3520", "name": "clock", "content": [{"type": "text", "text": "12:00"}]},
    {"role": "tool", "tool_call_id": "call_3520", "content": "12:00", "is_error": False, "cache_control": None},
]


@pytest.mark.parametrize("client_name", PLAIN)
def test_plain_answers(client: Any, engine: Any, client_name: str) -> None:
    messages = [USER, PLAIN[client_name], USER]
    assert client.chat(messages=messages).status_code == 200
    assert client.chat(messages=[USER, {"role": "assistant", "content": "hi"}, USER]).status_code == 200
    assert engine.added[0].prompt == engine.added[1].prompt


@pytest.mark.parametrize("result", RESULTS, ids=["plain", "parts", "vendor fields"])
@pytest.mark.parametrize("client_name", CALLING)
def test_answers_with_calls(client: Any, engine: Any, client_name: str, result: dict[str, Any]) -> None:
    engine.max_model_len = 2000
    messages = [USER, CALLING[client_name], result]
    assert client.chat(messages=messages, tools=[TOOL]).status_code == 200
    _, answer, given = check_messages(messages)
    content = CALLING[client_name]["content"]
    assert answer == {"role": "assistant", "content": content, "tool_calls": [AS_TEMPLATES_READ_IT]}
    assert given == {"role": "tool", "content": "12:00", "tool_call_id": "call_3520", "name": "clock"}


@pytest.mark.parametrize("choice", ["required", None])
def test_openai_sends_our_own_answer_back(client: Any, engine: Any, choice: str | None) -> None:
    engine.max_model_len, engine.reply = 2000, json.dumps([{"name": "clock", "parameters": {"zone": "UTC"}}])
    first = client.chat(tools=[TOOL], tool_choice=choice)
    message = ChatCompletion.model_validate(first.json()).choices[0].message
    calls = message.tool_calls or []
    assert len(calls) == (1 if choice else 0)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12:00"} for call in calls]
    for sent in (message.model_dump(), message.model_dump(exclude_unset=True), first.json()["choices"][0]["message"]):
        response = client.chat(messages=[USER, sent, *results, USER], tools=[TOOL])
        assert response.status_code == 200, response.text


DEMANDING = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first or m.role == 'developer' %}"
    "{{ raise_exception('roles') }}{% endif %}{% for c in m.tool_calls or [] %}"
    "{{ raise_exception('ids') if c.id | length != 9 }}{{ c.id }}{{ c.function.name }}{% endfor %}"
    "{{ 'nothing' if m.content is none else m.content }}{{ m.tool_call_id }}{{ m.name }};{% endfor %}"
)
"""Only one system message, and ids of nine letters or digits."""


def test_second_turns_are_the_same_prompt_on_each_route(
    client: Any, engine: Any, text_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.max_model_len, engine.reply = 2000, json.dumps([{"name": "clock", "parameters": {"zone": "UTC"}}])
    monkeypatch.setattr(text_in, "template", ChatTemplate(DEMANDING, {}, "test"))
    schema = TOOL["function"]["parameters"]
    flat = {"type": "function", "name": "clock", "parameters": schema}
    named = [{"name": "clock", "input_schema": schema}]
    chat = client.chat(tools=[TOOL], tool_choice="required").json()["choices"][0]["message"]
    anthropic = {"messages": [USER], "tools": named, "max_tokens": 900}
    block = client.post("/v1/messages", {**anthropic, "tool_choice": {"type": "any"}}).json()["content"][0]
    item = client.post("/v1/responses", {"input": "hello", "tools": [flat], "tool_choice": "required"}).json()["output"]
    ids = [chat["tool_calls"][0]["id"], block["id"], item[0]["call_id"]]
    assert len(set(ids)) == 3 and all(len(each) == 9 and each.isalnum() for each in ids)
    engine.added.clear()
    for call_id in (ids[0], "call_of_another_server"):
        chat["tool_calls"][0]["id"] = block["id"] = item[0]["call_id"] = call_id
        result = {"role": "tool", "tool_call_id": call_id, "content": "12:00"}
        messages = [{"role": "system", "content": "S"}, USER, chat, result, {"role": "developer", "content": "D"}]
        assert client.chat(messages=messages, tools=[TOOL]).status_code == 200
        user = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": "12:00"}]}
        turns = [USER, {"role": "assistant", "content": [block]}, user, {"role": "system", "content": "D"}]
        assert client.post("/v1/messages", {**anthropic, "system": "S", "messages": turns}).status_code == 200
        output = {"type": "function_call_output", "call_id": call_id, "output": "12:00"}
        items = [USER, item[0], output, {"role": "developer", "content": "D"}]
        body = {"input": items, "tools": [flat], "instructions": "S"}
        assert client.post("/v1/responses", body).status_code == 200
    prompts = [text_in.decode(added.prompt) for added in engine.added]
    assert set(prompts[:3]) == {f"S\n\nD;hello;{ids[0]}clocknothing;12:00{ids[0]}clock;"}
    assert len(set(prompts[3:])) == 1 and "call_of" not in prompts[3]


class TestReasoning:
    """Templates read the reasoning of an earlier answer under different names."""

    @pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
    def test_names(self, name: str) -> None:
        (answer, _) = check_messages([{"role": "assistant", "content": "x", name: "well"}, USER])
        named = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "well")
        assert answer == {"role": "assistant", "content": "x", **named}

    def test_a_call_with_content_has_no_thinking_field(self) -> None:
        """The template of gpt-oss raises an exception for it."""
        given = {"role": "assistant", "reasoning": "well", "tool_calls": [CALL]}
        assert "thinking" in check_messages([USER, {**given, "content": None}])[1]
        assert "thinking" not in check_messages([USER, {**given, "content": "x"}])[1]

    @pytest.mark.parametrize("value", [None, "", {"effort": "low"}, []])
    def test_other_values_of_reasoning_are_ignored(self, value: Any) -> None:
        assert check_messages([{"role": "assistant", "content": "x", "reasoning": value}, USER])[0] == {
            "role": "assistant",
            "content": "x",
        }

    def test_of_other_roles_is_ignored(self) -> None:
        assert check_messages([{**USER, "reasoning": "x", "reasoning_content": "y"}]) == [USER]


@pytest.mark.parametrize(
    ("message", "param", "says"),
    [
        ({"role": "function", "name": "f", "content": "x"}, "role", "use tool"),
        ({"role": "assistant", "content": None, "function_call": {"name": "f"}}, "function_call", "use tool_calls"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "audio", "reads text only"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "tool_calls[0].type", "must be function"),
        ({"role": "assistant", "tool_calls": [{**CALL, "function": {}}]}, "tool_calls[0].function.name", "non-empty"),
    ],
)
def test_what_would_be_lost_is_refused(message: Any, param: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_messages([USER, message])
    assert refused.value.param == f"messages[1].{param}" and says in refused.value.message
