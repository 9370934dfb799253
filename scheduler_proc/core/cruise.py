"""Requests that need exactly one more token per step, kept at no cost per request and step.

While a request cruises, each step computes one position of it and samples one token. So its counters need not be
touched: they follow from two step numbers, the last one sent and the last one answered. Its tokens wait in a table
with one row per step, into which a whole result goes at once. Only when something is due is the request looked at:
its next block, its last token, or a draft to try. A calendar says who is due when.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from quire.protocol.wire.arrays import Int32
from quire.scheduler_proc.requests.request import Request

Roster = dict[int, Request]
"""Who cruises, by handle. Never changed once a step in flight refers to it."""

_by_order = attrgetter("order")


class Progress(NamedTuple):
    """What a request's counters would be if it did not cruise."""

    num_tokens: int
    num_computed_tokens: int
    num_acknowledged_tokens: int
    num_output_placeholders: int
    num_in_flight: int


class Cruise:
    """Who cruises, since when, and what was sampled for them.

    Invariants (``check``): a member was scheduled, and sampled, in every step since it joined; at most
    ``block_size + depth + num_drafts`` of its tokens are in the table only; its next event lies ahead, and in the
    calendar.
    """

    def __init__(self, block_size: int, depth: int, num_drafts: int = 0) -> None:
        """
        Args:
            block_size: positions between two blocks, of the group with the smallest.
            depth: of the pipeline.
            num_drafts: most drafts of a request in a step: who joins may hold blocks for so many more positions.
        """
        self.block_size = block_size
        self.sent = 0
        self.acknowledged = 0
        self.roster: Roster = {}
        self._shared = False
        self._calendar: dict[int, list[Request]] = {}
        # A token stays here from its result to the member's next block, so a quarter of the rows would do; with more,
        # the rows that are wanted seldom lie around the end.
        self._sampled = np.zeros((4 * (block_size + depth + 1 + num_drafts), 64), "<i4")

    def __len__(self) -> int:
        return len(self.roster)

    # ---- coming and going

    def join(self, request: Request, step: int, until: int, room: int) -> None:
        """From the step after ``step`` on. It samples in ``step``, which is not counted as sent yet.

        Its outstanding samples, at most one per step in flight, are those of the last steps up to ``step``.

        Args:
            until: the step in which it is to be looked at again, which may never come.
            room: positions that it has blocks for after ``step``; fewer where that is not known.
        """
        if request.handle >= self._sampled.shape[1]:
            self._widen(request.handle + 1)
        request.cruising = True
        request.joined_step = step
        request.synced_step = step - request.num_output_placeholders
        tokens_ahead = request.num_tokens + request.num_output_placeholders
        request.last_step = step + request.max_total_tokens - tokens_ahead
        request.leave_step = min(request.last_step, until)
        self._own_roster()[request.handle] = request
        self._expect(request, step + 1 + max(room, -request.num_computed_tokens % self.block_size))

    def leave(self, request: Request) -> None:
        """Bring the counters and tokens up to date; from now on they are the request's own."""
        told = self.progress(request)
        self._settle((request,))
        del self._own_roster()[request.handle]
        request.cruising = False
        request.num_computed_tokens = told.num_computed_tokens
        request.num_acknowledged_tokens = told.num_acknowledged_tokens
        request.num_output_placeholders = told.num_output_placeholders
        request.num_in_flight = told.num_in_flight

    def progress(self, request: Request) -> Progress:
        """A member's counters as they are now; any other request's own."""
        if not request.cruising:
            return Progress(
                request.num_tokens,
                request.num_computed_tokens,
                request.num_acknowledged_tokens,
                request.num_output_placeholders,
                request.num_in_flight,
            )
        joined = request.joined_step
        unanswered = self.sent - max(self.acknowledged, joined)
        return Progress(
            request.num_tokens + self._num_unsettled(request),
            request.num_computed_tokens + self.sent - joined,
            request.num_acknowledged_tokens + max(self.acknowledged - joined, 0),
            self.sent - max(self.acknowledged, request.synced_step),
            request.num_in_flight + unanswered,
        )

    def share_roster(self) -> Roster:
        """The members now, for a record that keeps them: they are copied before they change."""
        self._shared = True
        return self.roster

    def _own_roster(self) -> Roster:
        if self._shared:
            self.roster = dict(self.roster)
            self._shared = False
        return self.roster

    # ---- what is due

    def due(self, step: int) -> list[Request]:
        """Members of whom ``step`` is the ``block_step`` or the ``leave_step``, in order of admission."""
        found = []
        for request in self._calendar.pop(step, ()):
            if request.event_step == step and request.cruising:
                request.event_step = 0  # it may stand in the list twice
                found.append(request)
        found.sort(key=_by_order)
        return found

    def handled(self, requests: Sequence[Request], step: int) -> None:
        """They got their blocks for ``step`` and cruise on; what was sampled for them is with them now."""
        self._settle(requests)
        following = step + self.block_size
        bucket = self._calendar.setdefault(following, [])
        for request in requests:
            if request.leave_step >= following:
                request.block_step = request.event_step = following
                bucket.append(request)
            elif request.leave_step > step:
                self._expect(request, following)

    def _expect(self, request: Request, block_step: int) -> None:
        request.block_step = block_step
        request.event_step = min(block_step, request.leave_step)
        self._calendar.setdefault(request.event_step, []).append(request)

    @property
    def next_due(self) -> int:
        """No step before this one has anybody to be looked at. O(steps in the calendar)."""
        return min(self._calendar, default=self.sent + 1)

    def go_on_after(self, step: int) -> None:
        """For one that nobody cruises in: ``step`` was sent, and answered."""
        self.sent = self.acknowledged = step

    # ---- what was sampled

    def coast(self, count: int, handles: Int32) -> None:
        """As many results as steps, each with token 0 for each of ``handles``; nobody is due in these steps."""
        rows = np.arange(self.acknowledged + 1, self.acknowledged + 1 + count) % len(self._sampled)
        self._sampled[np.ix_(rows, handles)] = 0
        self.acknowledged += count
        self.sent += count

    def record(self, step: int, handles: Int32, tokens: Int32) -> Int32:
        """Keep one result, the next one after the last. Returns the table's row: a token per handle."""
        row: Int32 = self._sampled[step % len(self._sampled)]
        try:
            row[handles] = tokens
        except IndexError:
            self._widen(int(handles.max()) + 1)
            return self.record(step, handles, tokens)
        self.acknowledged = step
        return row

    def record_unknown(self, step: int) -> Int32:
        """Count a result whose tokens are not known: what the row, which is returned, has for them means nothing."""
        self.acknowledged = step
        row: Int32 = self._sampled[step % len(self._sampled)]
        return row

    def _num_unsettled(self, request: Request) -> int:
        return max(self.acknowledged - request.synced_step, 0)

    def _settle(self, requests: Sequence[Request]) -> None:
        """Give each the tokens that only the table has."""
        for synced in {request.synced_step for request in requests}:
            count = self.acknowledged - synced
            if count <= 0:
                continue
            members = [request for request in requests if request.synced_step == synced]
            rows = self._rows(synced + 1, count)
            raw = rows.take([request.handle for request in members], axis=1).T.tobytes()
            size = 4 * count
            for at, request in enumerate(members):
                request.synced_step = self.acknowledged
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
        for handle, request in self.roster.items():
            told = self.progress(request)
            assert request.handle == handle and request.cruising
            assert request.joined_step <= self.sent < request.event_step, f"{request!r}: its event was missed"
            assert request in self._calendar[request.event_step], f"{request!r} is not in the calendar"
            assert 0 <= self._num_unsettled(request) < len(self._sampled), f"{request!r}: tokens were overwritten"
            assert told.num_computed_tokens == told.num_tokens + told.num_output_placeholders - 1
            assert told.num_acknowledged_tokens <= told.num_computed_tokens
