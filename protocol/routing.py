"""Several engines behind one server: where they are, and how requests are routed to them."""

from typing import Literal, TypeAlias

import msgspec

MAX_ENGINES = 64
"""Most engines of one server: the router keeps a bit for each of them."""
KEY_BYTES = 8
"""Bytes of a block hash by which the router knows the block."""

RoutingPolicy: TypeAlias = Literal["cache", "least-load", "round-robin", "session"]
"""cache: to the engine where the request begins to decode first, as its cache and its queue say; least-load: to the
one with the least work; round-robin: to each in turn; session: to the engine of the job's last request, and
without one to the engine with the least work."""

PlaceState: TypeAlias = Literal["starting", "serving", "draining", "drained", "stopped", "failed"]
"""draining: it gets no new requests, and those that it has end or are moved; stopped: its process is ending because of
an order; failed: it restarts after a while."""


class EnginePlace(msgspec.Struct, array_like=True, frozen=True):
    """One engine of the server, as the fleet announces it to front ends and to the router.

    Attributes:
        engine: its number, from 0. A replacement of an engine has its number.
        directory: its socket directory, which no earlier engine had; empty while it is not running.
        incarnation: the incarnation of its scheduler.
        block_size: tokens of its KV blocks; 0 until it has been ready.
        num_starts: number of times that it was started.
        detail: why it is not serving, in one line; may be empty.
        device: what computes its steps: engines with equal ones are equally fast. Empty until it has been ready.
    """

    engine: int
    directory: str = ""
    incarnation: int = 0
    state: PlaceState = "starting"
    block_size: int = 0
    num_starts: int = 0
    detail: str = ""
    device: str = ""


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of the router process, which the fleet writes to the file ``router`` in its directory.

    Attributes:
        policy: a RoutingPolicy.
        trace: file that receives what the router consumes and chooses; empty for none.
        num_tenants: number of API keys; from 2 on, engines count the service that tenants get elsewhere.
        max_loras: adapters that an engine can compute with at once; 0 without adapters.
    """

    policy: RoutingPolicy = "cache"
    trace: str = ""
    num_tenants: int = 0
    max_loras: int = 0
    version: str = ""
