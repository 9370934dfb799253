"""Requests that may be what ends the workers: one after the other runs alone, until it is cleared or condemned.

A worker that dies takes nothing with it, so its requests run again; but one of them may be why it died, and would end
the next worker as well. Who was in a step in flight at a death, and has got no token since, is counted. At two deaths
it is a *suspect*: it runs with nobody beside it until it gets a token. The worker's death at that is a proof; where
others got tokens between those two deaths, the second one is: the first may have been chance.

What may have ended *schedulers*, only front ends can know (launch/frontend/session.py). One of them at a time has a
*trial*: what it names runs with nobody beside it, and not before what ran has come to rest.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.scheduler_proc.requests.request import Request

ALONE_AFTER = 2
"""Deaths after which a request is run alone."""
CONDEMNED = "engine_fault: the workers died each time that this request ran, at last with nothing else beside it"


class _Entry(NamedTuple):
    """One request's deaths.

    Attributes:
        num_deaths: so often were the workers' last moments its own, since it last got a token.
        num_tokens: that it had then.
        in_a_row: nobody at all got a token between them.
        num_alone: how many of them were with nobody beside it.
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

    def __init__(self, num_tokens_of: Callable[[Request], int]) -> None:
        """``num_tokens_of``: known tokens of a request, those of one that cruises included."""
        self._num_tokens_of = num_tokens_of
        self._entries: dict[int, _Entry] = {}
        self._condemned: list[Request] = []
        self._total = -1
        self.trial_of: int | None = None
        """The front end that may try one of its requests, or is about to."""
        self.granted = False
        self._tried: Request | None = None

    def died_with(self, present: Sequence[Request], total: int) -> None:
        """The workers died with these in a step. ``total``: tokens that all requests have ever got."""
        alone = self._suspect if len(present) == 1 else None
        quiet, self._total = total == self._total, total
        # Who was not in a step is as it was: its turn to be run alone may not have come yet.
        self._entries = {handle: entry for handle, entry in self._entries.items() if self._is_due(entry)}
        for request in present:
            entry = self._entries.get(request.handle)
            if entry is None or entry.request is not request:
                self._entries[request.handle] = _Entry(request, self._num_tokens_of(request))
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

    def begin_trial(self, client: int) -> None:
        """Nobody runs until ``granted`` is set, and ``put_on_trial`` called."""
        self.trial_of = client

    def end_trial(self) -> None:
        self.trial_of = self._tried = None
        self.granted = False

    def put_on_trial(self, request: Request | None) -> None:
        """It runs alone from now on; None: it was refused."""
        self._tried = request

    @property
    def forbids_company(self) -> bool:
        """Whether only ``alone`` may run, if there is one."""
        return self.trial_of is not None or self._suspect is not None

    @property
    def alone(self) -> Request | None:
        """Who is to run with nobody beside it."""
        if self.trial_of is None:
            return self._suspect
        return None if self._tried is None or self._tried.status.is_finished else self._tried

    @property
    def _suspect(self) -> Request | None:
        """The first that has to be cleared of the workers' deaths."""
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
        return not entry.request.status.is_finished and self._num_tokens_of(entry.request) == entry.num_tokens
