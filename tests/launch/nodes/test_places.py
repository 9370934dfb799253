"""Devices of real agents, given to engines."""

import time
from pathlib import Path

import pytest
from node_agents import agent_in_thread

from quire.launch.nodes import node_link
from quire.launch.nodes.addresses import ReservedPort
from quire.launch.nodes.places import NodePlaces
from quire.launch.nodes.sources import NodeSources

WAIT_S = 20.0


@pytest.mark.full
def test_engines_get_devices_of_nodes_that_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_link, "CONNECT_S", 1.0)
    closed = ReservedPort("127.0.0.1")
    missing = f"tcp://127.0.0.1:{closed.number}"
    with agent_in_thread(tmp_path, devices=3) as (address, head):
        places = NodePlaces(NodeSources([address, missing], []), head, 2)
        first = places.take(0)
        assert isinstance(first, list) and [(each.node, each.device) for each in first] == [(address, 0), (address, 1)]
        assert first[0].num_devices == 3
        second = places.take(1)
        assert isinstance(second, str) and second.startswith("an engine needs 2 devices, 1 of 3 on 1 nodes are free")
        assert f"no answer from {missing}" in second
        places.give_back(0)
        assert isinstance(places.take(1), list)
    deadline = time.monotonic() + WAIT_S
    while "0 of 0 on 0 nodes" not in str(places.take(2)):
        assert time.monotonic() < deadline
    places.close()
    closed.close()
