"""One simulated engine with all its processes, clients and faults, in one thread and from one seed."""

import contextlib
import gc
import logging
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
from fake_adapters import adapter_ref
from fake_pages import Page
from lines_in_memory import numbered
from scheduler_driver import compare_mirror, make_config, make_layout, make_request
from sim_answers import check_ending, check_update
from sim_cells import cells_of
from sim_disk import InlineWriter, SimDisk, SimPageFiles
from sim_events import Events
from sim_faults import Faults
from sim_front import SimClient, SimFront
from sim_grammars import InlinePool, even_helpers
from sim_net import Net
from sim_process import SimProcess
from sim_replays import check_replays
from sim_scenario import EOS, NUM_ADAPTERS, SWITCHES, Scenario, SimRequest, shape_of
from sim_scheduler import SimScheduler
from sim_violation import Violation
from sim_worker import SimWorker

from quire.frontend.engine.update import Update
from quire.launch.supervision.members import Role
from quire.launch.supervision.supervision_policy import MAX_DEATHS, ProcessCounts, SupervisionPolicy
from quire.protocol.config import EngineConfig
from quire.protocol.errors import QuireError
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.process.child import Command, Report
from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.request.structured_outputs import RepetitionDetection, StructuredOutputs
from quire.protocol.wire.adapter_messages import AdapterRef
from quire.protocol.wire.front_end_messages import AddRequest
from quire.protocol.wire.item_messages import InputItem
from quire.protocol.wire.worker_messages import Configure
from quire.replay.recorded.exact import replay_lines
from quire.scheduler_proc.process import loop as scheduler_loop
from quire.scheduler_proc.structured import manager as grammar_manager
from quire.scheduler_proc.trace import journal
from quire.scheduler_proc.trace.lines import decode_line

if TYPE_CHECKING:
    from sim_runner import RealRunner

SETTLE_S = 900.0
"""Seconds after the last fault and the last request within which every request must have ended."""
STANDSTILL_S = 120.0
"""Longest time without any progress while a request waits: a first step may take a minute, after which three groups of
workers may die of one request, each holding its memory for ten seconds."""
DRAIN_S = 5.0


class NoCollector:
    """Disables the loop's garbage collection control: one process simulates many schedulers in sequence."""

    def __init__(self, *given: Any) -> None:
        pass

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def after_step(self) -> None: ...

    def after_message(self) -> None: ...

    def turn(self) -> None: ...


