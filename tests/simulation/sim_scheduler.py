"""A simulated scheduler process: the real loop over a simulated transport, child and hub."""

import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sim_disk import SimPageFiles
from sim_fairness import FairnessCheck
from sim_process import SimProcess
from sim_replays import KEYFRAME_STEPS
from sim_wire import Wire

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError, QuireError
from quire.protocol.process.child import Command, Report
from quire.protocol.wire.channel import Frames, Link
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import FrontEndToScheduler
from quire.protocol.wire.transfer_messages import HostPages
from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.protocol.wire.zmq_channel import PeerMessage
from quire.scheduler_proc.process.kv_event_feeds import KVEventFeeds
from quire.scheduler_proc.process.loop import SchedulerLoop
from quire.scheduler_proc.process.worker_group import WorkerGroup
from quire.scheduler_proc.requests.reasons import WaitReason
from quire.scheduler_proc.requests.request import RequestStatus
from quire.scheduler_proc.scheduler import Scheduler

if TYPE_CHECKING:
    from sim_world import World

IDLE_S = 1.0
UNUSABLE_RATE = 0.2
"""How often a scheduler that replaces another cannot use the disk."""


class SchedulerBug(Exception):
    """An unexpected exception in the scheduler. Its text is the id of the request that caused it."""


class SimChild:
    """Implements the part of ``Child`` that the loop uses."""

    def __init__(self, process: "SimScheduler") -> None:
        self._process = process
        self.commands: list[Command] = []

    def report(self, report: Report) -> None:
        self._process.report(report)

    def progress(self) -> None:
        pass

    def fileno(self) -> int:
        return -1

    def take_commands(self) -> list[Command]:
        taken, self.commands = self.commands, []
        return taken


class SimHub:
    """Implements ``clients.Hub`` like ZmqHub, over wires. Messages sent before it existed wait for it."""

    def __init__(self, world: "World", incarnation: int) -> None:
        self._world = world
        self._inbox = world.net.hub_inbox(incarnation)
        self._links: dict[bytes, Link] = {}

    def send(self, peer: bytes, message: Any) -> Frames | None:
        link, wire = self._links.get(peer), self._world.net.to_front.get(peer)
        if link is None or wire is None or wire.closed or self._world.faults.is_not_reading(peer):
            return None
        frames = link.outgoing(message)
        wire.send(frames)
        return frames

    def receive(self) -> PeerMessage | None:
        if not self._inbox:
            return None
        peer, frames = self._inbox.popleft()
        link = self._links.setdefault(peer, Link(FrontEndToScheduler))
        try:
            received = link.incoming(frames)
        except ProtocolError as error:
            return PeerMessage(peer, error, [])
        return PeerMessage(peer, received.message, received.frames)

    def forget(self, peer: bytes) -> None:
        self._links.pop(peer, None)


class SimTransport:
    """Implements ``transport.Transport``."""

    def __init__(self, world: "World", process: "SimScheduler", incarnation: int) -> None:
        self._world, self._process = world, process
        self._hub = SimHub(world, incarnation)

    @property
    def hub(self) -> SimHub:
        return self._hub

    def open_group(self, worker_epoch: int) -> WorkerGroup:
        net, ranks = self._world.net, range(self._world.shape.num_ranks)
        return WorkerGroup([net.scheduler_end(worker_epoch, rank, self._process.wake) for rank in ranks], worker_epoch)

    def close_group(self, group: WorkerGroup) -> None:
        group.close()

    def add(self, source: Any) -> None:
        pass

    def wait(self, milliseconds: int) -> bool:
        raise NotImplementedError("simulated time advances between turns")

    def open_kv_events(self, config: Any) -> KVEventFeeds:
        raise NotImplementedError

    def make_host_memory(self, num_pages: int, page_bytes: Sequence[int]) -> list[HostPages]:
        names = [f"pages {self._process.incarnation} {rank}" for rank in range(len(page_bytes))]
        return [HostPages(name, num_pages, size) for name, size in zip(names, page_bytes, strict=True)]

    def find_page_files(self, config: EngineConfig, *, is_restart: bool) -> SimPageFiles:
        if is_restart and self._world.faults.copies.random() < UNUSABLE_RATE:
            self._world.faults.count("disk")
            raise ConfigError("--ssd-cache-dir: disk cannot be used")
        return self._world.page_files


