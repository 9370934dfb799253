"""Responses that run in the background: their state, and their events for any number of readers."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

import msgspec

from quire.protocol.errors import InvalidRequest

MAX_RUNNING, MAX_OF_TENANT = 256, 128
"""Background responses of one front end, and of one tenant: no connection limits their number."""
SSE_END = b"data: [DONE]\n\n"
ENDINGS = frozenset(f"response.{status}" for status in ("completed", "incomplete", "failed", "cancelled"))


class _OfResponse(msgspec.Struct):
    response: msgspec.Raw = msgspec.Raw()


class RunningResponse:
    """One of them. Its last event is held until ``publish``: then it is stored, too.

    Attributes:
        body: the response as JSON.
        events: the events so far as they are sent; None if they are not kept.
        task: computes it.
        is_cancelled: its client has cancelled it.
    """

    def __init__(self, tenant: int, *, keeps_events: bool, count: Callable[[int], bool]) -> None:
        """``count``: counts bytes of events; False if there is no room for them."""
        self.tenant = tenant
        self.body = b""
        self.task: asyncio.Task[None] | None = None
        self.is_cancelled = False
        self.events: list[bytes] | None = [] if keeps_events else None
        self._count = count
        self._ending: tuple[bytes, bytes] | None = None
        self._has_ended = False
        self._changed = asyncio.Event()

    def add(self, kind: str, data: bytes) -> bytes:
        """Note an event. Return nothing to send: the readers follow it here."""
        frame = b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
        shown = bytes(msgspec.json.decode(data, type=_OfResponse).response)
        if kind in ENDINGS:
            self._ending = shown, frame
            return b""
        self.body = shown or self.body
        self._append(frame)
        return b""

    @property
    def ending(self) -> tuple[bytes, list[bytes] | None]:
        """The response and all of its events, which readers do not see before ``publish``."""
        assert self._ending is not None
        body, frame = self._ending
        return body, None if self.events is None else [*self.events, frame]

    def publish(self) -> None:
        assert self._ending is not None
        self.body = self._ending[0]
        self._has_ended = True
        self._append(self._ending[1])

    def _append(self, frame: bytes) -> None:
        if self.events is not None:
            if self._count(len(frame)):
                self.events.append(frame)
            else:
                self._count(-sum(map(len, self.events)))
                self.events = None
        self._changed.set()
        self._changed = asyncio.Event()

    async def cancel(self) -> None:
        """Cancel it, unless it has ended, and wait until it is published."""
        self.is_cancelled = True
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])
        while not self._has_ended:
            await self._changed.wait()

    async def follow(self, number: int) -> AsyncIterator[bytes]:
        """Yield the events from ``number`` on, as they come. A stream whose events are no longer kept just ends."""
        while (events := self.events) is not None:
            if number < len(events):
                yield b"".join(events[number:])
                number = len(events)
            elif self._has_ended:
                yield SSE_END
                return
            else:
                await self._changed.wait()


class RunningResponses:
    """Those of one front end, by id. Their events have at most ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._by_id: dict[str, RunningResponse] = {}
        self._num_of_tenant: Counter[int] = Counter()

    def get(self, tenant: int, response_id: str) -> RunningResponse | None:
        found = self._by_id.get(response_id)
        return found if found is not None and found.tenant == tenant else None

    def require_room(self, tenant: int) -> None:
        """Raise InvalidRequest (rate_limit_exceeded) if no other response of this tenant may begin."""
        for count, most in ((self._num_of_tenant[tenant], MAX_OF_TENANT), (len(self._by_id), MAX_RUNNING)):
            if count >= most:
                text = f"{count} background responses run, and at most {most} may: wait for one, or cancel it"
                raise InvalidRequest(text, "background", "rate_limit_exceeded")

    def add(self, tenant: int, response_id: str, *, keeps_events: bool) -> RunningResponse:
        running = RunningResponse(tenant, keeps_events=keeps_events, count=self._count)
        self._by_id[response_id] = running
        self._num_of_tenant[tenant] += 1
        return running

    def remove(self, response_id: str) -> None:
        running = self._by_id.pop(response_id)
        self._num_of_tenant[running.tenant] -= 1
        self._count(-sum(map(len, running.events or ())))

    def _count(self, num_bytes: int) -> bool:
        if num_bytes > 0 and self._num_bytes + num_bytes > self._max_bytes:
            return False
        self._num_bytes += num_bytes
        return True
