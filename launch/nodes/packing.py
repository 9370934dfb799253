"""On which devices the ranks of an engine run: within one node if they fit, engines spread over nodes. No I/O."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quire.protocol.config import RankPlace
from quire.protocol.errors import counted


class FreeNode(NamedTuple):
    """A node that answers, the number of its devices, and those that no engine uses."""

    address: str
    node_key: str
    num_devices: int
    devices: list[int]


def place_ranks(nodes: Sequence[FreeNode], num_ranks: int) -> list[RankPlace] | None:
    """Return a place per rank, or None with too few free devices.

    The node with the most free devices is taken, and the first of several, so that engines spread; an engine that no
    node can hold takes the devices of as few nodes as possible. Ranks on one node are consecutive.
    """
    if sum(len(node.devices) for node in nodes) < num_ranks:
        return None
    places: list[RankPlace] = []
    for node in sorted(nodes, key=lambda each: -len(each.devices)):
        devices = sorted(node.devices)[: num_ranks - len(places)]
        places += [RankPlace(node.address, device, node.node_key, node.num_devices) for device in devices]
    return places


def too_few(nodes: Sequence[FreeNode], num_ranks: int, silent: Mapping[str, str]) -> str:
    """Return in one line why ``place_ranks`` has returned None.

    Args:
        silent: addresses that do not answer, and why.
    """
    if not nodes:
        others = f" (and {counted(len(silent) - 1, 'other node')})" if len(silent) > 1 else ""
        return next(iter(silent.values()), "no name of --nodes has an address") + others
    free, total = sum(len(node.devices) for node in nodes), sum(node.num_devices for node in nodes)
    others = f"; no answer from {', '.join(silent)}" if silent else ""
    return (
        f"an engine needs {counted(num_ranks, 'device')}, {free} of {total} on {counted(len(nodes), 'node')} are free"
        f"{others}: add nodes, or lower --data-parallel-size or --tensor-parallel-size"
    )
