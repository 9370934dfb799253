"""The configuration of each engine of a fleet: nothing that two engines write is shared."""

from pathlib import Path

import pytest
from scheduler_driver import make_config

from quire.frontend.serve_options import ServeOptions
from quire.launch.fleet.engine_settings import check_shared, engine_config, router_config
from quire.protocol.config import RankPlace
from quire.protocol.errors import ConfigError
from quire.protocol.process import host_limits


def test_engines_share_no_file_and_no_endpoint() -> None:
    config = make_config(
        trace="/t/run.jsonl.zst",
        ssd_cache_dir="/cache",
        learned_costs_dir="/costs",
        kv_events_endpoint="tcp://127.0.0.1:5557",
        kv_events_replay_endpoint="ipc:///run/quire/replay",
    )
    first, second = (engine_config(config, engine, 1, 2, [RankPlace(device=engine)]) for engine in range(2))
    assert (first.trace, second.trace) == ("/t/run.engine-0.jsonl.zst", "/t/run.engine-1.jsonl.zst")
    assert (first.ssd_cache_dir, second.learned_costs_dir) == ("/cache/engine-0", "/costs/engine-1")
    assert (first.kv_events_endpoint, second.kv_events_endpoint) == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
    assert second.kv_events_replay_endpoint == "ipc:///run/quire/replay.1"
    assert (second.data_parallel_rank, second.data_parallel_size, second.ranks[0].device) == (1, 2, 1)
    assert engine_config(config, 1, 3, 2, []).trace == "/t/run.engine-1.3.jsonl.zst"
    assert router_config(config, ServeOptions(routing="session")).trace == "/t/run.router.jsonl"


@pytest.mark.parametrize(
    ("name", "expected"), [("run", "run.engine-0"), ("v1.5", "v1.5.engine-0"), (".hidden", ".hidden.engine-0")]
)
def test_names_of_traces_keep_their_suffixes(name: str, expected: str) -> None:
    assert Path(engine_config(make_config(trace=f"/t/{name}"), 0, 1, 1, []).trace).name == expected


def test_what_is_not_set_stays_so() -> None:
    made = engine_config(make_config(), 1, 1, 2, [])
    assert (made.trace, made.ssd_cache_dir, made.learned_costs_dir, made.kv_events_endpoint) == ("", "", "", "")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"kv_events_endpoint": "tcp://127.0.0.1:5557", "kv_events_replay_endpoint": "tcp://127.0.0.1:5558"},
            "engine 0 would have tcp://127.0.0.1:5558, which --kv-events-endpoint of engine 1 needs",
        ),
        ({"kv_events_endpoint": "tcp://127.0.0.1:65535"}, "engine 1 would have port 65536"),
        ({"cpu_offload_bytes": 2**29 + 1}, "--cpu-offload-bytes is per engine: 2 engines need 1073741826 bytes"),
        ({"kv_cache_memory_bytes": 2**29 + 1}, "--kv-cache-memory-bytes is per engine"),
    ],
)
def test_what_engines_cannot_share_is_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], text: str
) -> None:
    monkeypatch.setattr(host_limits, "available_bytes", lambda: 2**30)
    with pytest.raises(ConfigError) as refused:
        check_shared(make_config(**settings), 2)
    assert text in str(refused.value)
    check_shared(make_config(**settings), 1)
