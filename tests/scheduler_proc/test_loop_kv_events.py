"""The scheduler's loop publishes what each step changed in the cache, and answers who missed it."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from fake_worker import FakeWorker
from kv_event_ends import WAIT_MS, Mirror
from scheduler_driver import make_config, make_request

from quire.protocol.channel import Link
from quire.protocol.child import Child
from quire.protocol.config import FIRST_EPOCH, EngineConfig
from quire.protocol.kv_events import TOPIC, AllBlocksCleared, BlocksStored, KVEvent, KVEventBatch
from quire.protocol.messages import (
    PROTOCOL_VERSION,
    Configure,
    Control,
    FrontEndToScheduler,
    Hello,
    MemoryPlan,
    Ready,
    SchedulerOutput,
    SchedulerToFrontEnd,
    SchedulerToWorker,
    Shutdown,
    Statistics,
    StepOutputs,
    WorkerToScheduler,
)
from quire.protocol.zmq_channel import ZmqChannel, ZmqHub, frontend_address, worker_address
from quire.scheduler_proc.loop import SchedulerLoop


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    with zmq.Context() as context:
        yield context


class LoopUnderTest:
    """The real loop in a thread; the test is its worker and its front end."""

    def __init__(self, context: "zmq.Context[Any]", folder: Path, config: EngineConfig) -> None:
        self.status, status = os.pipe()
        hub = ZmqHub(context, frontend_address(folder), FrontEndToScheduler)
        address = worker_address(folder, FIRST_EPOCH, 0)
        far = ZmqChannel(context, zmq.PAIR, address, Link(WorkerToScheduler, FIRST_EPOCH), bind=True)
        self.worker = ZmqChannel(context, zmq.PAIR, address, Link(SchedulerToWorker, FIRST_EPOCH), bind=False)
        self.client = ZmqChannel(context, zmq.DEALER, frontend_address(folder), Link(SchedulerToFrontEnd), bind=False)
        self._loop = SchedulerLoop(config, hub, far, Child(status))
        self._fake = FakeWorker(33, config.block_size, config.max_num_seqs, config.max_num_batched_tokens, 1000)
        self._sockets = [hub, far, self.worker, self.client]
        self._fds = [self.status, status]
        self._thread = threading.Thread(target=self._loop.run)
        self._thread.start()

    def handshake(self) -> None:
        for channel, role in ((self.worker, "worker"), (self.client, "frontend")):
            channel.send(Hello(PROTOCOL_VERSION, role, 0, 1))
        while not isinstance(self._next(self.worker), Configure):
            pass
        self.worker.send(Ready([33], MemoryPlan("cpu", 0, 0, 0, 0, 33, 4), {}))
        os.read(self.status, 1)

    def until(self, wanted: Callable[[Any], bool]) -> None:
        """Work until the front end hears what is wanted."""
        while True:
            step = self.worker.receive()
            if step is not None and isinstance(step.message, SchedulerOutput):
                self.worker.send(self._fake.execute(step.message))
            heard = self.client.receive(0.005)
            if heard is not None and wanted(heard.message):
                return

    def stop(self) -> None:
        self._loop.stop()
        self.client.send(Control("statistics"))
        while not isinstance(self._next(self.worker), Shutdown):
            pass
        self._thread.join(WAIT_MS / 1000)
        assert not self._thread.is_alive()
        for socket in self._sockets:
            socket.close()
        for fd in self._fds:
            os.close(fd)

    def _next(self, channel: ZmqChannel) -> Any:
        received = channel.receive(WAIT_MS / 1000)
        assert received is not None
        return received.message


def test_the_loop_publishes_and_answers(context: "zmq.Context[Any]", tmp_path: Path) -> None:
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = make_config(kv_events_endpoint=events, kv_events_replay_endpoint=replay)
    loop = LoopUnderTest(context, tmp_path, config)
    loop.handshake()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(replay)

    def kept() -> list[KVEvent]:
        dealer.send(bytes(8))
        found: list[KVEvent] = []
        while True:
            assert dealer.poll(WAIT_MS)
            kind, _, payload = dealer.recv_multipart()
            if kind != TOPIC:
                return found
            found += msgspec.msgpack.decode(payload, type=KVEventBatch).events

    loop.client.send(make_request("a", list(range(10)), max_tokens=8, temperature=0.0))
    loop.until(lambda heard: isinstance(heard, StepOutputs) and bool(heard.ended))
    told = kept()
    assert told[0] == AllBlocksCleared()
    stored = [h for event in told[1:] if isinstance(event, BlocksStored) for h in event.hashes]
    assert len(stored) == len(set(stored)) == 4  # 10 + 8 tokens in blocks of 4, the last token never computed
    loop.client.send(Control("reset_prefix_cache"))
    loop.until(lambda heard: isinstance(heard, Statistics) and heard.done)
    mirror = Mirror()
    mirror.apply(kept())
    assert mirror.keys == set()
    dealer.close()
    loop.stop()
