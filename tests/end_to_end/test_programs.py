"""Programs of a real server: agents with tools, with hints and without, and the trace of their turns."""

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from chaos import HUNG_S
from conversations import call
from script_checkpoint import make_script_checkpoint
from served import Served

from quire.protocol.wire.front_end_messages import CallsTool
from quire.replay.recorded.exact import replay_lines
from quire.replay.recorded.reader import TraceReader
from quire.scheduler_proc.trace.lines import Event

pytestmark = pytest.mark.full

TOOL = {"type": "function", "function": {"name": "save", "parameters": {"type": "object", "properties": {"x": {}}}}}
SCRIPTS = {"saved": ["", "Done."], "Save": [call("save", {"x": "a text of some tokens"})]}


async def agent(client: httpx.AsyncClient, task: str, headers: dict[str, str]) -> None:
    """Ask for a call, send its result, and take the final answer."""
    messages: list[Any] = [{"role": "user", "content": f"{task}: Save the file."}]
    body = {"messages": messages, "tools": [TOOL], "temperature": 0}
    first = (await client.post("/v1/chat/completions", json=body, headers=headers)).json()["choices"][0]["message"]
    messages += [first, {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "saved " * 40}]
    last = (await client.post("/v1/chat/completions", json=body, headers=headers)).json()["choices"][0]["message"]
    assert last["content"] == "Done."


def test_agents_with_and_without_hints(tmp_path: Path) -> None:
    make_script_checkpoint(tmp_path / "model", SCRIPTS)
    trace = tmp_path / "t.jsonl"
    served = Served(str(tmp_path / "model"), "--scheduling-policy", "program", "--trace", str(trace))

    async def run() -> tuple[httpx.Response, str]:
        async with asyncio.timeout(HUNG_S), httpx.AsyncClient(base_url=served.url, timeout=HUNG_S) as client:
            tasks = [agent(client, f"Task {number} " + "of many words " * (10 + number), {}) for number in range(3)]
            await asyncio.gather(*tasks, agent(client, "named", {"X-Session-ID": "run 1"}))
            job = {"prompt": "Save", "max_tokens": 2, "job_id": "run 1", "is_last_step": True}
            assert (await client.post("/v1/completions", json=job)).status_code == 200
            late = await client.post("/v1/completions", json=job)
            return late, (await client.get("/metrics")).text

    late, metrics = asyncio.run(run())
    assert served.stop() == 0
    assert late.status_code == 400 and late.json()["error"]["code"] == "job_ended"
    counted = dict(re.findall(r'num_turns_total{.*found_by="(\w+)".*} ([1-9])\.0', metrics))
    assert counted == {"new": "3", "prefix": "3", "session": "2", "job_id": "1"}
    events = [read.line.event for read in TraceReader(trace) if isinstance(read.line, Event)]
    assert [event.tool for event in events if isinstance(event, CallsTool)] == ["save"] * 4
    assert replay_lines(TraceReader(trace), check=True) is None