class World:
    """Implements ``policy.Runner``. Owns every process, and checks invariants after each step."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        switches = {name: getattr(scenario, name) for name in SWITCHES}
        self.shape = shape = shape_of(scenario.seed, forks=scenario.has_forks, **switches)
        settings = dict(shape.settings)
        layout = settings.pop("layout")
        self.host_pages: dict[str, dict[int, Page]] = {}
        """Host memory by its path: it outlives workers."""
        self.num_blocks: int = settings.pop("num_blocks")
        self.num_slots: int = settings.pop("num_slots", 0)
        self.config: EngineConfig = make_config(**settings | {"enable_return_routed_experts": True})
        self.layout = make_layout(self.config) if layout is None else layout
        if self.layout.groups:
            self.config = msgspec.structs.replace(self.config, block_size=self.layout.block_size)
        self.page_files = SimPageFiles(self.config)
        self.events = Events()
        self.faults = Faults(self, scenario.seed)
        self.net = Net(self.events, self.faults.tamper)
        self._num_pids = 100
        self.policy = SupervisionPolicy(ProcessCounts(shape.num_ranks, shape.num_fronts, shape.standby), self)
        self.fronts: dict[int, SimFront] = {}
        self.trace: list[bytes] = []
        self.schedulers: list[SimScheduler] = []
        self.fatal_error: QuireError | None = None
        self.has_replays = True
        self.requests = {request.name: request for request in reversed(scenario.requests)}
        self._unborn = [request for request in scenario.requests if request.fork[1]]
        self.folders = [adapter_ref(f"adapter {number}") for number in range(NUM_ADAPTERS)]
        """The adapters as their folders contain them now."""
        self._adapters: dict[str, AdapterRef | None] = {}
        self.even = frozenset(name for name, request in self.requests.items() if request.even)
        self.num_requests = self.num_tokens = self.num_steps = 0
        self.num_forks = self.num_copies = self.num_orphans = self.num_pieces = 0
        self.cells: set[str] = set()
        self.num_submissions: Counter[str] = Counter()
        self.max_tokens: int | None = None
        self._last_progress = self.events.now
        self._begin = self.events.now

    # ---- the run

    def run(self) -> None:
        """Run the scenario. Raises Violation, or AssertionError for a violated invariant."""
        with self._patches():
            self.policy.begin(self.events.now)
            self.policy.admit_front_ends(self.events.now)
            self._tick()
            for request in self.scenario.requests:
                if not request.fork[1]:
                    self.events.after(request.at, lambda request=request: self._submit(request))  # type: ignore[misc]
            for fault in self.scenario.faults:
                self.events.after(fault.at, lambda fault=fault: self.faults.inject(fault))  # type: ignore[misc]
            last = max([x.at for x in (*self.scenario.requests, *self.scenario.faults)], default=0.0)
            self.events.after(last + 0.001, self.faults.end)
            self._watch()
            self.events.run_until(self._begin + last + 0.002, lambda: self.fatal_error is not None)
            self.events.run_until(self.events.now + SETTLE_S, self._all_ended)
            if self.fatal_error is None:
                self.events.run_until(self.events.now + DRAIN_S, lambda: self.fatal_error is not None)
                self.events.run_until(self.events.now + STANDSTILL_S, self._no_steps_in_flight)
            self._check_end()

    @contextlib.contextmanager
    def _patches(self) -> Iterator[None]:
        disabled, collecting = logging.root.manager.disable, gc.isenabled()
        logging.disable(logging.CRITICAL)
        gc.disable()
        with (
            mock.patch.object(scheduler_loop, "Collector", NoCollector),
            mock.patch.object(scheduler_loop, "kv_layout", lambda *args: self.layout),
            mock.patch.object(grammar_manager, "CompilePool", InlinePool),
            mock.patch.object(grammar_manager, "MaskProcesses", even_helpers),
            mock.patch.object(journal, "TraceWriter", InlineWriter),
            mock.patch.object(
                journal, "TraceFiles", lambda *args, **kw: SimDisk(lambda: self.faults.disk_is_full, self.trace)
            ),
            mock.patch("time.time", lambda: 1e9 + self.events.now + self.faults.wall_jump),
        ):
            try:
                yield
            finally:
                logging.disable(disabled)
                if collecting:
                    gc.enable()

    def _all_ended(self) -> bool:
        return all(client.is_over for front in self.fronts.values() for client in front.clients)

    def _no_steps_in_flight(self) -> bool:
        """Whether no step is in flight, and each death is noticed. Steps of requests that ended may have to time out,
        and requests of a dead front end stay until its memory is freed.
        """
        process = self.scheduler
        ready = all(m.ready and m.process.alive for m in self.policy.members if m.role != "worker")
        return ready and process is not None and process.scheduler is not None and not process.scheduler.in_flight

    def reached(self, event: str) -> None:
        """Note an event that met requests which run."""
        self.cells |= cells_of(self.config, self.layout, event)

    def due_children(self, parent: SimClient) -> list[SimRequest]:
        """Remove and return the requests that are forked from as many output tokens as ``parent`` has by now."""
        mine = [request for request in self._unborn if request.fork[0] == parent.request.name]
        due = [request for request in mine if parent.ended is not None or len(parent.tokens) >= request.fork[1]]
        self._unborn = [request for request in self._unborn if request not in due]
        return due

    def _submit(self, request: SimRequest) -> None:
        front = self.fronts.get(request.front % self.shape.num_fronts)
        if front is not None and front.alive and self.fatal_error is None:
            front.submit(request)

    def _watch(self) -> None:
        """Check liveness: progress continues while any request waits."""
        if self._all_ended():
            self._last_progress = self.events.now
        if self.events.now > self._last_progress + STANDSTILL_S:
            raise Violation(f"no progress for {STANDSTILL_S:g} s while {self._waiting()} wait")
        for front in self.fronts.values():
            front.drop_finished()
        self.events.after(1.0, self._watch)

    def _waiting(self) -> list[str]:
        return [r.request.name for front in self.fronts.values() for r in front.clients if not r.is_over]

    def _check_trace(self) -> None:
        """Replay what all schedulers recorded, one after the other."""
        lines = [decode_line(line) for written in self.trace for line in written.splitlines()]
        if lines and (difference := replay_lines(numbered(lines))) is not None:
            raise Violation(f"the trace does not replay: {difference}")

    def _check_end(self) -> None:
        if not self._all_ended():
            raise Violation(f"{self._waiting()} did not end within {SETTLE_S:g} s after the last fault")
        if self.fatal_error is not None:
            return
        if self.faults.losses and not self.faults.num_deadly:
            when = min(self.faults.losses.values()) - self._begin
            raise Violation(f"workers were lost at {when:.3f} s without a deadly fault")
        self.policy.check()
        self._check_trace()
        for each in self.schedulers if self.has_replays else ():
            check_replays(each, self.scenario.seed)
        process = self.scheduler
        if process is None or process.scheduler is None:
            raise Violation("no scheduler at the end")
        scheduler = process.scheduler
        scheduler.check()
        table, pool = scheduler.table, scheduler.kv.pool
        assert not table.requests and not table.running and not table.num_waiting and not table.leaving, "not drained"
        assert not len(scheduler.in_flight) and scheduler.suspects.alone is None
        copied = {block.block_id for held in scheduler.kv.holds.holders() for block in held}
        assert not scheduler.kv.holds.num_kept and pool.num_free_blocks + len(copied) == pool.num_usable_blocks, (
            "blocks leaked"
        )
        for manager in scheduler.kv.coordinator.managers:
            assert not manager.req_to_blocks and not manager.num_cached_block, "blocks are held without a request"
        for front in self.fronts.values():
            assert not front.alive or not len(front.session.table), "a stream is held without a client"
        if not all(m.ready for m in self.policy.members if m.role != "worker"):
            raise Violation("the engine is not ready at the end")

    # ---- policy.Runner

    def start(self, role: Role, *, incarnation: int, worker_epoch: int, index: int) -> SimProcess:
        if role == "scheduler":
            scheduler = SimScheduler(self, incarnation, worker_epoch)
            self.schedulers.append(scheduler)
            return scheduler
        if role == "worker":
            return SimWorker(self)
        front = self.fronts[index] = SimFront(self, index)
        return front

    @property
    def scheduler(self) -> SimScheduler | None:
        return next((s for s in reversed(self.schedulers) if s.alive), None)

    def send(self, process: Any, command: Command) -> None:
        if command.kind == "worker_epoch":
            self.faults.lost(command.worker_epoch - 1)
        process.send(command)

    def kill(self, process: Any) -> None:
        process.vanish()

    def scheduler_replaced(self, incarnation: int) -> None:
        pass

    def next_pid(self) -> int:
        self._num_pids += 1
        return self._num_pids

    def reported(self, process: SimProcess, report: Report) -> None:
        self.faults.reported(process, report)
        self.policy.reported(process, report, self.events.now)
        self._check_policy()

    def ended(self, process: SimProcess, how: str) -> None:
        self.policy.ended(process, how, self.events.now)
        self._check_policy()

    def in_group(self, process: SimProcess) -> bool:
        return any(m.process is process for m in self.policy.group.values())

    def _tick(self) -> None:
        self.policy.tick(self.events.now)
        self._check_policy()
        if self.fatal_error is None:
            self.events.after(min(self.policy.next_event(self.events.now) + 0.001, 0.5), self._tick)

    def _check_policy(self) -> None:
        self.policy.check()
        if self.policy.fatal_error is not None and self.fatal_error is None:
            self.fatal_error = self.policy.fatal_error
            self.faults.counts["engine gave up"] += 1
            if self.faults.in_a_row < MAX_DEATHS - 1:  # a fault may be noticed right after the token of the same result
                raise Violation(f"the engine gave up after {self.faults.in_a_row} faults: {self.fatal_error}")
            for front in self.fronts.values():
                if front.alive:
                    front.on_command(Command("engine_failed"))

    # ---- requests

    def salt_of(self, request_id: str) -> str:
        return self.requests[request_id].salt

    def control(self, where: int, kind: str) -> None:
        """An operator sends a command to the scheduler, by one of the front ends."""
        front = self.fronts.get(where % self.shape.num_fronts)
        if front is not None and front.alive:
            front.control(kind)

    def logprobs_of(self, request_id: str) -> int | None:
        return self.requests[request_id].logprobs

    def make_runner(self, config: EngineConfig, layout: KVLayout, num_blocks: int) -> "RealRunner":
        from sim_runner import RealRunner  # imported on demand: torch takes seconds

        return RealRunner(config, layout, num_blocks)

    def message(self, request: SimRequest) -> AddRequest:
        request = self.requests[request.name]  # the model identifies requests by name, so each name has one prompt
        message = make_request(
            request.name,
            request.prompt,
            priority=request.priority,
            tenant=request.tenant,
            cache_salt=request.salt,
            arrival=self.events.now,
            adapter=self.adapter_of(request),
            items=self.items_of(request),
            pooling=PoolingParams(request.task, request.dimensions) if request.task else None,
            job_id=request.job,
            is_last_step=request.is_last_step,
        )
        return msgspec.structs.replace(message, sampling=self.sampling_of(request))

    def sampling_of(self, request: SimRequest) -> SamplingParams:
        grammar = StructuredOutputs(regex="even") if request.even else None
        if request.beams:
            return SamplingParams(
                use_beam_search=True,
                beam_width=request.beams,
                max_tokens=request.max_tokens,
                length_penalty=(-1.0, 0.0, 1.0)[request.own[0] % 3],
                early_stopping=(False, True, "never")[request.own[1] % 3],
                structured_outputs=grammar,
            )
        return SamplingParams(
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            ignore_eos=request.ignore_eos,
            stop_token_ids=request.stop_token_ids,
            repetition_detection=RepetitionDetection(max_pattern_size=3, min_count=2) if request.repetition else None,
            temperature=0.0,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            structured_outputs=grammar,
            return_routed_experts=request.experts,
        )

    def adapter_of(self, request: SimRequest) -> AdapterRef | None:
        """Return the adapter of a request, with the content of its folder when it, or its parent, was submitted."""
        first = request
        while first.fork[0]:
            first = self.requests[first.fork[0]]
        if not self.scenario.adapters or first.adapter < 0:
            return None
        return self._adapters.setdefault(first.name, self.folders[first.adapter])

    def items_of(self, request: SimRequest) -> list[InputItem]:
        return request.images if self.scenario.items else []

    def change_folder(self, number: int) -> bytes:
        """Put another content into the folder of an adapter. Returns the digest of the previous one."""
        before = self.folders[number]
        self.folders[number] = adapter_ref(before.name, before.digest.hex())
        return before.digest

    def check_configuration(self, configure: Configure) -> None:
        assert configure.config == self.config and configure.worker_epoch <= self.policy.worker_epoch

    def on_update(self, client: SimClient, update: Update) -> None:
        """A client receives an update."""
        self._last_progress = self.events.now
        if update.token_ids:
            self.num_tokens += len(update.token_ids)
            client.last_token_at = self.events.now
        check_update(self, client, update)

    def check_ending(self, front: SimFront, client: SimClient) -> None:
        """A request ended: check how."""
        self._last_progress = self.events.now
        check_ending(self, front, client)

    def is_stale(self, step: int, lost_in: int) -> bool:
        """Whether ``step`` was decided before the scheduler knew that the workers had dropped their rows in
        ``lost_in``.
        """
        process = self.scheduler
        if process is None or process.scheduler is None:
            return True
        stale_until: int = process.scheduler.results.stale_until
        return stale_until < lost_in or step <= stale_until

    # ---- invariants

    def check_scheduler(self, process: SimScheduler) -> None:
        """Check invariants after each turn of the scheduler's loop."""
        scheduler = process.scheduler
        if scheduler is not None:
            self.max_tokens = scheduler.kv.max_tokens
            scheduler.check()
            if scheduler.num_results > process.num_generated:
                self.faults.token_committed()
            process.num_generated = scheduler.num_results

    def step_executed(self, worker: SimWorker, step: int) -> None:
        """``worker`` answered ``step``. If it is the newest step, its rows must equal the scheduler's view (I6)."""
        self.num_steps += 1
        self._last_progress = self.events.now
        process = self.scheduler
        if (
            process is None
            or process.scheduler is None
            or worker.model is None
            or worker.worker_epoch != self.policy.worker_epoch
        ):
            return
        workers = process.loop._workers  # type: ignore[union-attr]
        if (
            workers is None
            or workers.worker_epoch != worker.worker_epoch
            or process.scheduler.last_step != step
            or worker._dropped
        ):
            return
        if process.scheduler.results.stale_until < step and len(process.scheduler.in_flight):
            compare_mirror(process.scheduler, worker.model)


__all__ = ["EOS", "Violation", "World"]
