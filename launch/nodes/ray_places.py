"""The devices of a Ray cluster, given to engines. Ray places and starts node agents, and carries no data."""

import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path

from quire.launch.nodes.keys import HEAD_SECRET, write_pair
from quire.launch.nodes.ray_cluster import RayCluster, RayEngine, bundles_of
from quire.protocol.config import RankPlace
from quire.protocol.errors import ConfigError, QuireError
from quire.protocol.process.log import event_logger

log = event_logger("node")

FIRST_S = 90.0
"""Longest wait for the agents of an engine when the server starts."""
WAIT_S = 5.0
"""The same later: the fleet, which has other engines, asks again."""


class RayPlaces:
    """One placement group per engine, whose agents end when the engine gives back its places.

    An engine notices itself that an agent, or the node with it, is dead; it then ends, and gets another group on nodes
    that live. Implements ``fleet.places.Places``.

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
        self._folder = tempfile.TemporaryDirectory(prefix="quire-keys-")
        folder = Path(self._folder.name)
        write_pair(folder / HEAD_SECRET, folder / "head.key")
        self.head_key_file = str(folder / HEAD_SECRET)
        self._head_key = (folder / "head.key").read_text()
        resources = cluster.resources()
        if bundles_of(num_ranks, resources) is None or sum(resources) < num_ranks * num_engines:
            raise ConfigError(
                f"the Ray cluster is too small: {num_engines} engines of {num_ranks} ranks need "
                f"{num_engines * num_ranks} {cluster.resource}s, its {len(resources)} nodes have {sum(resources)}: add "
                f"nodes, or lower --data-parallel-size or --tensor-parallel-size"
            )
        self._threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="ray")
        self._placed: dict[int, Future[RayEngine]] = {n: self._begin() for n in range(num_engines)}
        """By engine: its agents, once they run."""
        self._first = set(range(num_engines))

    def take(self, engine: int) -> list[RankPlace] | str:
        if engine not in self._placed:
            self._placed[engine] = self._begin()
        try:
            made = self._placed[engine].result(FIRST_S if engine in self._first else WAIT_S)
        except NotYet:
            return f"Ray is still starting the agents of engine {engine}"
        except QuireError as error:
            del self._placed[engine]
            return str(error)
        finally:
            self._first.discard(engine)
        log.info("engine placed", engine=engine, nodes=" ".join(address for address, _ in made.agents))
        ranks_each = self._num_ranks // len(made.agents)
        return [RankPlace(address, n, key, ranks_each) for address, key in made.agents for n in range(ranks_each)]

    def give_back(self, engine: int) -> None:
        placing = self._placed.pop(engine, None)
        if placing is not None:
            placing.add_done_callback(self._stop)

    def close(self) -> None:
        for engine in list(self._placed):
            self.give_back(engine)
        self._threads.shutdown(cancel_futures=True)
        self._cluster.close()
        self._folder.cleanup()

    def _begin(self) -> "Future[RayEngine]":
        return self._threads.submit(self._start)

    def _start(self) -> RayEngine:
        bundles = bundles_of(self._num_ranks, self._cluster.resources())
        if bundles is None:
            raise ConfigError(f"no living nodes of the Ray cluster can hold the {self._num_ranks} ranks of an engine")
        return self._cluster.start_engine(bundles, self._head_key)

    def _stop(self, placed: "Future[RayEngine]") -> None:
        if not placed.cancelled() and placed.exception() is None:
            self._cluster.stop_engine(placed.result())
