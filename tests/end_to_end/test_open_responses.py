"""The cases of Open Responses (specification of 2026-04-24), against ``quire serve`` with a script checkpoint.

The specification's own runner is a program for another language. Here each of its 17 cases is a test of its own.
"""

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from open_responses import (
    CallItem,
    Compaction,
    CompactionItem,
    Completed,
    Error,
    Event,
    MessageItem,
    Response,
    read_events,
    read_response,
)
from script_checkpoint import make_script_checkpoint
from served import Served
from web_sockets import SocketClient

pytestmark = pytest.mark.full

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Bonn"}}\n</tool_call>'
SCRIPTS = {
    "Summarise this conversation": ["", "They launch on Tuesday; support hears of it first."],
    "weather": [CALL],
    "code word": ["Understood.", "It is cobalt."],
    "only the number": ["", "The saved number is 4."],
    "What is my name": ["", "You are Alice."],
    "Count": ["1, 2, 3, 4 and 5"],
    "": ["Hello to you, captain!", "As was said before."],
}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather at a place",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("script")
    make_script_checkpoint(folder, SCRIPTS)
    served = Served(str(folder), "--tool-call-parser", "hermes", "--served-model-name", "script")
    yield served
    served.end()


@pytest.fixture
def post(server: Served) -> Callable[..., httpx.Response]:
    def post(path: str = "", **fields: Any) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/responses{path}", json=fields, timeout=60)

    return post


@pytest.fixture
def respond(post: Callable[..., httpx.Response]) -> Callable[..., Response]:
    """Return a function for the response to a request, which must be complete."""

    def respond(**fields: Any) -> Response:
        answer = post(model="script", temperature=0, **fields)
        assert answer.status_code == 200, answer.text
        response = read_response(answer.json())
        assert (response.status, bool(response.output)) == ("completed", True)
        return response

    return respond


@pytest.fixture
def connect(server: Served) -> Iterator[Callable[[], SocketClient]]:
    made: list[SocketClient] = []

    def connect() -> SocketClient:
        url = httpx.URL(server.url)
        made.append(SocketClient(socket.create_connection((url.host, url.port), 60)))
        return made[-1]

    yield connect
    for each in made:
        each.close()


def user(text: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": text, **fields}


def text_of(response: Response) -> str:
    (item,) = response.output
    assert isinstance(item, MessageItem)
    return "".join(part.text for part in item.content)


def ended(events: list[Event]) -> Response:
    last = events[-1]
    assert isinstance(last, Completed), last
    assert last.response.status == "completed" and last.response.output
    return last.response


def turn(client: SocketClient, **fields: Any) -> list[Event]:
    return read_events(client.turn(model="script", temperature=0, **fields))


def error_code(events: list[Event]) -> str:
    (event,) = events
    assert isinstance(event, Error) and event.status is not None and event.status >= 400
    return event.error.code


class TestOverHttp:
    def test_basic_response(self, respond: Callable[..., Response]) -> None:
        assert text_of(respond(input=[user("Greet me in three words.")])) == SCRIPTS[""][0]

    def test_streaming_response(self, post: Callable[..., httpx.Response]) -> None:
        answer = post(model="script", temperature=0, stream=True, input=[user("Count from one to five.")])
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: {")]
        response = ended(read_events([json.loads(line) for line in lines]))
        assert text_of(response) == SCRIPTS["Count"][0]

    def test_system_prompt(self, respond: Callable[..., Response]) -> None:
        system = {"type": "message", "role": "system", "content": "You talk like a pirate."}
        assert text_of(respond(input=[system, user("Greet me.")])) == SCRIPTS[""][0]

    def test_tool_calling(self, respond: Callable[..., Response]) -> None:
        (item,) = respond(input=[user("How is the weather in Bonn?")], tools=[WEATHER]).output
        assert isinstance(item, CallItem)
        assert (item.name, json.loads(item.arguments)) == ("get_weather", {"location": "Bonn"})

    def test_image_input(self, post: Callable[..., httpx.Response]) -> None:
        """The one case that a text model cannot answer: what the client sent is named in the refusal."""
        parts = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": PIXEL}]
        answer = post(model="script", input=[user(parts)])
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], "text only" in error["message"]) == ("input[0].content[1].type", True)

    def test_multi_turn(self, respond: Callable[..., Response]) -> None:
        said = [user("I am Alice."), assistant("Hello Alice, what can I do for you?"), user("What is my name?")]
        assert text_of(respond(input=said)) == SCRIPTS["What is my name"][1]

    def test_assistant_phase(self, respond: Callable[..., Response]) -> None:
        said = [
            assistant("I look for the saved number.", phase="commentary"),
            assistant("It is four.", phase="final_answer"),
            user("Repeat only the number."),
        ]
        assert text_of(respond(input=said)) == SCRIPTS["only the number"][1]

    def test_phase_of_output(self, respond: Callable[..., Response]) -> None:
        """A case without a request: the response's schema has room for phases, which this server does not write."""
        response = msgspec.to_builtins(respond(input="Greet me."))
        response["output"][0]["phase"] = "final_answer"
        (item,) = read_response(response).output
        assert isinstance(item, MessageItem) and item.phase == "final_answer"

    def test_compaction(self, post: Callable[..., httpx.Response], respond: Callable[..., Response]) -> None:
        said = [user("We launch on Tuesday, and tell support first."), assistant("I keep both in mind.")]
        answer = post("/compact", model="script", input=said, prompt_cache_key="mine", temperature=0)
        compaction = msgspec.convert(answer.json(), Compaction)
        assert [type(item) for item in compaction.output] == [CompactionItem]
        # The summary is in the prompt of the next turn.
        output = [*answer.json()["output"], user("Greet me.")]
        assert respond(input=output).usage is not None
        tokens = post("/input_tokens", model="script", input=output).json()["input_tokens"]
        alone = post("/input_tokens", model="script", input=[user("Greet me.")]).json()["input_tokens"]
        assert tokens > alone + len(SCRIPTS["Summarise this conversation"][1])

    def test_compaction_without_model(self, post: Callable[..., httpx.Response]) -> None:
        answer = post("/compact", input=[user("Make it short.")])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


