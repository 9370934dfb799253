"""The real scheduler loop in a thread, over real sockets: the test acts as its worker and its front ends."""

import os
import select
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from fake_worker import FakeWorker
from kv_event_ends import WAIT_MS

from quire.protocol.config import FIRST_WORKER_EPOCH, EngineConfig
from quire.protocol.errors import QuireError
from quire.protocol.process.child import Child, Command, Report
from quire.protocol.wire.adapter_messages import LoadAdapter
from quire.protocol.wire.channel import Link
from quire.protocol.wire.front_end_messages import SchedulerToFrontEnd
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Hello
from quire.protocol.wire.worker_messages import (
    Configure,
    MemoryPlan,
    ModelRunnerOutput,
    Proposed,
    Ready,
    SampleInputs,
    SchedulerOutput,
    SchedulerToWorker,
    Shutdown,
)
from quire.protocol.wire.zmq_channel import ZmqChannel, frontend_address, worker_address
from quire.scheduler_proc.process.loop import SchedulerLoop
from quire.scheduler_proc.process.sockets import Sockets
from quire.scheduler_proc.trace.event_log import EventLog


class LoopUnderTest:
    """Owns both ends of all sockets, and the thread.

    Attributes:
        spoil: may change a result before it is sent.
        propose: the drafts of a step that awaits masks, for rows that may have some.
        inputs: masks by which steps were sampled, in order; None for a step that never received its own.
        fake: the worker behind it.
        files: what the worker says of the checkpoint that it has loaded.
        others: messages to the worker that ``until`` has received and that are no steps.
        failure: the exception that ended the loop, or None.
        now: the time of the loop's clock. Only the test moves it, so that no limit expires because a machine is busy.
    """

    def __init__(self, context: "zmq.Context[Any]", folder: Path, config: EngineConfig) -> None:
        self.status, status = os.pipe()
        os.set_blocking(self.status, False)
        self._reports = b""
        self._context, self._folder = context, folder
        self.child = Child(status)
        self._transport = Sockets(folder, 1, 1)
        self.worker_epoch = FIRST_WORKER_EPOCH
        self.config = config
        self.worker = self._connect()
        self.client = ZmqChannel(context, zmq.DEALER, frontend_address(folder), Link(SchedulerToFrontEnd), bind=False)
        self.now = time.monotonic()
        self._loop = SchedulerLoop(config, self._transport, self.child, clock=lambda: self.now)
        self.fake = self._make_worker()
        self._sockets = [self.worker, self.client]
        self._fds = [self.status, status]
        self.spoil: Callable[[ModelRunnerOutput], ModelRunnerOutput] = lambda result: result
        self.propose: Callable[[SchedulerOutput], Proposed] = no_drafts
        self.inputs: list[SampleInputs | None] = []
        self.files = ""
        self.others: list[Any] = []
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def log(self) -> EventLog:
        """The Scheduler of the loop; read it only while the loop is idle."""
        return self._loop._journal.log

    def _connect(self) -> ZmqChannel:
        address = worker_address(self._folder, self.worker_epoch, 0)
        return ZmqChannel(self._context, zmq.PAIR, address, Link(SchedulerToWorker, self.worker_epoch), bind=False)

    def _make_worker(self) -> FakeWorker:
        config = self.config
        return FakeWorker(
            33,
            config.block_size,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.model.vocab_size,
            num_speculative_tokens=config.num_speculative_tokens,
            max_loras=config.max_loras if config.enable_lora else 0,
            max_cpu_loras=config.max_cpu_loras,
        )

    def handshake(self) -> None:
        self.client.send(Hello(PROTOCOL_VERSION, "frontend", 0, 1))
        self._introduce_worker()
        self.wait_for_report("ready")

    def wait_for_report(self, event: str, *, time_passes: bool = False) -> None:
        """Wait for a report. ``time_passes``: the clock moves meanwhile, so that what is overdue is noticed."""
        until = time.monotonic() + WAIT_MS / 1000
        while not any(report.event == event for report in self._take_reports()):
            is_ready = select.select([self.status], [], [], 0.1 if time_passes else WAIT_MS / 1000)[0]
            assert is_ready or (time_passes and time.monotonic() < until), f"no {event}"
            self.now += 1.0 * time_passes

    def _introduce_worker(self) -> None:
        self.worker.send(Hello(PROTOCOL_VERSION, "worker", 0, 1))
        while not isinstance(configure := self._next(self.worker), Configure):
            pass
        self.configure = configure
        self.fake.step, self.fake.first_of_epoch = configure.last_step, configure.last_step + 1
        page_bytes = 4096 if self.config.ssd_cache_bytes else 0
        self.worker.send(Ready([33], MemoryPlan("cpu", 0, 0, 0, 0, 33, 4), {}, page_bytes, self.files))

    def _take_reports(self) -> list[Report]:
        try:
            self._reports += os.read(self.status, 65536)
        except BlockingIOError:
            return []
        *lines, self._reports = self._reports.split(b"\n")
        return [msgspec.json.decode(line, type=Report) for line in lines]

    def renew_worker(self, reason: str = "it was killed") -> None:
        """Replace the worker under the next worker epoch, as the supervisor does when a worker exits."""
        self.worker_epoch += 1
        self.child.put(Command("worker_epoch", worker_epoch=self.worker_epoch, text=reason))
        self.worker.close()
        self.worker = self._connect()
        self._sockets.append(self.worker)
        forced, self.fake = self.fake.forced, self._make_worker()
        self.fake.forced = forced
        self._introduce_worker()

    def another_client(self, index: int | None = None) -> ZmqChannel:
        """Connect one more front end; ``index`` 0 reconnects the first one."""
        client = ZmqChannel(
            self._context, zmq.DEALER, frontend_address(self._folder), Link(SchedulerToFrontEnd), bind=False
        )
        self._sockets.append(client)
        client.send(Hello(PROTOCOL_VERSION, "frontend", len(self._sockets) if index is None else index, 1))
        return client

    def until(self, wanted: Callable[[Any], bool], client: ZmqChannel | None = None) -> None:
        """Work until a front end, the first one by default, has received the wanted message."""
        deadline = time.monotonic() + 6 * WAIT_MS / 1000
        while True:
            assert time.monotonic() < deadline, "nothing that is wanted comes"
            if any(r.event == "group_failed" and r.worker_epoch == self.worker_epoch for r in self._take_reports()):
                self.renew_worker()
            step = self.worker.receive()
            if step is not None and isinstance(step.message, SchedulerOutput):
                self._work(step.message)
            elif step is not None and isinstance(step.message, LoadAdapter):
                self.fake.adapters.receive(step.message)
                self.worker.send(self.fake.adapters.run())
            elif step is not None:
                self.others.append(step.message)
            heard = (client or self.client).receive(0.005)
            assert heard is not None or self._thread.is_alive(), "the loop has ended"
            if heard is not None and wanted(heard.message):
                return

    def _work(self, step: SchedulerOutput) -> None:
        """Return one step, and those that arrived instead of its masks."""
        following: SchedulerOutput | None = step
        while following is not None:
            step, following = following, None
            if step.awaits_sample_inputs:
                if step.drafts:
                    self.worker.send(self.propose(step))
                told = self._masks()
                following = told if isinstance(told, SchedulerOutput) else None
                assert told is None or following is not None or told.step == step.step
                self.inputs.append(None if following else told)
                if told is None:
                    return
            self.worker.send(self.spoil(self.fake.execute(step)))

    def _masks(self) -> Any:
        """Return the message after a step that awaits masks; None if the loop gives up this worker instead."""
        for _ in range(WAIT_MS):
            received = self.worker.receive(0.001)
            if received is not None:
                return received.message
            if any(r.event == "group_failed" and r.worker_epoch == self.worker_epoch for r in self._take_reports()):
                self.renew_worker()
                return None
        raise AssertionError("nothing came")

    def stop(self) -> None:
        self.child.put(Command("stop"))
        while not isinstance(self._next(self.worker), Shutdown):
            pass
        self.close()

    def join(self) -> None:
        """Whether the loop is about to end."""
        self._thread.join(WAIT_MS / 1000)
        assert not self._thread.is_alive()

    def close(self) -> None:
        """Whether the loop has ended or is about to."""
        self.join()
        for socket in self._sockets:
            socket.close()
        self._transport.close()
        self.child.close()
        for fd in self._fds:
            os.close(fd)

    def _run(self) -> None:
        try:
            self._loop.run()
        except Exception as error:
            self.failure = error
            if not isinstance(error, QuireError):
                traceback.print_exc()

    def _next(self, channel: ZmqChannel) -> Any:
        received = channel.receive(WAIT_MS / 1000)
        assert received is not None
        return received.message


def no_drafts(step: SchedulerOutput) -> Proposed:
    nothing = np.zeros(0, np.int32)
    return Proposed(step.step, nothing, nothing, nothing)
