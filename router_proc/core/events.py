"""Events inside the router process. The Router consumes them and the messages of front ends; a trace has both."""

from typing import TypeAlias

from quire.protocol.routing import EnginePlace
from quire.protocol.wire.kv_events import KVEvent
from quire.protocol.wire.link_messages import Message
from quire.protocol.wire.router_messages import Placed, Progress, Route


class EnginesKnown(Message, frozen=True, tag=64):
    """These are all engines of the server now."""

    engines: list[EnginePlace]


class CacheChanged(Message, frozen=True, tag=65):
    """Changes of an engine's KV cache, in order, of the counted group only (``index.counted_group``)."""

    engine: int
    events: list[KVEvent]


class CacheForgotten(Message, frozen=True, tag=66):
    """An engine's contents are unknown: its events follow from the first, or none do."""

    engine: int


class EngineMeasured(Message, frozen=True, tag=67):
    """The size and the speed of an engine, as measured.

    Attributes:
        pace: the time of its steps over the mean of all engines for like steps; 1 while it is not known.
        max_blocks: most blocks that its caches hold in all media; 0 while it is not known.
    """

    engine: int
    pace: float = 1.0
    max_blocks: int = 0


class FrontEndDropped(Message, frozen=True, tag=68):
    """A front end has disconnected. Its requests are unknown until it sends Placed on another link."""

    client: int


RouterEvent: TypeAlias = (
    Route | Progress | Placed | EnginesKnown | CacheChanged | CacheForgotten | EngineMeasured | FrontEndDropped
)
