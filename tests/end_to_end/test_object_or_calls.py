"""A schema and tools in one request: the model calls a tool, and then answers with an object, through each API.

The script decides between the two. What follows is given by the schemas, because the tokens that a grammar forces are
not those of the script.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from conversations import call, temperature
from script_checkpoint import make_script_checkpoint
from served import Served

pytestmark = pytest.mark.full

QUESTION = "How warm is it?"
OBJECT = {"city": "<tool_call>Rome", "degrees": 21}
SCHEMA = {
    "type": "object",
    "properties": {key: {"const": value} for key, value in OBJECT.items()},
    "required": ["city", "degrees"],
}
ARGUMENTS = {"city": "Rome"}
PARAMETERS = {"type": "object", "properties": {"city": {"const": "Rome"}}, "required": ["city"]}
FUNCTION = {"name": "temperature", "parameters": PARAMETERS}
ANSWERS = [
    "<think>\nRome: {first}.\n</think>\n\n" + call("temperature", ARGUMENTS),
    f"<think>\nNow the object.\n</think>\n\n{json.dumps(OBJECT)}",
    "It is warm.",
]
THOUGHTS = ["Rome: {first}.", "Now the object."]
Answer = tuple[str, str, list[tuple[str, str]]]
"""Thoughts, content, and calls by their ids."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("script")
    make_script_checkpoint(folder, ANSWERS)
    served = Served(str(folder), "--reasoning-start-str", "<think>", "--reasoning-end-str", "</think>")
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client
    served.end()


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream, or the response as the only one."""
    response = client.post(path, json=body | {"temperature": 0})
    assert response.status_code == 200, response.text
    if not body["stream"]:
        return [response.json()]
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat(client: httpx.Client, turns: list[Answer], *, stream: bool, **fields: Any) -> Answer:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _, content, calls in turns:
        made = [
            {"id": i, "type": "function", "function": {"name": "temperature", "arguments": text}} for i, text in calls
        ]
        messages.append({"role": "assistant", "content": content, "tool_calls": made})
        messages += [{"role": "tool", "tool_call_id": i, "content": temperature("Rome")} for i, _ in calls]
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    body = {"messages": messages, "tools": [{"type": "function", "function": FUNCTION}], "response_format": form}
    body |= {"parallel_tool_calls": False, "max_tokens": 300}
    events = post(client, "/v1/chat/completions", body | {"stream": stream} | fields)
    parts = [event["choices"][0].get("delta" if stream else "message") for event in events]
    calls: dict[int, tuple[str, str]] = {}
    for i, each in enumerate(each for part in parts for each in part.get("tool_calls") or []):
        number = each.get("index", i)
        name, text = calls.get(number, (each.get("id", ""), ""))
        calls[number] = (name, text + each["function"]["arguments"])
    reason = events[-1]["choices"][0]["finish_reason"]
    assert reason == ("tool_calls" if calls else "stop")
    texts = ["".join(part.get(key) or "" for part in parts) for key in ("reasoning", "content")]
    return texts[0], texts[1], list(calls.values())


def responses(client: httpx.Client, turns: list[Answer], *, stream: bool, **fields: Any) -> Answer:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for _, _, calls in turns:
        for i, text in calls:
            items.append({"type": "function_call", "call_id": i, "name": "temperature", "arguments": text})
            items.append({"type": "function_call_output", "call_id": i, "output": temperature("Rome")})
    form = {"format": {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}}
    body = {"input": items, "tools": [{"type": "function", **FUNCTION}], "text": form, "stream": stream}
    body |= {"parallel_tool_calls": False, "max_output_tokens": 300}
    events = post(client, "/v1/responses", body | fields)
    output = (events[-1]["response"] if stream else events[0])["output"]
    kinds = {
        kind: [item for item in output if item["type"] == kind] for kind in ("reasoning", "message", "function_call")
    }
    thoughts = "".join(part["text"] for item in kinds["reasoning"] for part in item["content"])
    content = "".join(part["text"] for item in kinds["message"] for part in item["content"])
    if stream:
        assert content == "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    return thoughts, content, [(item["call_id"], item["arguments"]) for item in kinds["function_call"]]


def messages(client: httpx.Client, turns: list[Answer], *, stream: bool, **fields: Any) -> Answer:
    asked: list[Any] = [{"role": "user", "content": QUESTION}]
    for _, _, calls in turns:
        used = [{"type": "tool_use", "id": i, "name": "temperature", "input": json.loads(text)} for i, text in calls]
        asked.append({"role": "assistant", "content": used})
        results = [{"type": "tool_result", "tool_use_id": i, "content": temperature("Rome")} for i, _ in calls]
        asked.append({"role": "user", "content": results})
    tool = {"name": "temperature", "input_schema": PARAMETERS}
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    body = {"model": "", "messages": asked, "tools": [tool], "output_config": config, "max_tokens": 500}
    body |= {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "stream": stream, **fields}
    body["model"] = client.get("/v1/models").json()["data"][0]["id"]
    events = post(client, "/v1/messages", body)
    if not stream:
        blocks = events[0]["content"]
    else:
        blocks = [event["content_block"] | {"json": ""} for event in events if event["type"] == "content_block_start"]
        for event in (event for event in events if event["type"] == "content_block_delta"):
            delta = event["delta"]
            for key, target in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                blocks[event["index"]][target] = blocks[event["index"]].get(target, "") + delta.get(key, "")
        blocks = [block | {"input": json.loads(block["json"] or "{}")} for block in blocks]
    found = {kind: [b for b in blocks if b["type"] == kind] for kind in ("thinking", "text", "tool_use")}
    thoughts, content = ("".join(block[kind] for block in found[kind]) for kind in ("thinking", "text"))
    return thoughts, content, [(block["id"], json.dumps(block["input"])) for block in found["tool_use"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", [chat, responses, messages])
def test_a_call_and_then_an_object(client: httpx.Client, api: Any, stream: bool) -> None:
    first = api(client, [], stream=stream)
    thoughts, content, calls = first
    assert (thoughts, content) == (THOUGHTS[0], "") and [json.loads(text) for _, text in calls] == [ARGUMENTS]
    thoughts, content, calls = api(client, [first], stream=stream)
    assert (thoughts, json.loads(content), calls) == (THOUGHTS[1], OBJECT, [])


def test_other_text_is_impossible(client: httpx.Client) -> None:
    turns = [chat(client, [], stream=False), ("", json.dumps(OBJECT), [])]
    assert chat(client, turns, stream=False, response_format=None)[1] == ANSWERS[2]
    _, content, calls = chat(client, turns, stream=False)
    assert [json.loads(text) for _, text in calls] == [ARGUMENTS] or json.loads(content) == OBJECT


def test_calls_may_be_ruled_out(client: httpx.Client) -> None:
    _, content, calls = chat(client, [], stream=False, tool_choice="none")
    assert json.loads(content) == OBJECT and not calls


def test_a_schema_of_a_tool_that_cannot_be_used_is_refused(client: httpx.Client) -> None:
    broken = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}}
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [{"type": "function", "function": broken}],
        "response_format": {"type": "json_object"},
    }
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400 and "JSON schema of response_format or of a tool" in response.text
    assert client.get("/health").status_code == 200
