"""Requests that need exactly one more token per step, kept at no cost per request and step.

In steady decode each step computes one position of a request and samples one token. So it need not be touched: its
counters follow from two step numbers, the last one sent and the last one answered. Its tokens wait in a table
with one row per step, into which a whole result goes at once. Only when something is due is the request looked at:
its next block, its last token, or a draft to try. A calendar says who is due when.
"""

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from quire.protocol.wire.arrays import Int32
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.requests.step_clock import StepClock

SteadyBatch = dict[int, Request]
"""Requests in steady decode, by handle. Never changed once a step in flight refers to it."""

_by_order = attrgetter("order")


class SteadyDecode:
    """The requests in steady decode, and what was sampled for them.

    Invariants (``check``): a member was scheduled, and sampled, in every step since it joined; at most
    ``block_size + depth + num_drafts`` of its tokens are in the table only; its next event lies ahead, and in the
    calendar.

    Attributes:
        calendar: by step, members to be looked at in it; also some that are not any more.
    """

    def __init__(self, block_size: int, depth: int, num_drafts: int = 0) -> None:
        """
        Args:
            block_size: positions between two blocks, of the group with the smallest.
            depth: of the pipeline.
            num_drafts: most drafts of a request in a step: one that joins may hold blocks for so many more positions.
        """
        self.block_size = block_size
        self.clock = StepClock()
        self.batch: SteadyBatch = {}
        self._shared = False
        self.calendar: dict[int, list[Request]] = {}
        # A token stays here from its result to the member's next block, so a quarter of the rows would do; with more,
        # the rows that are wanted seldom lie around the end.
        self._sampled = np.zeros((4 * (block_size + depth + 1 + num_drafts), 64), "<i4")

    def __len__(self) -> int:
        return len(self.batch)

    # ---- coming and going

    def join(self, request: Request, until: int, room: int) -> None:
        """From the step after the newest on, in which it samples.

        Args:
            until: the step in which it is to be looked at again, which may never come.
            room: positions that it has blocks for after the newest step; fewer where that is not known.
        """
        if request.handle >= self._sampled.shape[1]:
            self._widen(request.handle + 1)
        step = self.clock.sent
        tokens_ahead = request.num_tokens + request.num_output_placeholders
        request.last_step = step + request.max_total_tokens - tokens_ahead
        request.leave_step = min(request.last_step, until)
        self._own_batch()[request.handle] = request
        self._expect(request, step + 1 + max(room, -request.num_computed_tokens % self.block_size))
        request.join_steady(self.clock)

    def leave(self, request: Request) -> None:
        """Bring its tokens up to date; from now on they, and its counters, are the request's own."""
        self._settle((request,))
        del self._own_batch()[request.handle]
        request.event_step = request.block_step = 0
        request.leave_steady()

    def share_batch(self) -> SteadyBatch:
        """The members now, for a record that keeps them: they are copied before they change."""
        self._shared = True
        return self.batch

    def _own_batch(self) -> SteadyBatch:
        if self._shared:
            self.batch = dict(self.batch)
            self._shared = False
        return self.batch

    # ---- what is due

    def due(self, step: int) -> list[Request]:
        """Members with ``step`` as the ``block_step`` or the ``leave_step``, in order of admission."""
        found = []
        for request in self.calendar.pop(step, ()):
            if request.event_step == step:
                request.event_step = 0  # it may stand in the list twice
                found.append(request)
        found.sort(key=_by_order)
        return found

    def handled(self, requests: Sequence[Request], step: int) -> None:
        """They got their blocks for ``step`` and go on; what was sampled for them is with them now."""
        self._settle(requests)
        following = step + self.block_size
        bucket = self.calendar.setdefault(following, [])
        for request in requests:
            if request.leave_step >= following:
                request.block_step = request.event_step = following
                bucket.append(request)
            elif request.leave_step > step:
                self._expect(request, following)

    def _expect(self, request: Request, block_step: int) -> None:
        request.block_step = block_step
        request.event_step = min(block_step, request.leave_step)
        self.calendar.setdefault(request.event_step, []).append(request)

    # ---- what was sampled

    def record(self, step: int, handles: Int32, tokens: Int32) -> Int32:
        """Keep one result, the next one after the last. Returns the table's row: a token per handle."""
        row: Int32 = self._sampled[step % len(self._sampled)]
        try:
            row[handles] = tokens
        except IndexError:
            self._widen(int(handles.max()) + 1)
            return self.record(step, handles, tokens)
        self.clock.acknowledged = step
        return row

    def _settle(self, requests: Sequence[Request]) -> None:
        """Give each the tokens that only the table has."""
        acknowledged = self.clock.acknowledged
        for synced in {request.synced_step for request in requests}:
            count = acknowledged - synced
            if count <= 0:
                continue
            members = [request for request in requests if request.synced_step == synced]
            rows = self._rows(synced + 1, count)
            raw = rows.take([request.handle for request in members], axis=1).T.tobytes()
            size = 4 * count
            for at, request in enumerate(members):
                request.synced_step = acknowledged
                request.tokens.extend(raw[at * size : at * size + size])

    def _rows(self, step: int, count: int) -> Int32:
        """The table's rows of ``count`` steps from ``step`` on; a view, unless they lie around its end."""
        start = step % len(self._sampled)
        if start + count <= len(self._sampled):
            return self._sampled[start : start + count]
        around = start + count - len(self._sampled)
        return np.concatenate([self._sampled[start:], self._sampled[:around]])

    def _widen(self, width: int) -> None:
        table = np.zeros((len(self._sampled), max(width, 2 * self._sampled.shape[1])), "<i4")
        table[:, : self._sampled.shape[1]] = self._sampled
        self._sampled = table

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        clock = self.clock
        for handle, request in self.batch.items():
            assert request.handle == handle and request.is_steady
            assert request.joined_step <= clock.sent < request.event_step, f"{request!r}: its event was missed"
            assert request in self.calendar[request.event_step], f"{request!r} is not in the calendar"
            unsettled = clock.acknowledged - request.synced_step
            assert unsettled < len(self._sampled), f"{request!r}: tokens were overwritten"
            ahead = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
            assert ahead == request.num_tokens_to_compute, f"{request!r}: {ahead} positions to compute"
