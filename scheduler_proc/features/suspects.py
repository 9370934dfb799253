"""Suspects: requests that may crash the workers. They run alone, one after the other, until cleared or confirmed.

When workers die, their requests are retried; but one of them may be the cause, and would crash the next workers too.
For each request in a step in flight, the worker deaths since its last token are counted. A request with two deaths is a
*suspect*: it runs alone until it gets a token. If the workers die while it runs alone, it is confirmed as the cause. If
other requests got tokens between its deaths, the first death alone may be chance, and a second one is required.

A request that crashes *schedulers* is found by its front end, which survives them (frontend/engine/session.py).
"""

from typing import NamedTuple

from quire.protocol.wire.front_end_messages import EndReason
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.feature import Feature
from quire.scheduler_proc.core.step import StepPlan
from quire.scheduler_proc.requests.reasons import PreemptReason, WaitReason
from quire.scheduler_proc.requests.request import Request

ALONE_AFTER = 2
"""Number of worker deaths after which a request runs alone."""
SUSPECT_DETAIL = "engine_fault: the workers died each time this request ran, also when it ran alone"


class _Entry(NamedTuple):
    """Worker deaths of one request since its last token.

    Attributes:
        num_tokens: number of its tokens at the first of these deaths.
        num_deaths: worker deaths while it was in a step in flight.
        in_a_row: no request got a token between these deaths.
        num_alone: deaths while it ran alone as a suspect.
    """

    request: Request
    num_tokens: int
    num_deaths: int = 1
    in_a_row: bool = True
    num_alone: int = 0

    @property
    def is_confirmed(self) -> bool:
        """Whether the request is confirmed as the cause: one death alone, or two if others got tokens in between."""
        return self.num_alone >= (1 if self.in_a_row else 2)


class Suspects(Feature):
    """Counts worker deaths by handle. An entry is removed when its request gets a token or ends."""

    name = "suspects"

    def __init__(self, core: Core) -> None:
        self._core = core
        self._entries: dict[int, _Entry] = {}
        self._confirmed: list[Request] = []
        self._total = -1

    def before_epoch(self) -> None:
        """Count a death of the workers for the requests of the steps in flight, which are dropped after this."""
        found: dict[int, Request] = {}
        for step in self._core.in_flight.records:
            found |= step.requests()
        total = self._core.num_results
        present = [request for request in found.values() if not request.status.is_finished]
        alone = self.alone if len(present) == 1 else None
        # A result between two deaths shows that the workers can work: only deaths without any in between speak against
        # what all of them had in common.
        quiet, self._total = total == self._total, total
        # Entries of requests outside of these steps stay: their turn to run alone may still come.
        self._entries = {handle: entry for handle, entry in self._entries.items() if self._still_counts(entry)}
        for request in present:
            entry = self._entries.get(request.handle)
            # Handles are used again, so the entry may be that of an earlier request.
            if entry is None or entry.request is not request:
                self._entries[request.handle] = _Entry(request, request.num_tokens)
                continue
            entry = entry._replace(
                num_deaths=entry.num_deaths + 1,
                in_a_row=entry.in_a_row and (quiet or entry.num_deaths >= ALONE_AFTER),
                num_alone=entry.num_alone + (request is alone),
            )
            self._entries[request.handle] = entry
            if entry.is_confirmed:
                del self._entries[request.handle]
                self._confirmed.append(request)

    def begin_plan(self, plan: StepPlan) -> None:
        """Preempt all requests that need more steps, except the suspect.

        After the beams of searches have been suspended: those have no blocks to give up.
        """
        if not self._entries or (suspect := self.alone) is None:
            return
        plan.alone, plan.others_wait = suspect, WaitReason.SUSPECT
        for other in [request for request in self._core.table.running.values() if request is not suspect]:
            self._core.table.leave_steady(other)
            if not other.needs_no_more_steps:
                self._core.preempt(other, plan, suspect, PreemptReason.SUSPECT)

    @property
    def alone(self) -> Request | None:
        """Return the suspect that must run alone now, or None."""
        if not self._entries:
            return None
        for handle, entry in list(self._entries.items()):
            if not self._still_counts(entry):
                del self._entries[handle]
            elif entry.num_deaths >= ALONE_AFTER:
                return entry.request
        return None

    def new_epoch(self, *, new_workers: bool) -> bool:
        """End the requests that were confirmed as the cause, when no other feature holds them for the old workers."""
        confirmed, self._confirmed = self._confirmed, []
        for request in confirmed:
            self._core.finish(request, EndReason.ERROR, detail=SUSPECT_DETAIL)
        return bool(confirmed)

    def _still_counts(self, entry: _Entry) -> bool:
        """Return whether the entry still counts: its request has not ended and got no token since its first death.

        The caller removes the entry otherwise. A feature may take tokens, which are then not appended: a request that
        can get no more has run, and waits for others, which would wait for ever for one that runs alone.
        """
        request = entry.request
        can_get_more = request.num_tokens < request.max_total_tokens
        return not request.status.is_finished and request.num_tokens == entry.num_tokens and can_get_more
