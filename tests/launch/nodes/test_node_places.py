"""Devices of real agents, given to engines."""

import time
from pathlib import Path

import pytest
from node_agents import agent_in_thread

from quire.launch.nodes import node_link, node_places
from quire.launch.nodes.addresses import ReservedPort
from quire.launch.nodes.keys import make_keys
from quire.launch.nodes.node_places import NodePlaces
from quire.launch.nodes.sources import NodeSources
from quire.protocol.wire.link_messages import PROTOCOL_VERSION
from quire.protocol.wire.node_messages import NodeInfo

WAIT_S = 20.0


class FakeThread:
    """A NodeThread without links."""

    def add(self, address: str, node_key: str) -> None:
        pass

    def close(self) -> None:
        pass


def test_an_engine_that_has_ended_gets_another_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_places, "NodeThread", lambda *_: FakeThread())
    _, head = make_keys(tmp_path / "keys")
    addresses = [f"tcp://10.0.0.{n}:7100" for n in range(3)]
    given = NodePlaces(NodeSources(addresses, []), head, 1)
    for address in [*addresses, "tcp://10.0.0.9:7100"]:  # the last one was removed just before
        given.ready(address, NodeInfo(PROTOCOL_VERSION, "1.0", address, 1, 4321))

    def take(engine: int) -> str:
        found = given.take(engine)
        assert isinstance(found, list)
        return found[0].node

    assert [take(0), take(1)] == addresses[:2]
    given.give_back(0)
    assert take(0) == addresses[2]
    given.give_back(0)
    assert take(0) == addresses[0]
    assert take(2) == addresses[2]
    assert "0 of 3 on 3 nodes are free" in str(given.take(3))
    given.close()


@pytest.mark.full
def test_engines_get_devices_of_nodes_that_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_link, "CONNECT_S", 1.0)
    closed = ReservedPort("127.0.0.1")
    missing = f"tcp://127.0.0.1:{closed.number}"
    with agent_in_thread(tmp_path, devices=3) as (address, head):
        given = NodePlaces(NodeSources([address, missing], []), head, 2)
        first = given.take(0)
        assert isinstance(first, list) and [(each.node, each.device) for each in first] == [(address, 0), (address, 1)]
        assert first[0].num_devices == 3
        second = given.take(1)
        assert isinstance(second, str) and second.startswith("an engine needs 2 devices, 1 of 3 on 1 node are free")
        assert f"no answer from {missing}" in second
        given.give_back(0)
        assert isinstance(given.take(1), list)
    deadline = time.monotonic() + WAIT_S
    while not str(given.take(2)).endswith(" (and 1 other node)"):
        assert time.monotonic() < deadline
    given.close()
    closed.close()
