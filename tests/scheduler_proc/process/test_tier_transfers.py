"""When the tiers open, and which weights their pages belong to."""

from concurrent.futures import Future
from pathlib import Path

import pytest
import zmq
from log_replay import replay
from loop_under_test import LoopUnderTest
from scheduler_driver import make_config, make_layout, make_request

from quire.protocol.model.checkpoint_digest import Fingerprint
from quire.protocol.wire.codec import Codec
from quire.protocol.wire.front_end_messages import StepOutputs
from quire.protocol.wire.transfer_messages import DiskPages, HostPages
from quire.scheduler_proc.process import tier_transfers
from quire.scheduler_proc.requests.events import Consumed, HostMemory
from quire.scheduler_proc.trace.event_log import RecordKind, TraceHeader


@pytest.mark.parametrize("is_known", [True, False])
def test_the_tiers_open_when_the_fingerprint_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_known: bool
) -> None:
    """Requests run before. New workers do not change it, unless they have loaded other files."""
    known: Future[Fingerprint] = Future()
    monkeypatch.setattr(tier_transfers, "begin_digest", lambda path: known)
    (tmp_path / "config.json").write_text("{}")
    tiers = {"cpu_offload_bytes": 9 * 4096, "ssd_cache_bytes": 9 * 4096, "ssd_cache_dir": str(tmp_path / "cache")}
    config = make_config(model_path=str(tmp_path / "config.json"), **tiers)
    with zmq.Context() as context:
        loop = LoopUnderTest(context, tmp_path, config)
        loop.files = "state"
        if is_known:
            known.set_result(Fingerprint("digest", "state"))
        loop.handshake()

        def request(name: str) -> None:
            loop.client.send(make_request(name, [3, 1, 4], max_tokens=3, ignore_eos=True))
            loop.until(lambda message: isinstance(message, StepOutputs) and bool(message.ended))

        request("a")
        assert bool(loop.others) == is_known
        if not is_known:
            known.set_result(Fingerprint("digest", "state"))
        host, disk = places(loop)
        assert (host.weights, disk.weights, disk.read_contents) == ("digest", "digest", True)
        loop.renew_worker()
        host, disk = places(loop)
        assert (host.weights, disk.weights) == ("digest", "digest") and not caplog.records[1:]
        loop.files = "other state"
        loop.renew_worker()
        host, disk = places(loop)
        assert (host.weights, disk.weights) == ("other state", "other state")
        assert "the checkpoint changed after its start" in caplog.text
        request("b")
        loop.stop()
    frames = [record.frames for record in loop.log if record.kind == RecordKind.CONSUMED]
    events = [Codec(Consumed).decode(each).message for each in frames]
    assert [event.is_open for event in events if isinstance(event, HostMemory)] == ([] if is_known else [False, True])
    header = TraceHeader(config, make_layout(config), 33, 10, 9)
    assert replay(header, list(loop.log), check=True) is None


def places(loop: LoopUnderTest) -> tuple[HostPages, DiskPages]:
    """Return the next places that the worker is sent."""
    while not isinstance(host := loop.others.pop(0) if loop.others else loop._next(loop.worker), HostPages):
        pass
    while not isinstance(disk := loop.others.pop(0) if loop.others else loop._next(loop.worker), DiskPages):
        pass
    return host, disk
