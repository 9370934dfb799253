"""The devices of nodes, given to engines: what the fleet asks before it starts one."""

import itertools
import threading
import time
from pathlib import Path
from typing import Any

from quire.launch.nodes.keys import HEAD_SECRET, load_head_keys, load_node_key
from quire.launch.nodes.node_link import CONNECT_S
from quire.launch.nodes.node_thread import NodeThread
from quire.launch.nodes.packing import FreeNode, place_ranks, too_few
from quire.launch.nodes.sources import RESOLVE_S, NodeSources, Resolver
from quire.protocol.config import RankPlace
from quire.protocol.process.log import event_logger
from quire.protocol.wire.node_messages import NodeInfo

log = event_logger("node")

FIRST_ANSWERS_S = CONNECT_S + 1.0
"""Longest wait for the nodes' first answers."""


class NodePlaces:
    """Keeps a link to every node, to know which ones answer, and which of their devices engines use.

    A node that does not answer has no free device. Its engines notice themselves that they have lost it, and the fleet
    then gives back their places. Implements ``fleet.places.Places``.

    Attributes:
        head_key_file: file with this machine's pair, for the engines' own links.
    """

    def __init__(self, sources: NodeSources, keys: Path, num_ranks: int) -> None:
        """
        Args:
            keys: the folder ``--node-keys``.
            num_ranks: ranks of an engine.

        Raises:
            ConfigError: the keys cannot be used.
        """
        self.head_key_file = str(keys / HEAD_SECRET)
        self._node_key = load_node_key(keys)
        self._num_ranks = num_ranks
        self._changed = threading.Condition()
        self._known: dict[str, NodeInfo | str] = {}
        """The answer of each node, or why it does not answer; no entry before either."""
        self._addresses: list[str] = []
        self._taken: dict[int, list[RankPlace]] = {}
        """By engine."""
        self._ends = itertools.count(1)
        self._last_end: dict[str, int] = {}
        """By address: the number of the last end of an engine on it."""
        self._resolver = Resolver(sources)
        self._thread = NodeThread(load_head_keys(keys / HEAD_SECRET), self)
        self._is_closed = threading.Event()
        self._refresh()
        if sources.names:
            threading.Thread(target=self._follow_names, name="node names", daemon=True).start()
        self._wait_until = time.monotonic() + FIRST_ANSWERS_S

    # ---- fleet.places.Places

    def take(self, engine: int) -> list[RankPlace] | str:
        with self._changed:
            while any(each not in self._known for each in self._addresses):
                if not self._changed.wait(max(0.0, self._wait_until - time.monotonic())):
                    break
            nodes = self._free()
            places = place_ranks(nodes, self._num_ranks)
            if places is None:
                known = {each: self._known.get(each, f"the node {each} does not answer") for each in self._addresses}
                silent = {each: reason for each, reason in known.items() if isinstance(reason, str)}
                return too_few(nodes, self._num_ranks, silent)
            self._taken[engine] = places
            return places

    def give_back(self, engine: int) -> None:
        with self._changed:
            end = next(self._ends)
            for place in self._taken.pop(engine, []):
                self._last_end[place.node] = end

    def close(self) -> None:
        """Disconnect from all nodes."""
        self._is_closed.set()
        self._thread.close()

    def _free(self) -> list[FreeNode]:
        """Return the nodes that answer, with their free devices. The node on which an engine has ended last comes last:
        the engine may not be able to run there."""
        used = {(place.node, place.device) for places in self._taken.values() for place in places}
        nodes = []
        for address in sorted(self._addresses, key=lambda each: (self._last_end.get(each, 0), each)):
            if isinstance(info := self._known.get(address), NodeInfo):
                free = [device for device in range(info.num_devices) if (address, device) not in used]
                nodes.append(FreeNode(address, self._node_key, info.num_devices, free))
        return nodes

    # ---- names

    def _follow_names(self) -> None:
        while not self._is_closed.wait(RESOLVE_S):
            self._refresh()

    def _refresh(self) -> None:
        """Connect to the nodes that the sources have now, and disconnect from others."""
        addresses = self._resolver.addresses()
        with self._changed:
            gone, new = set(self._addresses) - set(addresses), set(addresses) - set(self._addresses)
            self._addresses = addresses
            for address in gone:
                self._known.pop(address, None)
        for address in gone:
            self._thread.remove(address)
        for address in new:
            self._thread.add(address, self._node_key)

    # ---- node_thread.Handler

    def ready(self, address: str, info: NodeInfo) -> None:
        log.info("node connected", node=address, host=info.host, devices=info.num_devices)
        self._now_is(address, info)

    def lost(self, address: str, reason: str, *, is_final: bool) -> None:
        if self._known.get(address) != reason:
            log.error("a node cannot be used", node=address, reason=reason)
        self._now_is(address, reason)

    def received(self, address: str, message: Any) -> None:
        """No effect: no worker belongs to these links."""

    def _now_is(self, address: str, state: NodeInfo | str) -> None:
        with self._changed:
            if address in self._addresses:  # not a link that is being removed
                self._known[address] = state
                self._changed.notify_all()
