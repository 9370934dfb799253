"""Requests that may be what ends the workers: one after the other runs alone, until it is cleared or condemned.

A worker that dies takes nothing with it, so its requests run again; but one of them may be why it died, and would end
the next worker as well. The deaths of each request that was in a step in flight, and has got no token since, are
counted. At two it is a *suspect*: it runs alone until it gets a token. The worker's death at that is a proof; where
others got tokens between those two deaths, the second one is: the first may have been chance.

A request that ends *schedulers* is found by its front end, which outlives them (launch/frontend/session.py).
"""

from collections.abc import Iterable
from typing import NamedTuple

from quire.scheduler_proc.core.in_flight import InFlightStep
from quire.scheduler_proc.requests.request import Request

ALONE_AFTER = 2
"""Deaths after which a request is run alone."""
CONDEMNED = "engine_fault: the workers died each time that this request ran, at last with nothing else beside it"


class _Entry(NamedTuple):
    """One request's deaths.

    Attributes:
        num_deaths: so often were the workers' last moments its own, since it last got a token.
        num_tokens: that it had then.
        in_a_row: no request at all got a token between them.
        num_alone: how many of them were with no other request in a step.
    """

    request: Request
    num_tokens: int
    num_deaths: int = 1
    in_a_row: bool = True
    num_alone: int = 0

    @property
    def is_proven(self) -> bool:
        """Where others got on between its deaths, one death alone may be chance."""
        return self.num_alone >= (1 if self.in_a_row else 2)


class Suspects:
    """Counts by handle. A handle is forgotten when its request has got a token, or has ended."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._condemned: list[Request] = []
        self._total = -1

    def record_death(self, steps: Iterable[InFlightStep], total: int) -> None:
        """The workers died with these steps in flight. ``total``: tokens that all requests have ever got."""
        found: dict[int, Request] = {}
        for step in steps:
            found |= step.requests()
        present = [request for request in found.values() if not request.status.is_finished]
        alone = self.alone if len(present) == 1 else None
        quiet, self._total = total == self._total, total
        # A request that was not in a step is as it was: its turn to be run alone may not have come yet.
        self._entries = {handle: entry for handle, entry in self._entries.items() if self._is_due(entry)}
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
            if entry.is_proven:
                del self._entries[request.handle]
                self._condemned.append(request)

    @property
    def alone(self) -> Request | None:
        """The first request that must be cleared of the workers' deaths, and runs alone until then; or None."""
        if not self._entries:
            return None
        for handle, entry in list(self._entries.items()):
            if not self._is_due(entry):
                del self._entries[handle]
            elif entry.num_deaths >= ALONE_AFTER:
                return entry.request
        return None

    def take_condemned(self) -> list[Request]:
        condemned, self._condemned = self._condemned, []
        return condemned

    def _is_due(self, entry: _Entry) -> bool:
        """It lives, and has got no token since."""
        return not entry.request.status.is_finished and entry.request.num_tokens == entry.num_tokens
