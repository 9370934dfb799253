"""The job of a request: which of its hints counts, in each API, and which are refused."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

from quire.frontend.engine.job import Job
from quire.frontend.http.app import make_app
from quire.frontend.http.serving.server import ServerSettings

SESSION = {"X-Session-ID": "of header"}
CONTEXT = {"agent_context": {"session_type_id": "research", "session_id": "run", "session_final": True}}
ACTION = {"action_id": "a", "action_type": "kv.retain", "action_version": "1.0", "payload": {"x": 1}}
KV_HINTS = {"protocol_version": "0.1", "message_id": "m", "actions": [ACTION]}
CLOCK = {"type": "function", "function": {"name": "clock"}}
USER = [{"role": "user", "content": "hello"}]
DOORS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": USER, "max_tokens": 20},
}
MESSAGES = "/v1/messages"


@pytest.mark.parametrize("path", DOORS)
def test_the_most_reliable_hint_counts_in_every_api(client: Any, engine: Any, path: str) -> None:
    engine.max_model_len = 4000

    def job(headers: dict[str, str], **fields: Any) -> Job:
        answer = client.post(path, {"model": "tiny", **DOORS[path], **fields}, headers=headers)
        assert answer.status_code == 200, answer.text
        assert "x-quire-ignored-fields" not in answer.headers
        found: Job = engine.jobs[-1]
        return found

    key = {} if path == MESSAGES else {"prompt_cache_key": "key"}
    assert job({}) == Job()
    assert job(SESSION, job_id="mine", is_last_step=True, nvext=CONTEXT, **key) == Job("mine", True, "job_id")
    assert job(SESSION, nvext=CONTEXT, kv_hints=KV_HINTS, **key) == Job("of header", True, "session")
    assert job({}, nvext=CONTEXT) == Job("run", True, "agent_context")
    parts = {"agent_context": {"session_id": "run", "trajectory_id": "run:2"}, "annotations": []}
    assert job({}, nvext=parts) == Job("run:2", False, "agent_context")
    if key:
        assert job({}, nvext=CONTEXT, **key) == Job("key", True, "cache_key")


def test_a_chain_of_responses_is_the_job_of_its_first_one(client: Any, engine: Any) -> None:
    def respond(**fields: Any) -> Any:
        return client.post("/v1/responses", {"model": "tiny", "input": "hello", **fields}).json()["id"]

    engine.max_model_len = 4000
    first = respond()
    second = respond(previous_response_id=first)
    respond(previous_response_id=second, prompt_cache_key="key")
    respond(previous_response_id=second, job_id="mine")
    jobs = [(job.id, job.hint) for job in engine.jobs]
    assert jobs == [("", ""), (first, "response"), (first, "response"), ("mine", "job_id")]


def test_only_the_last_sequence_of_a_request_ends_its_job(client: Any, engine: Any) -> None:
    assert client.complete(prompt=["a", "b"], n=2, job_id="mine", is_last_step=True).status_code == 200
    assert [job.is_last_step for job in engine.jobs] == [False, False, False, True]
    assert {job.id for job in engine.jobs} == {"mine"}


@pytest.mark.parametrize("is_last", [False, True])
def test_a_fork_is_of_the_job_of_its_parent_unless_that_has_ended(client: Any, engine: Any, is_last: bool) -> None:
    engine.hang_after = 1

    async def work() -> None:
        transport = httpx.ASGITransport(client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            body = {"prompt": "hello", "is_last_step": is_last}
            running = asyncio.create_task(http.post("/v1/completions", json=body, headers=SESSION))
            while not (engine.added and engine.added[0].waiting.is_set()):
                await asyncio.sleep(0)
            engine.hang_after = None
            name = engine.added[0].request_id.rpartition("-")[0]
            assert (await http.post(f"/v1/requests/{name}/fork", json={})).status_code == 200
            running.cancel()

    asyncio.run(work())
    assert engine.jobs == [Job("of header", is_last, "session"), Job() if is_last else Job("of header", hint="session")]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"is_last_step": "yes", "job_id": "x"}, "is_last_step", "true or false"),
        ({"is_last_step": True}, "is_last_step", "send job_id or the header X-Session-ID"),
        ({"prompt_cache_key": "x" * 257}, "prompt_cache_key", "1 to 256 characters"),
        ({"nvext": []}, "nvext", "object"),
        ({"nvext": {"agent_context": "x"}}, "nvext.agent_context", r"object \(got 'x'\)"),
        ({"nvext": {"agent_context": {}}}, "nvext.agent_context.session_id", "is required"),
        ({"kv_hints": {"actions": []}}, "kv_hints.protocol_version", "is required"),
        ({"kv_hints": {**KV_HINTS, "actions": [{}]}}, r"kv_hints.actions[0].action_id", "is required"),
        ({"kv_hints": {**KV_HINTS, "actions": [5]}}, "kv_hints.actions", "objects"),
    ],
)
def test_malformed_hints_are_refused(client: Any, engine: Any, fields: dict[str, Any], param: str, says: str) -> None:
    response = client.complete(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(param)
    assert re.search(says, error["message"])
    assert not engine.added


@pytest.mark.parametrize("value", ["", "x" * 257, "a\tb"])
def test_malformed_session_headers_are_refused(client: Any, engine: Any, value: str) -> None:
    body = {"model": "tiny", "prompt": "hello"}
    response = client.post("/v1/completions", body, headers={"X-Session-ID": value})
    assert response.status_code == 400 and response.json()["error"]["param"] == "X-Session-ID"
    assert not engine.added


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [path for path in DOORS if path != "/v1/completions"])
def test_the_first_tool_of_an_answer_is_reported(
    client: Any, engine: Any, text_in: Any, path: str, stream: bool
) -> None:
    engine.max_model_len, engine.per_update = 4000, 5
    engine.reply = json.dumps([{"name": "clock", "parameters": {}}, {"name": "clock", "parameters": {}}])
    tools: dict[str, Any] = {"tools": [CLOCK], "tool_choice": "required"}
    if path == "/v1/responses":
        tools = {"tools": [{"type": "function", "name": "clock", "parameters": {}}], "tool_choice": "required"}
    if path == MESSAGES:
        tools = {"tools": [{"name": "clock", "input_schema": {}}], "tool_choice": {"type": "any"}}
    body = {"model": "tiny", **DOORS[path], **tools, "stream": stream}
    settings = ServerSettings(text_in=text_in, served_model_names=("tiny",), notes_tools=True)
    assert type(client)(make_app(engine, settings)).post(path, {**body}).status_code == 200
    assert engine.added[-1].tool == "clock"
    assert client.post(path, body).status_code == 200
    assert engine.added[-1].tool == "", "no policy of the scheduler needs it"
