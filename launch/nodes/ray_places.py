"""The devices of a Ray cluster, given to engines. Ray places and starts node agents, and carries no data."""

import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from quire.launch.nodes.keys import HEAD_SECRET, write_pair
from quire.launch.nodes.ray_cluster import RayCluster, RayEngine, bundles_of
from quire.protocol.config import RankPlace
from quire.protocol.errors import ConfigError
from quire.protocol.process.log import event_logger

log = event_logger("node")

LATE_S = 90.0
"""Time after which the fleet gets a reason for an engine whose agents still do not run."""
CLOSE_S = 10.0
"""Longest wait for the ends of agents when the server stops. Ray ends later ones itself."""


class RayPlaces:
    """One placement group per engine, whose agents end when the engine gives back its places.

    An engine notices itself that an agent, or the node with it, is dead; it then ends, and gets another group on nodes
    that live. Calls of Ray are made in threads, because they do not return while the head of its cluster is dead.
    Implements ``fleet.places.Places``.

    Attributes:
        head_key_file: file with this machine's pair, made for this server.
    """

    def __init__(self, cluster: RayCluster, num_ranks: int, num_engines: int) -> None:
        """Begin to place the first engines.

        Args:
            num_ranks: ranks of an engine.

        Raises:
            ConfigError: the cluster is too small for them.
        """
        self._cluster = cluster
        self._num_ranks = num_ranks
        resources = cluster.resources()
        if bundles_of(num_ranks, resources) is None or sum(resources) < num_ranks * num_engines:
            raise ConfigError(
                f"the Ray cluster is too small: {num_engines} engines of {num_ranks} ranks need "
                f"{num_engines * num_ranks} {cluster.resource}s, its {len(resources)} nodes have {sum(resources)}: add "
                f"nodes, or lower --data-parallel-size or --tensor-parallel-size"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="quire-keys-")
        folder = Path(self._folder.name)
        write_pair(folder / HEAD_SECRET, folder / "head.key")
        self.head_key_file = str(folder / HEAD_SECRET)
        self._head_key = (folder / "head.key").read_text()
        self._placed = {number: self._begin() for number in range(num_engines)}
        """By engine: its agents, once they run, and since when they are being started."""
        self._stopping: set[Future[None]] = set()

    def take(self, engine: int) -> list[RankPlace] | str | None:
        if engine not in self._placed:
            self._placed[engine] = self._begin()
        placing, begun_at = self._placed[engine]
        if not placing.done():
            is_late = time.monotonic() >= begun_at + LATE_S
            return f"Ray has not started the agents of engine {engine} in {LATE_S:.0f} s" if is_late else None
        try:
            made = placing.result()
        except Exception as error:  # also Ray's own: the server's other engines serve on
            del self._placed[engine]
            return " ".join(str(error).split())
        log.info("engine placed", engine=engine, nodes=" ".join(address for address, _ in made.agents))
        ranks_each = self._num_ranks // len(made.agents)
        return [RankPlace(address, n, key, ranks_each) for address, key in made.agents for n in range(ranks_each)]

    def give_back(self, engine: int) -> None:
        if engine in self._placed:
            placing, _ = self._placed.pop(engine)
            stopping = _in_thread(partial(self._stop, placing))
            self._stopping.add(stopping)
            stopping.add_done_callback(self._stopping.discard)

    def close(self) -> None:
        for engine in list(self._placed):
            self.give_back(engine)
        wait(set(self._stopping), CLOSE_S)
        self._cluster.close()
        self._folder.cleanup()

    def _begin(self) -> "tuple[Future[RayEngine], float]":
        return _in_thread(self._start), time.monotonic()

    def _start(self) -> RayEngine:
        bundles = bundles_of(self._num_ranks, self._cluster.resources())
        if bundles is None:
            raise ConfigError(f"no living nodes of the Ray cluster can hold the {self._num_ranks} ranks of an engine")
        return self._cluster.start_engine(bundles, self._head_key)

    def _stop(self, placing: "Future[RayEngine]") -> None:
        """End the agents of an engine as soon as they run."""
        if placing.exception() is None:
            try:
                self._cluster.stop_engine(placing.result())
            except Exception as error:
                log.warning("agents did not end", reason=" ".join(str(error).split()))


def _in_thread(call: Callable[[], Any]) -> "Future[Any]":
    """Call ``call`` in a thread that does not keep this process from its end."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="ray", daemon=True).start()
    return future
