"""The configuration of each engine of a fleet, from the common one; and that of the router."""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quire.frontend.serve_options import ServeOptions
from quire.protocol.config import EngineConfig, RankPlace
from quire.protocol.errors import ConfigError
from quire.protocol.routing import RoutingConfig


def engine_config(
    config: EngineConfig, engine: int, num_starts: int, num_engines: int, ranks: Sequence[RankPlace]
) -> EngineConfig:
    """Return the configuration of one engine: files and endpoints get its number, so that no two engines share one.

    Args:
        num_starts: number of this start of the engine, from 1. A later start does not overwrite the trace of an
            earlier one.
        num_engines: engines that divide the CPU's cores and memory.
    """
    name = f"engine-{engine}"
    return msgspec.structs.replace(
        config,
        data_parallel_rank=engine,
        data_parallel_size=num_engines,
        ranks=list(ranks),
        trace=_numbered(config.trace, name if num_starts == 1 else f"{name}.{num_starts}"),
        learned_costs_dir=config.learned_costs_dir and str(Path(config.learned_costs_dir) / name),
        ssd_cache_dir=config.ssd_cache_dir and str(Path(config.ssd_cache_dir) / name),
        kv_events_endpoint=kv_endpoint(config.kv_events_endpoint, engine),
        kv_events_replay_endpoint=kv_endpoint(config.kv_events_replay_endpoint, engine),
    )


def router_config(config: EngineConfig, options: ServeOptions) -> RoutingConfig:
    trace = _numbered(config.trace, "router").removesuffix(".zst")  # the router's trace is not compressed
    return config.routing(options.routing, trace)


def kv_endpoint(endpoint: str, engine: int) -> str:
    """Return the endpoint of an engine for its KV cache events: port + N for tcp, and the path with ``.N`` for ipc."""
    if not endpoint:
        return ""
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.{engine}"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + engine}"


def check_shared(config: EngineConfig, num_engines: int, *, uses_nodes: bool = False) -> None:
    """Check what the engines of one machine share. ``uses_nodes``: their workers are on other machines.

    Raises:
        ConfigError: their endpoints would collide, or their host memory does not suffice.
    """
    endpoints = {
        "--kv-events-endpoint": config.kv_events_endpoint,
        "--kv-events-replay-endpoint": config.kv_events_replay_endpoint,
    }
    taken: dict[str, str] = {}
    for flag, endpoint in endpoints.items():
        for engine in range(num_engines if endpoint else 0):
            address = kv_endpoint(endpoint, engine)
            port = address.rpartition(":")[2]
            if not address.startswith("ipc://") and int(port) > 65535:
                raise ConfigError(f"{flag} {endpoint}: engine {engine} would have port {port}: choose a lower one")
            if address in taken:
                raise ConfigError(
                    f"{flag} {endpoint}: engine {engine} would have {address}, which {taken[address]} needs: engine N "
                    f"has port + N, so leave at least {num_engines} ports between both flags"
                )
            taken[address] = f"{flag} of engine {engine}"
    if uses_nodes:
        return
    needs = {"--cpu-offload-bytes": config.cpu_offload_bytes}
    if config.device == "cpu":
        needs["--kv-cache-memory-bytes"] = config.kv_cache_memory_bytes * config.tensor_parallel_size
    from quire.protocol.process.host_limits import available_bytes  # psutil, which --help does not wait for

    free = available_bytes()
    for flag, each in needs.items():
        if each * num_engines > free:
            raise ConfigError(
                f"{flag} is per engine: {num_engines} engines need {each * num_engines} bytes, and {free} bytes of "
                f"host memory are free"
            )


def _numbered(path: str, name: str) -> str:
    """Return the path with ``.name`` before its suffixes: ``run.jsonl.zst`` becomes ``run.engine-0.jsonl.zst``."""
    if not path:
        return ""
    file = Path(path)
    found = re.fullmatch(r"(.+?)((?:\.[A-Za-z]+)*)", file.name)
    stem, suffixes = (found[1], found[2]) if found is not None else (file.name, "")
    return str(file.with_name(f"{stem}.{name}{suffixes}"))
