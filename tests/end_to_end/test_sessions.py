"""Sessions of real engines: each answer is that of one fresh request with all tokens so far. Processes die between."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from engine_processes import engine_processes
from fault_server import Role
from served import Served
from waits import wait_for

from quire import LLM, SamplingParams
from quire.protocol.errors import InvalidRequest

pytestmark = pytest.mark.full

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SEEDED = SamplingParams(temperature=0.9, seed=7, max_tokens=12)
SETTINGS: dict[str, Any] = {"dtype": "float32", "deterministic": True, "num_gpu_blocks_override": 200}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SETTINGS) as llm:
        yield llm


@pytest.mark.parametrize("module", ["", "quire.worker_proc", "quire.scheduler_proc"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_session_of_the_offline_api(llm: LLM, params: SamplingParams, module: str) -> None:
    with llm.session() as session:
        session.append("Once upon a time")
        for piece in (None, " Then", [300, 301], " The end"):
            if module:
                mine = {p.pid for p in engine_processes(module)}
                for process in engine_processes(module):
                    process.kill()
                assert mine
                module = ""
            found = session.generate(piece, params)
            fresh = llm.generate([found.prompt_token_ids], params)[0]
            assert found.outputs[0].token_ids == fresh.outputs[0].token_ids
            assert found.outputs[0].text == fresh.outputs[0].text
            assert session.token_ids == found.prompt_token_ids + found.outputs[0].token_ids
        statistics = llm.statistics()
        assert statistics.num_free_blocks == statistics.num_usable_blocks == 200
    with pytest.raises(InvalidRequest, match="has ended"):
        session.generate(" more", params)


def test_a_chat_of_the_offline_api(llm: LLM) -> None:
    with llm.session() as session:
        first = session.chat([{"role": "user", "content": "Tell me a story."}], GREEDY)
        assert (
            first.outputs[0].text
            == llm.chat([{"role": "user", "content": "Tell me a story."}], GREEDY)[0].outputs[0].text
        )
        session.append_messages([{"role": "user", "content": "Wait."}])
        second = session.chat([{"role": "user", "content": "Another one."}], GREEDY)
        assert second.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids
        assert second.outputs[0].token_ids == llm.generate([second.prompt_token_ids], GREEDY)[0].outputs[0].token_ids
        with pytest.raises(InvalidRequest, match="does not accept text"):
            session.generate("Once")


def test_bad_input_leaves_a_session_as_it_was(llm: LLM) -> None:
    with llm.session() as session:
        with pytest.raises(InvalidRequest, match="from 1 to"):
            session.generate(None, GREEDY)
        session.append([5, 6, 7])
        for piece, params, says in (
            ([10**6], GREEDY, "token ids"),
            ([5] * 10**4, GREEDY, "context"),
            ([5], SamplingParams(n=2), "n cannot be used"),
        ):
            with pytest.raises(InvalidRequest, match=says):
                session.generate(piece, params)
        assert session.token_ids == [5, 6, 7]


def test_sessions_of_a_server_with_two_front_ends(demo_server: Served) -> None:
    """Each piece uses a new connection, which reaches either front end. Before each, a process is killed."""
    victims: list[Role | None] = [None, "worker", "scheduler"]
    url = f"{demo_server.url}/v1"
    sampling = {"temperature": 0.8, "seed": 3, "max_tokens": 10, "logprobs": 0}
    sessions: list[str] = []
    while len(sessions) < 6 or len({session.split("_")[1] for session in sessions}) < 2:
        sessions.append(httpx.post(f"{url}/sessions", timeout=60).json()["id"])
    so_far = dict.fromkeys(sessions, 0)
    for number, piece in enumerate(["Once upon", " a time", " there was"]):
        if (role := victims[number]) is not None:
            demo_server.victims(role)[0].kill()
        for session in sessions:
            body = {"prompt": piece, "session": {"id": session, "piece": number}, **sampling, "stream": number == 2}
            answer = httpx.post(f"{url}/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            shown = httpx.get(f"{url}/sessions/{session}", timeout=60).json()
            assert shown["pieces"] == number + 1 and shown["tokens"] > so_far[session]
            so_far[session] = shown["tokens"]
    assert len(set(so_far.values())) == 1
    # The scheduler reports from time to time how many are idle.
    shown = f'num_sessions_idle{{model_name="quire-demo"}} {len(sessions)}.0'
    wait_for(lambda: shown in httpx.get(f"{demo_server.url}/metrics", timeout=60).text, 30)
    assert all(httpx.delete(f"{url}/sessions/{each}", timeout=60).status_code == 200 for each in sessions)
    assert all(httpx.get(f"{url}/sessions/{each}", timeout=60).status_code == 404 for each in sessions)
