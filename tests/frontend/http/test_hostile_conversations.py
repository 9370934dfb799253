"""Conversations that are broken, cut off, too long or of another client, in chat, Messages and Responses."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine
from front_end import FrontEnd

MESSAGE = {"role": "user", "content": "hello"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [MESSAGE]},
    "/v1/messages": {"messages": [MESSAGE], "max_tokens": 2000},
    "/v1/responses": {"input": [MESSAGE]},
}
CONVERSATIONS = {
    "/v1/chat/completions": "messages",
    "/tokenize": "messages",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/v1/responses": "input",
    "/v1/responses/input_tokens": "input",
    "/v1/responses/compact": "input",
}
"""The field of each path that has the conversation."""
KEYS = ("mine", "theirs")


@pytest.mark.parametrize("arguments", ['{"a": ', "", "nothing", "[1]", '"\\ud800"'])
def test_a_broken_call_may_be_sent_back(client: Any, engine: Any, arguments: str) -> None:
    engine.max_model_len = 4000
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": arguments}
    assert client.post("/v1/responses", {"input": [MESSAGE, call, MESSAGE]}).status_code == 200
    calls = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}]
    assert client.chat(messages=[MESSAGE, {"role": "assistant", "tool_calls": calls}, MESSAGE]).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_cut_stream_aborts_its_request(engine: Any, connect: Any, finish: Any, path: str) -> None:
    engine.max_model_len, engine.hang_after = 4000, 2
    cut = connect(path, {**BODIES[path], "stream": True})
    engine.on_hang = cut.gone.set
    finish(cut.run())
    assert engine.added[-1].aborted
    events = b"".join(message.get("body", b"") for message in cut.sent)
    assert b"[DONE]" not in events and b"response.completed" not in events and b"message_stop" not in events


def test_response_of_a_cut_stream_is_not_stored(engine: Any, connect: Any, finish: Any, client: Any) -> None:
    engine.max_model_len, engine.hang_after = 4000, 2
    cut = connect("/v1/responses", {"input": "hello", "stream": True})
    engine.on_hang = cut.gone.set
    finish(cut.run())
    first = cut.sent[1]["body"].split(b"\n")[1].removeprefix(b"data: ")
    response_id = json.loads(first)["response"]["id"]
    assert client.get(f"/v1/responses/{response_id}").status_code == 404


@pytest.mark.parametrize("path", CONVERSATIONS)
def test_conversation_of_10000_items(client: Any, engine: Any, path: str) -> None:
    name = CONVERSATIONS[path]
    body = {name: [MESSAGE] * 10_000, "model": "tiny"}
    answer = client.post(path, body | ({"max_tokens": 5} if path == "/v1/messages" else {}))
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(name) and "(got 10000)" in message
    assert engine.added == []


@pytest.fixture(scope="module")
def keyed(tokenizer: Any, text_in: Any) -> Iterator[FrontEnd]:
    engine: Any = FakeEngine(tokenizer, reply="one two", max_model_len=4000)
    settings = {"text_in": text_in, "allowed_origins": ("https://page.example",)}
    front_end = FrontEnd(engine, keys=KEYS, settings=settings)
    yield front_end
    front_end.close()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class TestResponseOfAnotherKey:
    @pytest.mark.parametrize("own", ["an id of another key", "an id that never was"])
    def test_it_is_not_found(self, keyed: FrontEnd, own: str) -> None:
        stored = keyed.client.post("/v1/responses", json={"input": "hello"}, headers=bearer("mine")).json()
        response_id = stored["id"] if own == "an id of another key" else "resp_unknown"
        item_id = stored["output"][0]["id"] if own == "an id of another key" else "msg_unknown"
        theirs = bearer("theirs")
        path = f"/v1/responses/{response_id}"
        reference = {"type": "item_reference", "id": item_id}
        answers = [
            keyed.client.get(path, headers=theirs),
            keyed.client.get(f"{path}/input_items", headers=theirs),
            keyed.client.delete(path, headers=theirs),
            keyed.client.post("/v1/responses", json={"input": [reference]}, headers=theirs),
        ]
        for create in ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"):
            body = {"model": "endless", "input": "x", "previous_response_id": response_id}
            answers.append(keyed.client.post(create, json=body, headers=theirs))
        assert [answer.status_code for answer in answers] == [404] * len(answers)
        messages = {answer.json()["error"]["message"].replace(response_id, "") for answer in answers}
        assert all("not found" in message for message in messages)
        # The owner still has it.
        assert keyed.client.get(f"/v1/responses/{stored['id']}", headers=bearer("mine")).status_code == 200