class SimScheduler(SimProcess):
    """One scheduler incarnation."""

    role = "scheduler"

    def __init__(self, world: "World", incarnation: int, worker_epoch: int) -> None:
        super().__init__(world)
        self.incarnation, self._worker_epoch = incarnation, worker_epoch
        self.loop: SchedulerLoop | None = None
        self.child = SimChild(self)
        self._due = False
        self.num_generated = self._first_step = 0
        self.fairness = FairnessCheck()
        world.events.after(world.shape.start_s, self._started)

    def _started(self) -> None:
        if not self.alive:
            return
        world = self.world
        transport = SimTransport(world, self, self.incarnation)
        self.loop = SchedulerLoop(world.config, transport, self.child, self._worker_epoch, world.events)  # type: ignore[arg-type]
        world.net.hub_wakes[self.incarnation] = self.wake
        self.report(Report("started"))
        self.wake()
        self._idle()

    def on_command(self, command: Command) -> None:
        self.child.commands.append(command)
        self.wake()

    def wake(self) -> None:
        """Schedule a turn of the loop, because something arrived."""
        if not self._due and self.alive and self.loop is not None:
            self._due = True
            self.world.events.after(0.0, self._turn)

    def _turn(self) -> None:
        self._due = False
        if not self.alive or self.frozen or self.loop is None:
            return
        try:
            self.loop.turn()
        except QuireError as error:
            self.report(Report("failed", str(error), 1))
            self.die(str(error))
            return
        except SchedulerBug:
            self.world.faults.count("bug")
            self.die("a bug")
            return
        scheduler = self.loop._scheduler
        if scheduler is not None and "schedule" not in vars(scheduler):
            self._watch(scheduler)
        if scheduler is not None and scheduler.last_step >= self._first_step + KEYFRAME_STEPS:
            self._first_step = sys.maxsize
            self.loop._journal.log.keyframe(self.world.events.now, scheduler)
        self.world.check_scheduler(self)

    def _watch(self, scheduler: Scheduler) -> None:
        """Check each decided step, and raise SchedulerBug when a request is supposed to break the scheduler."""
        decide, begin = scheduler.schedule, scheduler.begin_worker_epoch

        def begin_worker_epoch(*, new_workers: bool = False) -> bool:
            if new_workers and scheduler.table.running:
                self.world.reached("kill")
            return begin(new_workers=new_workers)

        def schedule(now: float = 0.0) -> SchedulerOutput | None:
            for request in scheduler.table.requests.values():
                num_output = request.num_output_tokens
                if self.world.faults.is_bug(request.request_id, num_output):
                    raise SchedulerBug(request.request_id)
            children = [r for r in scheduler.table.skipped_waiting.values() if r.wait_reason is WaitReason.FORK]
            running, num_preemptions = set(scheduler.table.running), scheduler.stats.num_preemptions
            step = decide(now)
            if step is not None:
                forked = [child for child in children if child.status is RequestStatus.RUNNING]
                self.fairness.decided(scheduler, step, forked, running)
                self.world.num_forks += len(forked)
                self.world.num_copies += len(step.block_copies)
                if forked:
                    self.world.reached("fork")
                if scheduler.stats.num_preemptions > num_preemptions:
                    self.world.reached("preemption")
            return step

        scheduler.schedule = schedule  # type: ignore[method-assign]
        scheduler.begin_worker_epoch = begin_worker_epoch  # type: ignore[method-assign]

    def _idle(self) -> None:
        if self.alive and self.loop is not None:
            self.world.events.after(IDLE_S, self._idle)
            if not (self.frozen or self._due):
                self.loop.on_silence()
                self.wake()

    @property
    def scheduler(self) -> Any:
        return None if self.loop is None else self.loop._scheduler


class HubInbox(deque[tuple[bytes, Frames]]):
    """Messages from front ends to one scheduler incarnation."""


__all__ = ["HubInbox", "SimScheduler", "Wire"]
