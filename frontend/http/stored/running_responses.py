"""Responses that run in the background: their state, and their events for any number of readers."""

import asyncio
from collections.abc import AsyncIterator

import msgspec

from quire.protocol.errors import InvalidRequest

MAX_RUNNING, MAX_OF_TENANT = 256, 128
"""Background responses of one front end, and of one tenant: no connection limits their number."""
SSE_END = b"data: [DONE]\n\n"
ENDINGS = frozenset(f"response.{status}" for status in ("completed", "incomplete", "failed", "cancelled"))


class _OfResponse(msgspec.Struct):
    response: msgspec.Raw = msgspec.Raw()


class RunningResponse:
    """One of them.

    Attributes:
        body: the response as JSON.
        events: the events so far as they are sent; None if they are not kept.
        ending: the response at its end, and its last event. Readers see neither before ``publish``: then it is stored.
        cancelled: its client has cancelled it.
        task: computes it.
    """

    def __init__(self, tenant: int, request_bytes: int, others: "RunningResponses", *, keeps_events: bool) -> None:
        self.tenant, self.request_bytes = tenant, request_bytes
        self.body = b""
        self.events: list[bytes] | None = [] if keeps_events else None
        self.ending = b"", b""
        self.cancelled = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._others = others
        self._ended = asyncio.Event()
        self._changed = asyncio.Event()

    def add(self, kind: str, data: bytes) -> bytes:
        """Note an event. Return nothing to send: the readers follow it here."""
        frame = b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
        shown = bytes(msgspec.json.decode(data, type=_OfResponse).response)
        if kind in ENDINGS:
            self.ending = shown, frame
        else:
            self.body = shown or self.body
            self._append(frame)
        return b""

    def publish(self) -> None:
        self.body, last = self.ending
        self._ended.set()
        self._append(last)

    def _append(self, frame: bytes) -> None:
        if self.events is not None:
            self.events = self._others.with_room(self.events, frame)
        self._changed.set()
        self._changed = asyncio.Event()

    async def cancel(self) -> None:
        """Cancel it, unless it has ended, and wait until it is published."""
        self.cancelled.set()
        await self._ended.wait()

    async def follow(self, number: int) -> AsyncIterator[bytes]:
        """Yield the events from ``number`` on, as they come. A stream whose events are no longer kept just ends."""
        while (events := self.events) is not None:
            if number < len(events):
                yield b"".join(events[number:])
                number = len(events)
            elif self._ended.is_set():
                yield SSE_END
                return
            else:
                await self._changed.wait()


class RunningResponses(dict[str, RunningResponse]):
    """Those of one front end, by id. Their events have at most ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def require_room(self, tenant: int, request_bytes: int) -> None:
        """Raise InvalidRequest (rate_limit_exceeded) if no other response of this tenant may begin.

        Their requests, which are kept in files, have at most ``max_bytes``, too. A tenant may have as many of these as
        are left for all others.
        """
        own = [each for each in self.values() if each.tenant == tenant]
        for count, most in ((len(own), MAX_OF_TENANT), (len(self), MAX_RUNNING)):
            if count >= most:
                text = f"{count} background responses run, and at most {most} may: wait for one, or cancel it"
                raise InvalidRequest(text, "background", "rate_limit_exceeded")
        left = self._max_bytes - sum(each.request_bytes for each in (*self.values(), *own))
        if request_bytes > left:
            text = f"background requests may have {max(left, 0)} bytes more (got {request_bytes}): "
            raise InvalidRequest(text + "wait for one that runs, or cancel it", "background", "rate_limit_exceeded")

    def remove(self, response_id: str) -> None:
        self._num_bytes -= sum(map(len, self.pop(response_id).events or ()))

    def with_room(self, events: list[bytes], frame: bytes) -> list[bytes] | None:
        """Add an event to those of a response. None: there is no room for it, and none is kept."""
        if self._num_bytes + len(frame) > self._max_bytes:
            self._num_bytes -= sum(map(len, events))
            return None
        self._num_bytes += len(frame)
        events.append(frame)
        return events
