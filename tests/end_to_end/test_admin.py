"""A server with two front ends is paused, loses its scheduler, and is resumed; its trace replays exactly."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from chaos import HUNG_S, request_of, until
from fault_server import FaultServer
from live_streams import Answer, stream

from quire.replay.recorded.exact import replay_lines
from quire.replay.recorded.reader import TraceReader

FLAGS = ("--simulate", "constant:2", "--num-gpu-blocks-override", "200", "--api-server-count", "2")
ADMIN = {"authorization": "Bearer admin"}


async def order(port: int, path: str) -> dict[str, Any]:
    """POST on a connection of its own, so that either front end may get it."""
    async with httpx.AsyncClient(headers=ADMIN, timeout=HUNG_S) as client:
        answer = await client.post(f"http://127.0.0.1:{port}/admin/{path}")
    return {"status": answer.status_code, **answer.json()}


async def state(port: int) -> dict[str, Any]:
    async with httpx.AsyncClient(headers=ADMIN, timeout=HUNG_S) as client:
        return dict((await client.get(f"http://127.0.0.1:{port}/admin/state")).json())


async def readiness(port: int) -> set[tuple[int, str]]:
    """Return what both front ends answer."""
    found = set()
    for _ in range(6):
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"http://127.0.0.1:{port}/ready")
            found.add((answer.status_code, answer.json()["status"]))
    return found


async def check_pause(server: FaultServer) -> None:
    port, tokens = server.port, 0
    began = asyncio.Event()

    def count(answer: Answer) -> None:
        nonlocal tokens
        tokens += 1
        began.set()

    streaming = asyncio.create_task(stream(port, request_of(600), count))
    await began.wait()
    assert (await order(port, "pause?mode=keep"))["paused"] == "keep"
    queued = asyncio.create_task(stream(port, request_of(5)))
    assert await until(lambda: has(port, waiting_by_reason={"paused": 1}, running=1), HUNG_S)
    assert await readiness(port) == {(503, "paused")}
    assert (await order(port, "reset_prefix_cache"))["status"] == 409
    before = tokens
    server.victims("scheduler")[0].kill()
    assert await until(lambda: has(port, paused="keep", state="paused", waiting=2), HUNG_S)
    assert tokens == before and await readiness(port) == {(503, "paused")}
    assert (await order(port, "resume"))["paused"] is None
    assert [answer.error for answer in (await streaming, await queued)] == ["", ""]

    ended = asyncio.create_task(stream(port, request_of(1800)))
    assert await until(lambda: has(port, running=1), HUNG_S)
    assert (await order(port, "pause?mode=abort"))["running"] == 0
    assert "aborted by the server's administrator" in (await ended).error
    assert await until(lambda: was_reset(port), HUNG_S)
    assert (await state(port))["kv_blocks_cached"] == 0
    await order(port, "resume")
    assert await readiness(port) == {(200, "ready")}


async def has(port: int, **values: object) -> bool:
    """Whether the state has these values, and where one is a dict, at least its items."""
    found = await state(port)
    return all(
        found.get(name, {}).items() >= value.items() if isinstance(value, dict) else found.get(name) == value
        for name, value in values.items()
    )


async def was_reset(port: int) -> bool:
    return (await order(port, "reset_prefix_cache"))["status"] == 200


@pytest.mark.full
def test_a_pause_survives_the_scheduler_and_replays(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    with FaultServer([*FLAGS, "--admin-api-key", "admin", "--trace", str(trace)]) as server:
        asyncio.run(check_pause(server))
        assert server.stop() == 0
        log = [line.partition(": ")[2] for line in server.log if "quire.scheduler: " in line]
    assert log == ["paused mode=keep", "still paused mode=keep", "resumed", "paused mode=wait", "resumed"]
    last_part = sorted(tmp_path.iterdir())[-1].read_text().splitlines()
    orders = [json.loads(line)["event"][1] for line in last_part if '"kind":"event"' in line]
    assert orders[0] == "pause" and "abort_all" in orders
    assert replay_lines(TraceReader(trace), check=True) is None
