"""Devices of nodes for the ranks of engines."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from quire.launch.nodes.packing import FreeNode, place_ranks, too_few

NODES = st.lists(st.sets(st.integers(0, 7), max_size=8), max_size=6)


def _nodes(devices: list[set[int]]) -> list[FreeNode]:
    return [FreeNode(f"tcp://10.0.0.{n}:7100", "key", 8, sorted(each)) for n, each in enumerate(devices)]


@given(NODES, st.integers(1, 12))
def test_ranks_get_free_devices_of_as_few_nodes_as_possible(devices: list[set[int]], num_ranks: int) -> None:
    nodes = _nodes(devices)
    places = place_ranks(nodes, num_ranks)
    if places is None:
        assert sum(map(len, devices)) < num_ranks
        return
    free = {(node.address, device) for node in nodes for device in node.devices}
    taken = {(place.node, place.device) for place in places}
    assert len(places) == len(taken) == num_ranks and taken <= free
    used = [place.node for place in places]
    assert used == sorted(used, key=used.index), "the ranks of a node are consecutive"
    largest = sorted(map(len, devices), reverse=True)
    fewest = next(n for n in range(1, len(largest) + 1) if sum(largest[:n]) >= num_ranks)
    assert len(set(used)) == fewest


def test_engines_spread_over_nodes() -> None:
    free = {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    used: Counter[str] = Counter()
    for _ in range(4):
        nodes = [FreeNode(f"tcp://10.0.0.{n}:7100", "key", 4, devices) for n, devices in free.items()]
        places = place_ranks(nodes, 2)
        assert places is not None and len({place.node for place in places}) == 1
        used[places[0].node] += 1
        for place in places:
            free[int(place.node[len("tcp://10.0.0.")])].remove(place.device)
    assert set(used.values()) == {2}


def test_too_few_devices_are_counted() -> None:
    text = too_few(_nodes([{0, 1}, set()]), 4, {"tcp://10.0.0.9:7100": "no connection"})
    assert text == (
        "an engine needs 4 devices, 2 of 16 on 2 nodes are free; no answer from tcp://10.0.0.9:7100: add nodes, or "
        "lower --data-parallel-size or --tensor-parallel-size"
    )


def test_without_any_node_the_reason_of_the_first_is_shown() -> None:
    silent = {"tcp://a:1": "the node tcp://a:1 does not answer: no connection", "tcp://b:1": "the keys do not fit"}
    assert too_few([], 1, silent) == "the node tcp://a:1 does not answer: no connection (and 1 other node)"
    assert too_few([], 1, {}) == "no name of --nodes has an address"
