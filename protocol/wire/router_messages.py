"""Messages between a front end and the router. The front end asks; it then sends the request to the engine itself.

A front end numbers its requests; such a number (``ticket``) names a request on all of its links to routers, also when
the request is moved to another engine, and is never used for another request.
"""

from typing import TypeAlias

from quire.protocol.wire.front_end_messages import AddRequest
from quire.protocol.wire.link_messages import Heartbeat, Hello, Message, Refused, Welcome

ClientJob: TypeAlias = tuple[int, str]
"""A job of a tenant, and its id."""


class Route(Message, frozen=True, tag=60):
    """Ask which engine is to get a request.

    Attributes:
        num_tokens: tokens that are known, which are computed unless they are cached: the prompt, and for a request that
            is moved also its output so far.
        keys: the first ``routing.KEY_BYTES`` bytes of the hash of each full block, concatenated; empty under policies
            that do not look at the cache.
        job_id: job of which the request is a turn, or "".
        tenant: as of AddRequest.
        adapter: digest of the LoRA adapter; empty without one.
        excluded: engines that must not be chosen, if there is another.
    """

    ticket: int
    num_tokens: int
    keys: bytes = b""
    job_id: str = ""
    tenant: int = 0
    adapter: bytes = b""
    excluded: list[int] = []

    @property
    def job(self) -> ClientJob:
        return self.tenant, self.job_id

    @classmethod
    def of(cls, ticket: int, request: AddRequest, num_tokens: int, keys: bytes, excluded: list[int]) -> "Route":
        digest = b"" if request.adapter is None else request.adapter.digest
        return cls(ticket, num_tokens, keys, request.job_id, request.tenant, digest, excluded)


class Routed(Message, frozen=True, tag=61):
    """The answer to a Route.

    Attributes:
        engine: the chosen engine, or -1 if none accepts requests now: ask again when one does.
        reason: why it was chosen: cached (it has more of the request than others), load (least work), session (it had
            the last request of the job), adapter (it has the adapter loaded), turn (round-robin), only (no other
            accepts requests).
        num_cached_tokens: tokens of the request that it has cached, as far as the router knows.
    """

    ticket: int
    engine: int
    reason: str
    num_cached_tokens: int = 0


class Progress(Message, frozen=True, tag=62):
    """What has happened to requests since the last Progress.

    Attributes:
        started: tickets of requests that got their first result on their present engine.
        ended: tickets of requests that have ended, or have left their engine.
    """

    started: list[int]
    ended: list[int]


class Placed(Message, frozen=True, tag=63):
    """A request that is on an engine although this router has not chosen so: it was placed by an earlier router, or by
    the front end itself while there was none.
    """

    ticket: int
    engine: int
    num_tokens: int
    job_id: str = ""
    tenant: int = 0
    has_started: bool = False

    @property
    def job(self) -> ClientJob:
        return self.tenant, self.job_id

    @classmethod
    def of(cls, ticket: int, engine: int, request: AddRequest, num_tokens: int, has_started: bool) -> "Placed":
        return cls(ticket, engine, num_tokens, request.job_id, request.tenant, has_started)


FrontEndToRouter: TypeAlias = Hello | Heartbeat | Route | Progress | Placed
RouterToFrontEnd: TypeAlias = Welcome | Refused | Heartbeat | Routed
