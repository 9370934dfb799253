"""Orders of administrators to a server with several engines, and which ones are refused. No I/O.

A front end checks an order against the newest list of engines that it has, to answer at once; the fleet checks it, too.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from quire.protocol.errors import InvalidRequest, QuireError
from quire.protocol.routing import MAX_ENGINES, EnginePlace

Order: TypeAlias = Literal["add", "drain", "resume", "remove", "restart"]
"""add: start another engine; drain: move the requests of an engine to others, and give it no new ones; resume: give a
drained one new requests; remove: drain it and end it; restart: drain it, end it and restart it; without an engine
all of them, one after the other."""
ORDERS: tuple[str, ...] = get_args(Order)
ALL = -1
"""In place of the number of an engine: all engines."""


class OrderRefused(QuireError):
    """The order cannot be carried out now, for the reason given."""


def check_order(order: str, engine: int, places: Sequence[EnginePlace]) -> None:
    """Raise an error unless the order can be carried out.

    Args:
        engine: number of the engine, or ALL.

    Raises:
        InvalidRequest: the order or the engine does not exist.
        OrderRefused: the engines do not allow it now.
    """
    if order not in ORDERS:
        raise InvalidRequest(f"the order must be one of {', '.join(ORDERS)} (got {order[:64]!r})", "order")
    if order == "add":
        if len(places) >= MAX_ENGINES:
            raise OrderRefused(f"a server has at most {MAX_ENGINES} engines: remove one first")
        return
    if order == "restart" and engine == ALL:
        num_usable = sum(each.state in ("serving", "starting") for each in places)
        if num_usable < 2:
            raise OrderRefused(
                f"a rolling restart needs at least 2 engines that serve or start (got {num_usable}): add or resume one "
                "first"
            )
        return
    place = next((each for each in places if each.engine == engine), None)
    if place is None:
        numbers = ", ".join(str(each.engine) for each in places)
        raise InvalidRequest(f"engine must be one of {numbers} (got {engine})", "engine", "engine_not_found")
    leaving = ("draining", "drained", "stopped")
    if order == "remove" and all(each.state in leaving for each in places if each is not place):
        raise OrderRefused(f"engine {engine} is the last one that is not drained: it cannot be removed")
    if order in ("drain", "resume"):
        allowed = ("serving", "draining", "drained")
        if place.state not in allowed:
            raise OrderRefused(f"engine {engine} is {place.state}: {order} needs an engine that is serving or drained")
    if order == "restart" and place.state in ("starting", "stopped"):
        raise OrderRefused(f"engine {engine} is {place.state}: it starts anyway")
    if order != "resume" and place.state in ("serving", "starting") and not is_another_serving(places, engine):
        raise OrderRefused(
            f"no other engine is serving: to {order} engine {engine} would leave none (add or resume one first)"
        )


def is_another_serving(places: Sequence[EnginePlace], engine: int) -> bool:
    return any(each.state == "serving" and each.engine != engine for each in places)
