"""Many streamed answers at once by one cheap thread: bytes are kept and timed as they come, and read afterwards.

An HTTP library takes as long over a piece as the server does; on shared cores it would be what is measured.
"""

import heapq
import json
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

READ_BYTES = 1 << 18
CONNECT_S = 30.0
EVENT = b"data: {"


@dataclass(slots=True)
class RawStream:
    """One request and what came for it.

    Attributes:
        due: seconds after the run's start at which it is sent.
        background: sent only while others, that are not in the background, have not ended.
        sent: on the clock of ``reads``; 0: it never was.
        reads: (when, bytes) as the socket gave them.
        closed: the server ended the connection.
        error: what the socket said; empty: nothing.
    """

    request: bytes
    due: float
    background: bool = False
    sent: float = 0.0
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    closed: bool = False
    error: str = ""


@dataclass(slots=True)
class StreamedAnswer:
    """A stream, once read. ``deliveries``: when something with an event came. ``error``: why it is not whole."""

    deliveries: list[float]
    text: str = ""
    finish_reason: str = ""
    num_output_tokens: int = 0
    done: bool = False
    error: str = ""

    @property
    def gaps(self) -> list[float]:
        """Seconds between deliveries; a delivery may bring several tokens when the server has fallen behind."""
        return [later - earlier for earlier, later in pairwise(self.deliveries)]


def drive(address: tuple[str, int], streams: Sequence[RawStream], timeout: float) -> float:
    """Send each request when it is due, and take in all answers until the server has closed every connection.

    What has not ended ``timeout`` seconds after the start stays open-ended. Returns the start, on ``perf_counter``.
    """
    poll = select.epoll()
    sockets: dict[int, tuple[socket.socket, RawStream]] = {}
    pending = [(stream.due, index) for index, stream in enumerate(streams)]
    heapq.heapify(pending)
    num_wanted = sum(not stream.background for stream in streams)
    start = time.perf_counter()
    try:
        while (num_wanted or sockets) and (now := time.perf_counter() - start) < timeout:
            while num_wanted and pending and pending[0][0] <= now:
                stream = streams[heapq.heappop(pending)[1]]
                num_wanted -= not (_open(address, stream, poll, sockets) or stream.background)
            if not (num_wanted or sockets):
                break
            wait = pending[0][0] - (time.perf_counter() - start) if pending and num_wanted else 1.0
            for number, _ in poll.poll(max(0.0, min(wait, 1.0))):
                ended = _read(number, poll, sockets)
                num_wanted -= ended is not None and not ended.background
    finally:
        for opened, _ in sockets.values():
            opened.close()
        poll.close()
    return start


def _open(
    address: tuple[str, int],
    stream: RawStream,
    poll: select.epoll,
    sockets: dict[int, tuple[socket.socket, RawStream]],
) -> bool:
    """False: the server took no connection."""
    stream.sent = time.perf_counter()
    try:
        opened = socket.create_connection(address, CONNECT_S)
        opened.sendall(stream.request)
    except OSError as error:
        stream.error = error.strerror or type(error).__name__
        return False
    opened.setblocking(False)
    sockets[opened.fileno()] = (opened, stream)
    poll.register(opened.fileno(), select.EPOLLIN)
    return True


def _read(number: int, poll: select.epoll, sockets: dict[int, tuple[socket.socket, RawStream]]) -> RawStream | None:
    """Take what is there; the stream, if that was its end."""
    opened, stream = sockets[number]
    try:
        data = opened.recv(READ_BYTES)
    except BlockingIOError:
        return None
    except OSError as error:
        data, stream.error = b"", error.strerror or type(error).__name__
    if data:
        stream.reads.append((time.perf_counter(), data))
        return None
    stream.closed = True
    poll.unregister(number)
    opened.close()
    del sockets[number]
    return stream


def read_answer(stream: RawStream) -> StreamedAnswer:
    """What the bytes of a streamed completion said."""
    raw = b"".join(data for _, data in stream.reads)
    answer = StreamedAnswer([when for when, data in stream.reads if EVENT in data], error=stream.error)
    head, _, rest = raw.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if status != [b"200"]:
        answer.error = answer.error or f"status {status[0].decode() if status else 'missing'}"
        return answer
    texts: list[str] = []
    for event in dechunk(rest).split(b"\n\n"):
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
        answer.error = "an error event"
        return
    choices, usage = event.get("choices"), event.get("usage")
    if isinstance(choices, list) and choices:
        texts.append(choices[0]["text"])
        answer.finish_reason = choices[0]["finish_reason"] or answer.finish_reason
    if isinstance(usage, dict):
        answer.num_output_tokens = usage["completion_tokens"]


def dechunk(body: bytes) -> bytes:
    """The content of a chunked body, as far as it came."""
    parts: list[bytes] = []
    at = 0
    while (line_end := body.find(b"\r\n", at)) >= 0:
        size = int(body[at:line_end], 16)
        if not size:
            break
        parts.append(body[line_end + 2 : line_end + 2 + size])
        at = line_end + 2 + size + 2
    return b"".join(parts)
