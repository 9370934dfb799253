"""Requests that may be what ends the workers: one after the other runs alone, until it is cleared or condemned.

A worker that dies takes nothing with it, so its requests run again; but one of them may be why it died, and would end
the next worker as well. Who was in a step in flight at a death, and has got no token since, is counted. At two deaths
it is a *suspect*: it runs with nobody beside it until it gets a token. The worker's death at that is a proof, unless
somebody has got a token since the death before: then it may have been chance, and it is tried alone once more.
"""

from collections.abc import Callable, Sequence

from quire.scheduler_proc.request import Request

ALONE_AFTER = 2
"""Deaths after which a request is run alone."""
CONDEMNED = "engine_fault: the workers died each time that this request ran, at last with nothing else beside it"


class Suspects:
    """Counts by handle. A handle is forgotten when its request has got a token, or has ended."""

    def __init__(self, num_tokens_of: Callable[[Request], int]) -> None:
        """``num_tokens_of``: known tokens of a request, those of one that cruises included."""
        self._num_tokens_of = num_tokens_of
        self._counts: dict[int, tuple[Request, int, int]] = {}
        """By handle: the request, deaths with it in a step, and how many tokens it had then."""
        self._condemned: list[Request] = []
        self._total = -1
        """Tokens that all requests had got at the last death."""

    def died_with(self, present: Sequence[Request], total: int) -> None:
        """The workers died with these in a step. ``total``: tokens that all requests have ever got."""
        alone = self.alone if len(present) == 1 and total == self._total else None
        self._total = total
        counts = {}
        for request in present:
            num_tokens = self._num_tokens_of(request)
            known = self._counts.get(request.handle)
            same = known is not None and known[0] is request and known[2] == num_tokens
            counts[request.handle] = (request, known[1] + 1 if same and known is not None else 1, num_tokens)
        if alone is not None and alone is present[0]:
            del counts[alone.handle]
            self._condemned.append(alone)
        # Who was not in a step is as it was: its turn to be run alone may not have come yet.
        self._counts = {handle: entry for handle, entry in self._counts.items() if self._counts_still(entry)} | counts
        for request in self._condemned:
            self._counts.pop(request.handle, None)

    @property
    def alone(self) -> Request | None:
        """Who is to run alone now; None: nobody is suspected."""
        if not self._counts:
            return None
        for handle, entry in list(self._counts.items()):
            if not self._counts_still(entry):
                del self._counts[handle]
            elif entry[1] >= ALONE_AFTER:
                return entry[0]
        return None

    def take_condemned(self) -> list[Request]:
        condemned, self._condemned = self._condemned, []
        return condemned

    def _counts_still(self, entry: tuple[Request, int, int]) -> bool:
        """It lives, and has got no token since."""
        request, _, num_tokens = entry
        return not request.status.is_finished and self._num_tokens_of(request) == num_tokens
