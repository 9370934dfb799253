"""Traces of format version 3, recorded by an earlier Quire, replay exactly: whole runs and dumps with keyframes."""

import tarfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from tiers import thinned

from quire.replay.recorded.reader import TraceReader
from quire.replay.recorded.replay_trace import replay_trace
from quire.scheduler_proc.trace.lines import Keyframe

DATA = Path(__file__).parents[2] / "data/traces_version_3.tar.xz"
RUNS = [
    *("adapters", "drafts", "program", "disk", "experts", "fcfs", "priority", "continuum", "tenants", "host"),
    *("tenants_priority", "tenants_disk", "adapters_priority", "adapters_program", "pooling", "encoder", "hybrid"),
    *("synchronous", "pressure", "tiers", "split", "adapters_full_batch"),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    folder = tmp_path_factory.mktemp("traces")
    with tarfile.open(DATA) as archive:
        archive.extractall(folder, filter="data")
    yield sorted(folder.iterdir())


@pytest.mark.parametrize("run", thinned(RUNS, keep=3))
def test_recorded_traces_replay_exactly(run: str, recorded: list[Path]) -> None:
    """Each run as a whole, and from a keyframe under load and from one of an idle engine."""
    files = [path for path in recorded if path.stem.partition("-")[0].rstrip("_0123456789") == run]
    assert len(files) % 3 == 0 and files
    for path in files:
        _, second = [entry.line for entry in islice(TraceReader(path), 2)]
        assert isinstance(second, Keyframe) == ("-" in path.stem)
        found = replay_trace(path)
        assert found.decisions_equal, f"{path.name}: {found.first_difference}"
