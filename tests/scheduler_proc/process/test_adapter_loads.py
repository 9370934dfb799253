"""Loads of adapters between the Scheduler and workers that do not answer."""

import logging
from typing import Any, cast

import pytest
from fake_adapters import adapter_ref
from fake_items import image
from scheduler_driver import make_config, make_layout, make_request

from quire.protocol.config import FIRST_WORKER_EPOCH
from quire.protocol.errors import EngineError
from quire.protocol.model.vision_config import VisionConfig
from quire.protocol.wire.adapter_messages import AdapterLoaded, LoadAdapter
from quire.protocol.wire.item_messages import Encode, Encoded
from quire.scheduler_proc.process.tier_transfers import SLOW_LOAD_S, TierTransfers
from quire.scheduler_proc.process.transport import Transport
from quire.scheduler_proc.process.worker_group import WorkerGroup
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.journal import Journal


class Workers:
    """The group's side of the Scheduler: keeps what is sent to it."""

    is_ready = True

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> list[bytes]:
        self.sent.append(message)
        return []


def slow_loads(caplog: pytest.LogCaptureFixture) -> list[int | str]:
    return [record.data["number"] for record in caplog.records if hasattr(record, "data")]


def test_encodings_are_sent_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "quire.scheduler")
    config = make_config(vision=VisionConfig("TinyVision", 9), encoder_cache_tokens=8)
    scheduler, workers, journal = Scheduler(config, make_layout(config), 33), Workers(), Journal(config, lambda: 0.0)
    transfers = TierTransfers(config, cast(Transport, None), journal, FIRST_WORKER_EPOCH)
    group = cast(WorkerGroup, workers)
    scheduler.consume(make_request("a", [1, 2, 3], items=[image("a", (0, 2))]))
    transfers.turn(scheduler, group, 5.0)
    item = image("a", (0, 2))
    key, name = item.key, item.digest.hex()[:16]
    assert workers.sent == [Encode(item)]
    transfers.turn(scheduler, group, 5.0 + SLOW_LOAD_S)
    assert slow_loads(caplog) == [name]
    with pytest.raises(EngineError, match=rf"an image {name} took -1\.0 s"):
        transfers.answered(scheduler, Encoded(key, seconds=-1.0), 6.0)
    transfers.answered(scheduler, Encoded(key, "its file is gone"), 6.0)
    assert slow_loads(caplog) == [name] * 2 and not scheduler.table.requests
    journal.close()


def test_a_load_that_does_not_end_is_logged_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    """A network file system may hang for ever. Requests of the adapter then wait until their clients give up."""
    caplog.set_level(logging.WARNING, "quire.scheduler")
    config = make_config(enable_lora=True, max_loras=1, max_cpu_loras=2)
    scheduler, workers = Scheduler(config, make_layout(config), 33), Workers()
    journal = Journal(config, lambda: 0.0)
    transfers = TierTransfers(config, cast(Transport, None), journal, FIRST_WORKER_EPOCH)
    group = cast(WorkerGroup, workers)
    scheduler.consume(make_request("a", [1, 2, 3], adapter=adapter_ref("a")))
    transfers.turn(scheduler, group, 5.0)
    assert [type(message) for message in workers.sent] == [LoadAdapter]
    transfers.turn(scheduler, group, 4.0 + SLOW_LOAD_S)
    assert slow_loads(caplog) == []
    for number in range(3):
        transfers.turn(scheduler, group, 5.0 + (number + 1) * SLOW_LOAD_S)
        assert slow_loads(caplog) == [1] * (number + 1)
    transfers.answered(scheduler, AdapterLoaded(1, 0), 5.0 + 3 * SLOW_LOAD_S)
    transfers.turn(scheduler, group, 5.0 + 9 * SLOW_LOAD_S)
    assert slow_loads(caplog) == [1] * 3
    journal.close()
