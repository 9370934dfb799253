"""Helpers of the tests that kill processes: streams of all kinds, an action in the middle of them, metrics."""

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

import psutil
from fault_server import FaultServer, has_settled
from live_streams import Answer, StreamRequest, stream
from raw_http import get
from waits import wait_for

HUNG_S = 60.0
"""A longer run has failed, on any machine."""


def within(seconds: float) -> float:
    """Return this many seconds of free cores; more if other processes hold the cores, because this process waits as
    well."""
    return seconds * max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))


def request_of(max_tokens: int, **fields: object) -> StreamRequest:
    return StreamRequest(
        "/v1/completions", {"prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True, **fields}
    )


async def streams(port: int, requests: Sequence[StreamRequest]) -> list[Answer]:
    async with asyncio.timeout(HUNG_S):
        return await asyncio.gather(*(stream(port, request) for request in requests))


async def disturbed(
    port: int, requests: Sequence[StreamRequest], act: Callable[[], Awaitable[None] | None], after: int
) -> list[Answer]:
    """Run the streams and return their answers; ``act`` is called after that many chunks in all, before any stream
    ends."""
    seen = 0
    reached = asyncio.Event()

    def on_piece(answer: Answer) -> None:
        nonlocal seen
        seen += 1
        if seen >= after:
            reached.set()

    async with asyncio.timeout(HUNG_S):
        tasks = [asyncio.create_task(stream(port, request, on_piece)) for request in requests]
        await reached.wait()
        assert not all(task.done() for task in tasks), "too late: they have all ended"
        if (doing := act()) is not None:
            await doing
        return await asyncio.gather(*tasks)


async def gauges(port: int) -> dict[str, float]:
    """Return the engine's metrics by name; empty while it does not answer."""
    _, text = await get(port, "/metrics")
    return {name: float(value) for name, value in re.findall(r"^quire:(num_\w+)\{[^},]*\} ([\d.e+-]+)$", text, re.M)}


async def until(condition: Callable[[], Awaitable[bool]], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


async def is_empty(port: int) -> bool:
    """Return whether no request is running or waiting and every block is free."""
    found = await gauges(port)
    idle = found.get("num_requests_running") == found.get("num_requests_waiting") == 0
    return idle and found["num_free_blocks"] == found["num_usable_blocks"]


@contextlib.contextmanager
def held_recovery(server: FaultServer) -> Iterator[None]:
    """Kill the worker, and stop the process that takes over until the end of the block."""
    ready = lambda: len(server.standbys()) == 1 and has_settled(server.standbys()[0])  # noqa: E731
    wait_for(ready, HUNG_S)
    standby = server.standbys()[0]
    standby.suspend()
    try:
        began = time.monotonic()
        server.victims("worker")[0].kill()
        wait_for(lambda: server.noticed(began) is not None, HUNG_S)
        yield
    finally:
        standby.resume()


def client_ports(front_end: psutil.Process) -> set[int]:
    return {c.raddr.port for c in psutil.net_connections("tcp") if c.pid == front_end.pid and c.raddr}
