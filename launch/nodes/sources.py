"""Where the addresses of nodes come from: ``--nodes``."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.frontend.serve_options import ServeOptions
from quire.launch.config.declared import check_fit
from quire.launch.nodes.addresses import ip_addresses, parse_address
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.process.log import event_logger
from quire.protocol.settings import NODES, EngineSettings

log = event_logger("node")

RAY = "ray"
RESOLVE_S = 5.0
"""Interval at which names are looked up again."""


def check_nodes(config: EngineConfig, options: ServeOptions, *, simulated: bool) -> None:
    """Raise ConfigError if ``--nodes`` and other settings do not fit each other."""
    if not options.nodes:
        if options.node_keys:
            raise ConfigError("--node-keys is of use only with --nodes")
        return
    check_fit(config, NODES, EngineSettings)
    if simulated:
        raise ConfigError(f"--simulate cannot be used with {NODES}")
    if not options.node_keys and options.nodes != [RAY]:
        raise ConfigError("--nodes needs --node-keys DIR (`quire node --make-keys` makes keys)")
    if options.node_keys and options.nodes == [RAY]:
        raise ConfigError("--node-keys is not used with --nodes ray, which makes keys at its start")


def warn_of_device(wanted: str, config: EngineConfig, options: ServeOptions) -> None:
    """Log that the head machine has decided for all nodes. ``wanted``: the flag ``--device``."""
    if options.nodes and wanted == "auto" and config.device == "cpu":
        log.warning("workers on nodes use the CPU because this machine has no GPU; for GPUs, set --device cuda")


class NodeSources(NamedTuple):
    """Addresses that do not change, and names whose addresses may change, each with its port."""

    addresses: list[str]
    names: list[tuple[str, int]]


def parse_sources(nodes: Sequence[str]) -> NodeSources:
    """Return the parts of ``--nodes``, which is not ``ray``.

    Raises:
        ConfigError: an entry is neither an address nor ``dns:NAME:PORT``, or appears twice.
    """
    if RAY in nodes:
        raise ConfigError(f"--nodes ray cannot be used with other nodes (got {' '.join(nodes)[:200]})")
    if len(set(nodes)) < len(nodes):
        raise ConfigError(f"--nodes must name each node once (got {' '.join(nodes)[:200]})")
    found = NodeSources([], [])
    for node in nodes:
        try:
            parsed = parse_address(re.sub("^dns:", "tcp://", node), "--nodes")
        except ConfigError:
            raise ConfigError(
                "--nodes must be tcp://ADDRESS:PORT or dns:NAME:PORT with a port between 1 and 65535, or ray "
                f"(got {node[:100]!r})"
            ) from None
        if node.startswith("dns:"):
            found.names.append(parsed)
        else:
            found.addresses.append(node)
    return found


class Resolver:
    """The current addresses of all sources. A name that cannot be looked up keeps the addresses that it had."""

    def __init__(self, sources: NodeSources, look_up: Callable[[str], list[str]] = ip_addresses) -> None:
        self._sources = sources
        self._look_up = look_up
        self._last: dict[tuple[str, int], list[str]] = {}
        self._failed: set[str] = set()

    def addresses(self) -> list[str]:
        """Look up all names, which may take seconds, and return the addresses ``tcp://ADDRESS:PORT``."""
        found = list(self._sources.addresses)
        for name, port in self._sources.names:
            try:
                self._last[name, port] = [f"tcp://{address}:{port}" for address in self._look_up(name)]
                self._failed.discard(name)
            except OSError as error:
                if name not in self._failed:
                    log.error("no addresses of nodes", name=name, reason=error.strerror)
                self._failed.add(name)
            found += self._last.get((name, port), [])
        return list(dict.fromkeys(found))
