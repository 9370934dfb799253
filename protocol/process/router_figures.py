"""The file in which the router publishes its figures once a second, for the front ends' metrics."""

from pathlib import Path

import msgspec

from quire.protocol.process.restarts import replace_file

FILE = "router-figures"


class RouterFigures(msgspec.Struct, kw_only=True):
    """Counters since the router's start, and present sizes.

    Attributes:
        policy: a RoutingPolicy.
        choices: (engine, reason, number) of chosen engines; the reasons are those of Routed.
        num_unplaced: questions while no engine accepted requests.
        indexed_blocks: blocks of each engine in the index. An engine without an entry is not indexed: requests are
            routed to it by its load.
        not_indexed: why an engine is not indexed, by its number.
        index_bytes: memory of the index.
        gaps: times that events of an engine were missing and were requested once more, by engine.
        damaged: times that an engine's contents were dropped because of a damaged message, by engine.
        cpu_seconds: CPU time of the process.
    """

    policy: str = ""
    choices: list[tuple[int, str, int]] = []
    num_unplaced: int = 0
    indexed_blocks: dict[int, int] = {}
    not_indexed: dict[int, str] = {}
    index_bytes: int = 0
    gaps: dict[int, int] = {}
    damaged: dict[int, int] = {}
    cpu_seconds: float = 0.0


def write_router_figures(directory: Path, figures: RouterFigures) -> None:
    replace_file(directory / FILE, figures)


def read_router_figures(directory: Path) -> RouterFigures | None:
    """Return the newest figures; None without a router, or before it has written any."""
    try:
        return msgspec.json.decode((directory / FILE).read_bytes(), type=RouterFigures)
    except (OSError, msgspec.DecodeError):
        return None
