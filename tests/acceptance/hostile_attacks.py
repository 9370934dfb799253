"""Clients that mean no good: each goes on until it is cancelled, and counts what it is told."""

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
"""After a refusal: an attacker that only spins measures how fast refusals are."""

Attack = Callable[[Target, random.Random, "Counter[str]"], Coroutine[Any, Any, None]]


async def slow_reader(target: Target, draw: random.Random, told: "Counter[str]") -> None:
    """Many answers of great length at once, of which nothing is ever read."""

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
                told["never read"] += 1
                await _until_cut(opened)
                told["cut by the server"] += 1

    await _all(one, NUM_SLOW_READERS)


async def flood(target: Target, draw: random.Random, told: "Counter[str]") -> None:
    """Far more requests at once than the engine has rows."""
    await _repeat(target, told, NUM_FLOODERS, lambda: _body(draw, 32, max_tokens=64))


async def grammars(target: Target, draw: random.Random, told: "Counter[str]") -> None:
    """Grammars that are wrong, endless or large, never the same twice."""

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

    await _repeat(target, told, NUM_GRAMMARIANS, body)


async def huge(target: Target, draw: random.Random, told: "Counter[str]") -> None:
    """Prompts of the whole context, unknown to the prefix cache, and some far beyond it."""

    def body() -> bytes:
        if draw.random() < 0.1:
            return json.dumps({"prompt": "word " * 200_000, "max_tokens": 1}).encode()
        return _body(draw, CONTEXT - 8, max_tokens=1)

    await _repeat(target, told, NUM_HUGE, body)


async def many(target: Target, draw: random.Random, told: "Counter[str]") -> None:
    """As many answers to one prompt as may be asked for."""
    await _repeat(target, told, NUM_MANY, lambda: _body(draw, 16, max_tokens=200, n=128))


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


async def _repeat(target: Target, told: "Counter[str]", clients: int, body: Callable[[], bytes]) -> None:
    async def one() -> None:
        async with connected(target.address) as connection:
            while True:
                status = await _ask(connection, target.post("/v1/completions", body()))
                told[status] += 1
                if status != "200":
                    await asyncio.sleep(PAUSE_S)

    await _all(one, clients)


async def _ask(connection: Connection, request: bytes) -> str:
    try:
        return str((await connection.ask(request)).status)
    except TimeoutError:
        return "no answer in time"
    except (OSError, EOFError):
        return "cut off"


async def _until_cut(opened: socket.socket) -> None:
    """Until the other side resets the connection. The error is asked for: reading would find what waits before it."""
    while not opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        await asyncio.sleep(PAUSE_S)


async def _all(one: Callable[[], Awaitable[None]], count: int) -> None:
    await asyncio.gather(*(one() for _ in range(count)))
