"""Addresses of nodes, from the flag and from names."""

import pytest
from scheduler_driver import make_config

from quire.frontend.serve_options import ServeOptions
from quire.launch.nodes.sources import NodeSources, Resolver, check_nodes, parse_sources, warn_of_device
from quire.launch.serve import serve
from quire.protocol.errors import ConfigError


def test_addresses_and_names_are_distinguished() -> None:
    found = parse_sources(["tcp://10.0.0.5:7100", "dns:nodes.quire.svc:7101", "dns:n.:1"])
    assert found == NodeSources(["tcp://10.0.0.5:7100"], [("nodes.quire.svc", 7101), ("n.", 1)])


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["10.0.0.5:7100"], r"--nodes must be tcp://ADDRESS:PORT or dns:NAME:PORT .*, or ray \(got '10\.0\.0\.5:7100'"),
        (["tcp://-a:7100"], r"--nodes must be tcp://ADDRESS:PORT .*got 'tcp://-a:7100'"),
        (["tcp://10.0.0.5:0"], "port between 1 and 65535"),
        (["tcp://10.0.0.5:70000"], "port between 1 and 65535"),
        (["dns:nodes"], r"--nodes must be .*got 'dns:nodes'"),
        (["ipc:///tmp/x"], "--nodes must be"),
        (["dns:a..b:7100"], r"--nodes must be .*got 'dns:a\.\.b:7100'"),
        ([f"dns:{'a' * 64}.b:7100"], "--nodes must be"),
        (["tcp://a:1", "tcp://a:1"], "each node once"),
        (["ray", "tcp://a:1"], "ray cannot be used with other nodes"),
    ],
)
def test_other_nodes_are_refused(nodes: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_sources(nodes)


def test_a_name_that_cannot_be_looked_up_keeps_its_addresses() -> None:
    answers = [["10.0.0.1", "10.0.0.2"], None, ["10.0.0.2"]]

    def look_up(name: str) -> list[str]:
        answer = answers.pop(0)
        if answer is None:
            raise OSError(-3, "Temporary failure in name resolution")
        return answer

    resolver = Resolver(NodeSources(["tcp://a:1"], [("nodes", 7100)]), look_up)
    both = ["tcp://a:1", "tcp://10.0.0.1:7100", "tcp://10.0.0.2:7100"]
    assert [resolver.addresses() for _ in range(3)] == [both, both, ["tcp://a:1", "tcp://10.0.0.2:7100"]]


@pytest.mark.parametrize(
    ("settings", "options", "simulated", "expected"),
    [
        ({}, {"nodes": ["tcp://a:1"]}, False, "--nodes needs --node-keys"),
        ({}, {"node_keys": "keys"}, False, "--node-keys is of use only with --nodes"),
        ({}, {"nodes": ["ray"], "node_keys": "keys"}, False, "--node-keys is not used with --nodes ray"),
        ({"cpu_offload_bytes": 1}, {"nodes": ["ray"]}, False, "--cpu-offload-bytes cannot be used with --nodes"),
        ({"ssd_cache_bytes": 1}, {"nodes": ["ray"]}, False, "--ssd-cache-bytes cannot be used with --nodes"),
        ({}, {"nodes": ["ray"]}, True, "--simulate cannot be used with --nodes"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    settings: dict[str, int], options: dict[str, object], simulated: bool, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_nodes(make_config(**settings), ServeOptions(**options), simulated=simulated)  # type: ignore[arg-type]


def test_a_server_of_one_engine_checks_them_too() -> None:
    options = ServeOptions(node_keys="keys", uds="/nonexistent/socket")  # without the check, this is the error
    with pytest.raises(ConfigError, match="--node-keys is of use only with --nodes"):
        serve(make_config(), options, "model")


@pytest.mark.parametrize(("wanted", "nodes", "count"), [("auto", ["ray"], 1), ("cpu", ["ray"], 0), ("auto", [], 0)])
def test_a_device_that_the_head_decides_is_a_line(
    caplog: pytest.LogCaptureFixture, wanted: str, nodes: list[str], count: int
) -> None:
    warn_of_device(wanted, make_config(), ServeOptions(nodes=nodes))
    assert caplog.text.count("because this machine has no GPU") == count
