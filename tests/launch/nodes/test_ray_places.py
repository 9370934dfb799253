"""Engines on the nodes of a Ray cluster: one that the test imitates, and a real one of four nodes."""

import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import Served

from quire import LLM, SamplingParams
from quire.launch.nodes import ray_places
from quire.launch.nodes.addresses import ReservedPort
from quire.launch.nodes.keys import load_head_keys
from quire.launch.nodes.ray_cluster import RayCluster, RayEngine, bundles_of
from quire.launch.nodes.ray_places import RayPlaces
from quire.protocol.config import RankPlace
from quire.protocol.errors import ConfigError, EngineError

PROMPT = "Once upon a time"


class FakeCluster(RayCluster):
    """Nodes with a number of CPUs each; agents are addresses only."""

    def __init__(self, *cpus: int) -> None:
        self.resource = "CPU"
        self.cpus = list(cpus)
        self.running: list[RayEngine] = []
        self.problem = ""
        self.num_started = 0
        self.is_alive = threading.Event()
        """Calls wait for it."""
        self.is_alive.set()

    def resources(self) -> list[int]:
        assert self.is_alive.wait(60)
        return self.cpus

    def start_engine(self, bundles: Sequence[int], head_key: str) -> RayEngine:
        if self.problem:
            raise EngineError(self.problem)
        assert "public-key" in head_key and "secret-key" not in head_key
        self.num_started += 1
        agents = [(f"tcp://10.0.{self.num_started}.{n}:7100", f"key {n}") for n in range(len(bundles))]
        self.running.append(RayEngine(None, [], agents))
        return self.running[-1]

    def stop_engine(self, engine: RayEngine) -> None:
        assert self.is_alive.wait(60)
        self.running.remove(engine)

    def close(self) -> None:
        assert not self.running or not self.is_alive.is_set()


def take(places: RayPlaces, engine: int) -> list[RankPlace] | str:
    """Ask until there is an answer."""
    while (answer := places.take(engine)) is None:
        pass
    return answer


@given(st.integers(1, 16), st.lists(st.integers(0, 8), max_size=6))
def test_ranks_are_in_as_few_equal_parts_as_fit(num_ranks: int, resources: list[int]) -> None:
    def fits(parts: int) -> bool:
        return num_ranks % parts == 0 and sum(each >= num_ranks // parts for each in resources) >= parts

    bundles = bundles_of(num_ranks, resources)
    if bundles is None:
        assert not any(fits(parts) for parts in range(1, num_ranks + 1))
    else:
        assert sum(bundles) == num_ranks and len(set(bundles)) == 1 and fits(len(bundles))
        assert not any(fits(parts) for parts in range(1, len(bundles)))


def test_an_engine_gets_agents_and_gives_them_back() -> None:
    cluster = FakeCluster(1, 1, 2)
    places = RayPlaces(cluster, 2, 1)
    assert load_head_keys(Path(places.head_key_file)).secret
    assert take(places, 0) == [RankPlace("tcp://10.0.1.0:7100", device, "key 0", 2) for device in (0, 1)]
    places.give_back(0)
    cluster.cpus = [1, 1]
    again = take(places, 0)
    assert again == [RankPlace(f"tcp://10.0.2.{node}:7100", 0, f"key {node}", 1) for node in (0, 1)]
    places.close()
    assert not Path(places.head_key_file).exists()


def test_a_cluster_that_is_too_small_is_one_line() -> None:
    with pytest.raises(ConfigError, match="too small: 3 engines of 2 ranks need 6 CPUs, its 2 nodes have 4"):
        RayPlaces(FakeCluster(2, 2), 2, 3)
    with pytest.raises(ConfigError, match="cluster is too small"):
        RayPlaces(FakeCluster(), 1, 1)


def test_a_place_that_is_lost_is_a_reason_and_asked_for_again() -> None:
    cluster = FakeCluster(1, 1)
    places = RayPlaces(cluster, 1, 1)
    assert isinstance(take(places, 0), list)
    cluster.problem = "Ray has no place for an engine"
    assert take(places, 1) == "Ray has no place for an engine"
    cluster.cpus = []
    assert "no living nodes" in str(take(places, 1))
    cluster.problem, cluster.cpus = "", [1, 1]
    assert isinstance(take(places, 1), list)
    places.close()


def test_a_cluster_whose_head_is_dead_keeps_neither_the_fleet_nor_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_places, "CLOSE_S", 0.0)
    cluster = FakeCluster(1, 1)
    places = RayPlaces(cluster, 1, 1)
    assert isinstance(take(places, 0), list)
    cluster.is_alive.clear()
    places.give_back(0)
    assert places.take(0) is None
    monkeypatch.setattr(ray_places, "LATE_S", 0.0)
    assert places.take(0) == "Ray has not started the agents of engine 0 in 0 s"
    places.close()
    assert cluster.running and not Path(places.head_key_file).exists()
    cluster.is_alive.set()


def test_an_error_of_ray_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(1, 1)
    places = RayPlaces(cluster, 1, 1)
    assert isinstance(take(places, 0), list)

    def fail(*_: Any) -> RayEngine:
        raise ConnectionError("the cluster\nis gone")

    monkeypatch.setattr(cluster, "start_engine", fail)
    assert take(places, 1) == "the cluster is gone"
    places.close()


def test_without_ray_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"--nodes ray needs Ray: pip install 'quire-serve\[ray\]'"):
        RayCluster("CPU")


def test_an_address_without_a_cluster_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    port = ReservedPort("127.0.0.1")
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port.number}")
    with pytest.raises(ConfigError, match=r"no Ray cluster at .* set RAY_ADDRESS \(.*Connection refused\)"):
        RayCluster("CPU")
    port.close()


# ---- a real cluster


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Four nodes with a CPU each; no node has room for two ranks."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    from ray.cluster_utils import Cluster

    made: Any = Cluster()
    for _ in range(4):
        made.add_node(num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20)
    yield made
    made.shutdown()


def _complete(url: str) -> str:
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    text: str = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]
    return text


def _agents() -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if "--stop-with-stdin" in (process.info["cmdline"] or [])]


@pytest.mark.slow
def test_two_nodes_of_a_cluster_serve_and_replace_a_node_that_dies(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM() as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=30)
        expected = llm.generate([PROMPT], greedy)[0].outputs[0].text
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    served = Served("--nodes", "ray", "--tensor-parallel-size", "2", "--num-gpu-blocks-override", "500")
    assert _complete(served.url) == expected
    agents = _agents()
    assert len(agents) == 2
    lost, node = next((agent, node) for agent in agents for node in cluster.worker_nodes if _is_of(agent, node))
    cluster.remove_node(node, allow_graceful=False)
    lost.wait(60)
    assert _complete(served.url) == expected
    assert len({agent.pid for agent in _agents()} - {agent.pid for agent in agents}) == 2
    assert served.stop() == 0 and not _agents()


def _is_of(agent: psutil.Process, node: Any) -> bool:
    """Return whether the agent is on the node: its parent is the actor, whose process the node's raylet started."""
    raylet = node.all_processes["raylet"][0].process.pid
    return raylet in [each.pid for each in agent.parents()]
