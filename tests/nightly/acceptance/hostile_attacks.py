"""Hostile clients: each attacks until it is cancelled, and counts the outcomes of its requests."""

import asyncio
import json
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from own_server import Target
from raw_http import Connection, connected

VOCABULARY = range(3, 1000)
NUM_SLOW_READERS = 24
NUM_FLOODERS = 256
NUM_GRAMMARIANS = 12
NUM_HUGE = 4
NUM_MANY = 4
CONTEXT = 2048
TINY_WINDOW = 2048
PAUSE_S = 0.05
"""Pause after a rejected request, so that an attack does not just measure how fast requests are rejected."""

Attack = Callable[[Target, random.Random, "Counter[str]"], Coroutine[Any, Any, None]]


async def slow_reader(target: Target, draw: random.Random, outcomes: "Counter[str]") -> None:
    """Request many very long answers at once and never read them."""

    async def one() -> None:
        while True:
            body = _body(draw, 8, max_tokens=1800, stream=True, n=2, logprobs=20)
            opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, TINY_WINDOW)
            opened.setblocking(False)
            with opened:
                loop = asyncio.get_running_loop()
                await loop.sock_connect(opened, target.address)
                await loop.sock_sendall(opened, target.post("/v1/completions", body))
                outcomes["never read"] += 1
                await _until_cut(opened)
                outcomes["cut by the server"] += 1

    await _all(one, NUM_SLOW_READERS)


async def flood(target: Target, draw: random.Random, outcomes: "Counter[str]") -> None:
    """Send far more requests at once than the engine has rows."""
    await _repeat(target, outcomes, NUM_FLOODERS, lambda: _body(draw, 32, max_tokens=64))


async def grammars(target: Target, draw: random.Random, outcomes: "Counter[str]") -> None:
    """Send grammars that are wrong, ambiguous or large, and never the same."""

    def body() -> bytes:
        nested: dict[str, Any] = {"type": "integer"}
        for depth in range(draw.randint(1, 60)):
            nested = {"type": "object", "properties": {f"p{draw.getrandbits(30)}{depth}": nested}}
        wanted = draw.choice(
            (
                {"structured_outputs": {"regex": f"(a+)+{draw.getrandbits(40)}$("}},
                {"structured_outputs": {"regex": f"(x{{1,{draw.randint(500, 3000)}}}y){{1,50}}"}},
                {"structured_outputs": {"grammar": f'root ::= root "{draw.getrandbits(40)}"'}},
                {"structured_outputs": {"choice": [str(draw.getrandbits(60)) for _ in range(1000)]}},
                {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": nested}}},
            )
        )
        return _body(draw, 8, max_tokens=4, **wanted)

    await _repeat(target, outcomes, NUM_GRAMMARIANS, body)


async def huge(target: Target, draw: random.Random, outcomes: "Counter[str]") -> None:
    """Send prompts of the whole context, unknown to the prefix cache, and some far longer."""

    def body() -> bytes:
        if draw.random() < 0.1:
            return json.dumps({"prompt": "word " * 200_000, "max_tokens": 1}).encode()
        return _body(draw, CONTEXT - 8, max_tokens=1)

    await _repeat(target, outcomes, NUM_HUGE, body)


async def many(target: Target, draw: random.Random, outcomes: "Counter[str]") -> None:
    """Request the maximum number of answers per prompt."""
    await _repeat(target, outcomes, NUM_MANY, lambda: _body(draw, 16, max_tokens=200, n=128))


ATTACKS: dict[str, Attack] = {
    "slow_reader": slow_reader,
    "flood": flood,
    "grammars": grammars,
    "huge": huge,
    "many": many,
}


def _body(draw: random.Random, prompt_len: int, **fields: Any) -> bytes:
    prompt = draw.choices(VOCABULARY, k=prompt_len)
    return json.dumps({"prompt": prompt, "ignore_eos": "structured_outputs" not in fields, **fields}).encode()


async def _repeat(target: Target, outcomes: "Counter[str]", clients: int, body: Callable[[], bytes]) -> None:
    async def one() -> None:
        async with connected(target.address) as connection:
            while True:
                status = await _fetch_status(connection, target.post("/v1/completions", body()))
                outcomes[status] += 1
                if status != "200":
                    await asyncio.sleep(PAUSE_S)

    await _all(one, clients)


async def _fetch_status(connection: Connection, request: bytes) -> str:
    try:
        return str((await connection.fetch(request)).status)
    except TimeoutError:
        return "no answer in time"
    except (OSError, EOFError):
        return "cut off"


async def _until_cut(opened: socket.socket) -> None:
    """Wait until the server resets the connection. Reads the socket error, because receiving would return buffered data
    first.
    """
    while not opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        await asyncio.sleep(PAUSE_S)


async def _all(one: Callable[[], Awaitable[None]], count: int) -> None:
    await asyncio.gather(*(one() for _ in range(count)))
