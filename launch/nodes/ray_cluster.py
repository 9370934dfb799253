"""The calls of Ray that Quire needs: resources, placement groups and actors. Imports Ray only when it is used."""

import logging
import os
import re
import socket
from collections.abc import Sequence
from typing import Any

from quire.launch.nodes.node_link import CONNECT_S
from quire.launch.nodes.ray_agent import START_S, RayAgent
from quire.protocol.errors import ConfigError, EngineError
from quire.version import install_command

PLACE_S = 20.0
"""Time limit for Ray to find the resources of a placement group."""
FOREVER_S = "2000000000"


class RayEngine:
    """The agents of one engine: a placement group, and an actor in each of its bundles."""

    def __init__(self, group: Any, actors: list[Any], agents: list[tuple[str, str]]) -> None:
        """``agents``: address and public key of each."""
        self.group = group
        self.actors = actors
        self.agents = agents


class RayCluster:
    """A connection to a cluster that runs already. Methods may be called from any thread."""

    def __init__(self, resource: str) -> None:
        """
        Args:
            resource: what a rank needs one of: GPU or CPU.

        Raises:
            ConfigError: Ray is not installed, or there is no cluster at ``RAY_ADDRESS``.
        """
        # Ray would end this process when the head of its cluster is dead for a minute, and with it all engines.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", FOREVER_S)
        try:
            import ray
        except ImportError:
            raise ConfigError(f"--nodes ray needs Ray: {install_command('ray')}") from None
        self._ray: Any = ray
        self.resource = resource
        address = os.environ.get("RAY_ADDRESS", "auto")
        try:
            _check_reachable(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"--nodes ray: no Ray cluster at {address}: start one with `ray start --head`, or set RAY_ADDRESS "
                f"({reason})"
            ) from None

    def resources(self) -> list[int]:
        """Return how many ranks each living node can hold, used or not."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        return [int(node["Resources"].get(self.resource, 0)) for node in alive]

    def start_engine(self, bundles: Sequence[int], head_key: str) -> RayEngine:
        """Start an agent per bundle. Waits until they listen.

        Args:
            bundles: number of ranks of each; each bundle gets a node of its own.
            head_key: content of the head's public key file.

        Raises:
            EngineError: Ray has not enough free resources, or an agent does not start.
        """
        from ray.util.placement_group import placement_group

        strategy = "STRICT_PACK" if len(bundles) == 1 else "STRICT_SPREAD"
        group = placement_group([{self.resource: float(size)} for size in bundles], strategy=strategy)
        engine = RayEngine(group, [], [])
        try:
            if not group.wait(PLACE_S):
                raise EngineError(self._no_place(bundles))
            for index, size in enumerate(bundles):
                engine.actors.append(self._actor(group, index, size))
            started = [actor.start.remote(head_key, n) for actor, n in zip(engine.actors, bundles, strict=True)]
            engine.agents = self._ray.get(started, timeout=START_S)
        except self._ray.exceptions.RayError as error:
            self.stop_engine(engine)
            reason = str(error).strip().splitlines()[-1]
            raise EngineError(f"Ray cannot start the agents of an engine: {reason}") from None
        except BaseException:
            self.stop_engine(engine)
            raise
        return engine

    def stop_engine(self, engine: RayEngine) -> None:
        """End the actors, and their agents with them, and give the resources back."""
        from ray.util.placement_group import remove_placement_group

        for actor in engine.actors:
            self._ray.kill(actor)
        remove_placement_group(engine.group)

    def close(self) -> None:
        self._ray.shutdown()

    def _options(self, group: Any, index: int, size: float) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        numbers = {"num_gpus": size, "num_cpus": 0} if self.resource == "GPU" else {"num_cpus": size}
        return {"scheduling_strategy": where, **numbers}

    def _actor(self, group: Any, index: int, size: int) -> Any:
        return self._ray.remote(RayAgent).options(**self._options(group, index, size)).remote()

    def _no_place(self, bundles: Sequence[int]) -> str:
        free = int(self._ray.available_resources().get(self.resource, 0))
        nodes = f"{len(bundles)} nodes with {bundles[0]} each" if len(bundles) > 1 else "one node"
        return f"Ray has no place for an engine: it needs {sum(bundles)} {self.resource}s on {nodes}, {free} are free"


def _check_reachable(address: str) -> None:
    """Raise OSError if nothing listens at the address ``HOST:PORT`` of a cluster, which Ray would try for minutes."""
    found = re.fullmatch(r"(?:ray://)?([^:/]+):(\d+)", address)
    if found is not None:
        socket.create_connection((found[1], int(found[2])), CONNECT_S).close()


def bundles_of(num_ranks: int, resources: Sequence[int]) -> list[int] | None:
    """Return the number of ranks on each node: one node if the ranks fit, else as few equal parts as possible.

    Args:
        resources: how many ranks each node can hold.

    Returns:
        None if the nodes cannot hold them.
    """
    for num_nodes in range(1, num_ranks + 1):
        size = num_ranks // num_nodes
        if size * num_nodes == num_ranks and sum(each >= size for each in resources) >= num_nodes:
            return [size] * num_nodes
    return None
