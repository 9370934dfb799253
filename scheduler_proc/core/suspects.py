"""Suspects: requests that may crash the workers. They run alone, one after the other, until cleared or confirmed.

When workers die, their requests are retried; but one of them may be the cause, and would crash the next workers too.
For each request in a step in flight, the worker deaths since its last token are counted. A request with two deaths is a
*suspect*: it runs alone until it gets a token. If the workers die while it runs alone, it is confirmed as the cause. If
other requests got tokens between its deaths, the first death alone may be chance, and a second one is required.

A request that crashes *schedulers* is found by its front end, which survives them (frontend/engine/session.py).
"""

from collections.abc import Iterable
from typing import NamedTuple

from quire.scheduler_proc.core.in_flight import InFlightStep
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


class Suspects:
    """Counts worker deaths by handle. An entry is removed when its request gets a token or ends."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._confirmed: list[Request] = []
        self._total = -1

    def record_death(self, steps: Iterable[InFlightStep], total: int) -> None:
        """Count a death of the workers with ``steps`` in flight. ``total``: ``Scheduler.num_results``."""
        found: dict[int, Request] = {}
        for step in steps:
            found |= step.requests()
        present = [request for request in found.values() if not request.status.is_finished]
        alone = self.alone if len(present) == 1 else None
        quiet, self._total = total == self._total, total
        # Entries of requests outside of these steps stay: their turn to run alone may still come.
        self._entries = {handle: entry for handle, entry in self._entries.items() if self._still_counts(entry)}
        for request in present:
            entry = self._entries.get(request.handle)
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

    @property
    def alone(self) -> Request | None:
        """The suspect that must run alone now, or None."""
        if not self._entries:
            return None
        for handle, entry in list(self._entries.items()):
            if not self._still_counts(entry):
                del self._entries[handle]
            elif entry.num_deaths >= ALONE_AFTER:
                return entry.request
        return None

    def take_confirmed(self) -> list[Request]:
        confirmed, self._confirmed = self._confirmed, []
        return confirmed

    def _still_counts(self, entry: _Entry) -> bool:
        """Return whether the entry still counts: its request has not ended and got no token since its first death.

        The caller removes the entry otherwise.
        """
        return not entry.request.status.is_finished and entry.request.num_tokens == entry.num_tokens
