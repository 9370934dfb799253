"""Images in what-if runs: encoding takes time, and room in the encoder cache."""

from pathlib import Path

import pytest
from fake_items import image
from replay_workloads import AffineCost
from scheduler_driver import Driver
from traced_runs import traced, write_trace

from quire.protocol.model.vision_config import VisionConfig
from quire.protocol.wire.front_end_messages import Statistics
from quire.replay.costs import side_clock
from quire.replay.formats.options import LoadOptions
from quire.replay.formats.quire import load
from quire.replay.run.run_record import RunRecord
from quire.replay.simulate.setup import make_setup
from quire.replay.simulate.simulator import Simulator
from quire.replay.workload.sources import OpenLoop
from quire.replay.workload.workload import Workload


def simulate(workload: Workload, changes: dict[str, str]) -> tuple[RunRecord, Statistics]:
    setup = make_setup(workload, {"num_usable_blocks": "60", **changes}, None)
    simulator = Simulator(setup, AffineCost(), OpenLoop(workload.calls), RunRecord())
    return simulator.run(), simulator.scheduler.statistics()


def test_images_of_a_trace_are_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_clock, "ENCODE_ROW_S", 1.0)
    driver = Driver(vision=VisionConfig("TinyVision", 9), encoder_cache_tokens=10, num_blocks=65)
    for name in ("cat", "dog"):
        for number in range(2):
            driver.add(f"{name}{number}", [*range(20), number], max_tokens=3, items=[image(name, (6, 8))])
    driver.finish()
    workload = load(write_trace(tmp_path / "trace.jsonl", traced(driver)), LoadOptions())
    assert any("4 calls have images" in note for note in make_setup(workload, {}, None).notes)
    record, found = simulate(workload, {})
    assert (found.num_encoder_runs, found.num_encoder_hits, found.num_encoder_evictions) == (2, 2, 1)
    assert [run.end > 8 for run in record.requests] == [True] * 4
    assert max(run.end for run in record.requests) > 16 > min(run.end for run in record.requests)
    assert simulate(workload, {"encoder_cache_tokens": "16"})[1].num_encoder_evictions == 0
    record, found = simulate(workload, {"model": "llama-3.1-8b"})
    assert found.num_encoder_runs == 0 and max(run.end for run in record.requests) < 8
