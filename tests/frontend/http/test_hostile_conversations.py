"""Conversations that are broken, cut off, too long or of another client, in chat, Messages and Responses."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine
from front_end import FrontEnd, post, status_of

from quire.frontend.http.app import make_app
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.text.parsing.choose_format import choose_format

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
OPEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome' + " and Rome" * 200


def texts(value: Any) -> str:
    """Return all text that a client shows, in the order of the response."""
    if isinstance(value, list):
        return "".join(map(texts, value))
    if not isinstance(value, dict):
        return ""
    shown = value.get("text") if value.get("type") in ("text", "output_text") else value.get("content")
    if isinstance(shown, str):
        return shown
    return "".join(texts(value.get(name)) for name in ("choices", "message", "content", "output"))


class TestCallThatNeverCloses:
    @pytest.fixture
    def ask(self, engine: Any, text_in: Any, client: Any) -> Any:
        form = choose_format(text_in.special_tokens, "<tool_call>", None)
        settings = ServerSettings(text_in=text_in, served_model_names=("tiny",), answer_format=form)
        engine.max_model_len, engine.reply, engine.per_update = 8000, OPEN_CALL, 10
        return type(client)(make_app(engine, settings)).post

    @pytest.mark.parametrize("path", BODIES)
    def test_it_comes_back_as_text(self, ask: Any, path: str) -> None:
        schema = {"type": "object", "properties": {"place": {"type": "string"}}}
        function = {"name": "weather", "parameters": schema}
        tool = {
            "/v1/chat/completions": {"type": "function", "function": function},
            "/v1/messages": {"name": "weather", "input_schema": schema},
            "/v1/responses": {"type": "function", **function},
        }[path]
        answer = ask(path, {**BODIES[path], "tools": [tool]})
        assert (answer.status_code, texts(answer.json())) == (200, OPEN_CALL)
        streamed = ask(path, {**BODIES[path], "tools": [tool], "stream": True})
        assert streamed.status_code == 200
        assert json.dumps(" and Rome" * 200)[1:-1] in streamed.text  # the text follows what was sent as a call
        assert '"status":"failed"' not in streamed.text

    @pytest.mark.parametrize("arguments", ['{"a": ', "", "nothing", "[1]", '"\\ud800"'])
    def test_it_may_be_sent_back(self, ask: Any, arguments: str) -> None:
        call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": arguments}
        assert ask("/v1/responses", {"input": [MESSAGE, call, MESSAGE]}).status_code == 200
        calls = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}]
        messages = [MESSAGE, {"role": "assistant", "tool_calls": calls}, MESSAGE]
        assert ask("/v1/chat/completions", {"messages": messages}).status_code == 200


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


class TestOtherOrigins:
    @pytest.mark.parametrize("path", [*CONVERSATIONS])
    def test_foreign_page(self, keyed: FrontEnd, path: str) -> None:
        """A page that has stolen a key is refused all the same."""
        before = len(keyed.engine.added)
        headers = ("authorization: Bearer mine", "origin: https://evil.example", "connection: close")
        body = json.dumps({CONVERSATIONS[path]: [MESSAGE], "max_tokens": 5}).encode()
        assert status_of(keyed.ask(post(path, body, "content-type: application/json", *headers))) == 403
        assert len(keyed.engine.added) == before

    @pytest.mark.parametrize("path", BODIES)
    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
    def test_body_that_browsers_send_without_asking(self, keyed: FrontEnd, path: str, kind: str) -> None:
        headers = ["authorization: Bearer mine", "origin: https://page.example", "connection: close"]
        headers += [f"content-type: {kind}"] if kind else []
        assert status_of(keyed.ask(post(path, json.dumps(BODIES[path]).encode(), *headers))) == 415


@pytest.mark.parametrize("path", BODIES)
def test_cut_body_reaches_no_handler(keyed: FrontEnd, path: str) -> None:
    before = len(keyed.engine.added)
    body = json.dumps(BODIES[path]).encode()
    with keyed.connect(post(path, body[:-5], "authorization: Bearer mine", length=len(body))):
        keyed.until(lambda: keyed.num_connections >= 1)
    keyed.until(lambda: keyed.num_connections == 0)
    assert len(keyed.engine.added) == before