class TestOverWebSockets:
    def test_response(self, connect: Callable[[], SocketClient]) -> None:
        assert text_of(ended(turn(connect(), input=[user("Count from one to five.")]))) == SCRIPTS["Count"][0]

    def test_sequential_responses(self, connect: Callable[[], SocketClient]) -> None:
        client = connect()
        ids = [ended(turn(client, store=False, input=f"Greet me {number}.")).id for number in (1, 2)]
        assert len(set(ids)) == 2

    def test_continuation(self, connect: Callable[[], SocketClient]) -> None:
        client = connect()
        first = ended(turn(client, store=False, input="The code word is cobalt. Say that you know it."))
        second = ended(turn(client, store=False, previous_response_id=first.id, input="Which word is it?"))
        assert [text_of(first), text_of(second)] == SCRIPTS["code word"]

    def test_reconnection_of_a_response_that_is_not_stored(self, connect: Callable[[], SocketClient]) -> None:
        first = ended(turn(connect(), store=False, input="Greet me."))
        client = connect()
        again = turn(client, store=False, previous_response_id=first.id, input="Go on.")
        assert error_code(again) == "previous_response_not_found"
        assert text_of(ended(turn(client, store=False, input=[user("Greet me.")]))) == SCRIPTS[""][0]

    def test_missing_previous_response(self, connect: Callable[[], SocketClient]) -> None:
        events = turn(connect(), store=False, previous_response_id="resp_missing", input="Go on.")
        assert error_code(events) == "previous_response_not_found"

    def test_failed_continuation(self, connect: Callable[[], SocketClient]) -> None:
        client = connect()
        first = ended(turn(client, store=False, input="Greet me."))
        orphan = {"type": "function_call_output", "call_id": "call_missing", "output": "nothing"}
        error_code(turn(client, store=False, previous_response_id=first.id, input=[orphan]))
        again = turn(client, store=False, previous_response_id=first.id, input="Go on.")
        assert error_code(again) == "previous_response_not_found"

    def test_new_chain_after_compaction(
        self, connect: Callable[[], SocketClient], post: Callable[..., httpx.Response]
    ) -> None:
        said = [user([{"type": "input_text", "text": "We launch on Tuesday."}]), assistant("Noted.")]
        output = post("/compact", model="script", input=said, temperature=0).json()["output"]
        assert output
        events = turn(connect(), store=False, input=[*output, user("Greet me.")], tools=[])
        assert text_of(ended(events)) == SCRIPTS[""][0]


def test_number_of_cases() -> None:
    cases = [name for group in (TestOverHttp, TestOverWebSockets) for name in vars(group) if name.startswith("test")]
    assert len(cases) == 17
