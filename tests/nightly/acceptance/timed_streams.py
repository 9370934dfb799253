"""Many concurrent streamed answers: bytes are stored with their times as they arrive, and parsed after the run."""

import asyncio
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

from raw_http import Reply, connected

EVENT = b"data: {"


@dataclass(slots=True)
class TimedStream:
    """One request and the data received for it.

    Attributes:
        due: seconds from the run's start at which it is sent.
        background: sent only while streams that are not in the background run.
        sent: time of sending, on the clock of the reply's pieces; 0 if it was not sent.
        closed: the connection has ended.
        error: the socket's error, or empty.
    """

    request: bytes
    due: float
    background: bool = False
    sent: float = 0.0
    reply: Reply = field(default_factory=Reply)
    closed: bool = False
    error: str = ""


@dataclass(slots=True)
class StreamedAnswer:
    """A parsed stream. ``deliveries``: arrival times of data with an event. ``error``: why it is incomplete."""

    deliveries: list[float]
    text: str = ""
    finish_reason: str = ""
    num_output_tokens: int = 0
    done: bool = False
    error: str = ""

    @property
    def gaps(self) -> list[float]:
        """Seconds between deliveries; a delivery has several tokens if the server fell behind."""
        return [later - earlier for earlier, later in pairwise(self.deliveries)]


async def drive(address: tuple[str, int], streams: Sequence[TimedStream], timeout: float) -> None:
    """Send each request when it is due, and receive all responses until the server has closed every connection.

    Streams that have not ended ``timeout`` seconds after the start stay incomplete.
    """
    over = asyncio.Event()
    num_wanted = sum(not stream.background for stream in streams)

    async def one(stream: TimedStream) -> None:
        nonlocal num_wanted
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), stream.due)
            return
        stream.sent = time.perf_counter()
        await _take_in(address, stream)
        num_wanted -= not stream.background
        if not num_wanted:
            over.set()

    with suppress(TimeoutError):
        async with asyncio.timeout(timeout), asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(one(stream))


async def _take_in(address: tuple[str, int], stream: TimedStream) -> None:
    async with connected(address) as connection:
        try:
            await connection.fetch(stream.request, stream.reply)
        except EOFError:
            pass
        except OSError as error:
            stream.error = os.strerror(error.errno) if error.errno else type(error).__name__
        stream.closed = True


def read_answer(stream: TimedStream) -> StreamedAnswer:
    """Parse the bytes of a streamed completion."""
    reply = stream.reply
    answer = StreamedAnswer([when for when, data in reply.pieces if EVENT in data], error=stream.error)
    if reply.status != 200:
        answer.error = answer.error or f"status {reply.status or 'missing'}"
        return answer
    texts: list[str] = []
    for event in reply.body.split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        if data == b"[DONE]":
            answer.done = True
        elif event.startswith(EVENT):
            _take(json.loads(data), texts, answer)
    answer.text = "".join(texts)
    if not answer.error and not answer.done:
        answer.error = "cut off" if stream.closed else "no end in time"
    return answer


def _take(event: dict[str, object], texts: list[str], answer: StreamedAnswer) -> None:
    if "error" in event:
        answer.error = "error event"
        return
    choices, usage = event.get("choices"), event.get("usage")
    if isinstance(choices, list) and choices:
        texts.append(choices[0]["text"] if "text" in choices[0] else choices[0]["delta"].get("content") or "")
        answer.finish_reason = choices[0]["finish_reason"] or answer.finish_reason
    if isinstance(usage, dict):
        answer.num_output_tokens = usage["completion_tokens"]
