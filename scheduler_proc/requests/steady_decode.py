"""Steady decode: requests that need exactly one more token per step, without work per request and step.

In steady decode each step computes one position of a request and samples one token. So no field of it changes: its
counters follow from two step numbers, the last one sent and the last one answered. Its tokens are kept in a table with
one row per step, to which a whole result is written at once. A calendar lists the requests that are due in a step, for
a new block, their last token, or a draft; only these are handled.
"""

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from quire.protocol.wire.arrays import Int32
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.requests.step_clock import StepClock

SteadyBatch = dict[int, Request]
"""Requests in steady decode, by handle. A batch that a step in flight refers to is never modified."""

NEVER = 1 << 62
"""A step number that is never reached."""
_by_order = attrgetter("order")


class SteadyDecode:
    """The requests in steady decode, and their newest sampled tokens.

    Invariants (``check``): a member was scheduled, and sampled, in every step since it joined; at most
    ``block_size + depth + num_drafts`` of its tokens are only in the table; its next event is in a future step, and in
    the calendar.

    Attributes:
        calendar: by step, the members that are due; it may contain outdated entries.
    """

    def __init__(self, block_size: int, depth: int, num_drafts: int = 0) -> None:
        """
        Args:
            block_size: smallest block size of all KV groups.
            depth: maximum number of steps in flight.
            num_drafts: maximum number of drafts per request and step; a request that joins may hold blocks for them.
        """
        self.block_size = block_size
        self.clock = StepClock()
        self.batch: SteadyBatch = {}
        self._shared = False
        self.calendar: dict[int, list[Request]] = {}
        # A token stays in the table until the member's next block, so a quarter of the rows would suffice. More rows
        # make it rare that the rows to read wrap around the end.
        self._sampled = np.zeros((4 * (block_size + depth + 1 + num_drafts), 64), "<i4")

    def __len__(self) -> int:
        return len(self.batch)

    # ---- joining and leaving

    def join(self, request: Request, until: int, room: int) -> None:
        """Add a request from the step after the newest one on. The request must sample in the newest step.

        Args:
            until: step in which the request must leave; it may be a step that is never reached.
            room: positions after the newest step for which it has blocks, or a lower bound.
        """
        if request.handle >= self._sampled.shape[1]:
            self._widen(request.handle + 1)
        step = self.clock.sent
        tokens_ahead = request.num_tokens + request.num_output_placeholders
        # Steps are counted and not tokens: every step of a member computes one, so the step in which it must leave is
        # known when it joins, and nothing is looked at until then.
        request.last_step = step + request.max_total_tokens - tokens_ahead
        request.leave_step = min(request.last_step, until)
        self._own_batch()[request.handle] = request
        self._add_event(request, step + 1 + max(room, -request.num_computed_tokens % self.block_size))
        request.join_steady(self.clock)

    def leave(self, request: Request) -> None:
        """Remove a request, and bring its tokens and counters up to date."""
        self.sync_tokens((request,))
        del self._own_batch()[request.handle]
        request.event_step = request.block_step = 0
        request.leave_steady()

    def share_batch(self) -> SteadyBatch:
        """Return the current members for a record that keeps them; the next change copies the mapping first."""
        self._shared = True
        return self.batch

    def _own_batch(self) -> SteadyBatch:
        if self._shared:
            # Copied only at the first change after a record took it. A record per step would otherwise copy hundreds of
            # requests that are the same in the next one.
            self.batch = dict(self.batch)
            self._shared = False
        return self.batch

    # ---- due requests

    def due(self, step: int) -> list[Request]:
        """Return the members whose ``block_step`` or ``leave_step`` is ``step``, in order of admission."""
        found = []
        for request in self.calendar.pop(step, ()):
            if request.event_step == step:
                request.event_step = 0  # it may be in the list twice
                found.append(request)
        # In order of admission, as plain steps handle requests: which of two gets the last block must not depend on
        # whether they are in steady decode.
        found.sort(key=_by_order)
        return found

    def mark_handled(self, requests: Sequence[Request], step: int) -> None:
        """Continue with members that got their blocks for ``step``; moves their sampled tokens to them."""
        self.sync_tokens(requests)
        following = step + self.block_size
        bucket = self.calendar.setdefault(following, [])
        for request in requests:
            if request.leave_step >= following:
                request.block_step = request.event_step = following
                bucket.append(request)
            elif request.leave_step > step:
                self._add_event(request, following)

    def _add_event(self, request: Request, block_step: int) -> None:
        request.block_step = block_step
        request.event_step = min(block_step, request.leave_step)
        self.calendar.setdefault(request.event_step, []).append(request)

    # ---- sampled tokens

    def record(self, step: int, handles: Int32, tokens: Int32) -> Int32:
        """Store the tokens of the next result. Returns the row of the table, indexed by handle."""
        row: Int32 = self._sampled[step % len(self._sampled)]
        try:
            # The whole result with one assignment. Handles are small numbers that are used again, so that the table
            # stays narrow.
            row[handles] = tokens
        except IndexError:
            self._widen(int(handles.max()) + 1)
            return self.record(step, handles, tokens)
        self.clock.acknowledged = step
        return row

    def sync_tokens(self, requests: Sequence[Request]) -> None:
        """Append to each request its tokens that are only in the table."""
        acknowledged = self.clock.acknowledged
        # Members that joined together lack the tokens of the same steps, and are read as one block of the table. There
        # are few such groups, because requests are synced in groups too.
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
        """Return the rows of ``count`` steps from ``step`` on; a view, unless they wrap around the end."""
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
