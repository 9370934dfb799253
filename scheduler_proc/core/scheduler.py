"""The bare scheduler: consumes events and decides steps. It has no access to sockets, clocks, files or devices.

Reading order: ``consume`` here (all events), ``Planner.plan`` (a step), ``Results`` (results of steps). Requests that
only need one token per step are in steady decode (steady_decode.py). What else there is, is a feature (feature.py).
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.front_end_messages import (
    Abort,
    AddRequest,
    Control,
    EndReason,
    SchedulerToFrontEnd,
    Statistics,
    Stop,
)
from quire.protocol.wire.worker_messages import ModelRunnerOutput, SchedulerOutput, SideJob
from quire.scheduler_proc.core.arrivals import Arrivals
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.diff import build_diff
from quire.scheduler_proc.core.feature import Calls, Feature
from quire.scheduler_proc.core.in_flight import StepsInFlight
from quire.scheduler_proc.core.planner import Planner
from quire.scheduler_proc.core.results import Results
from quire.scheduler_proc.core.statistics import list_requests, make_statistics
from quire.scheduler_proc.core.step import StepPlan
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.coordinator import check_layout_fits
from quire.scheduler_proc.kv.events import KVEventRecorder
from quire.scheduler_proc.kv.fair_pool import pool_class_for, pool_maker
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.messages.steps import InFlightStep
from quire.scheduler_proc.requests.decisions import Counters, RecentDecisions
from quire.scheduler_proc.requests.events import Consumed, Fail, Hold, Refuse, Release
from quire.scheduler_proc.requests.hooks import NO_HOOKS, SchedulerHooks
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.requests.request_queue import POLICIES
from quire.scheduler_proc.requests.request_table import RequestTable, check_requests
from quire.scheduler_proc.requests.steady_decode import NEVER, SteadyDecode


class BareScheduler:
    """Consumes events and decides steps. Owns all requests (RequestTable) and all blocks (KVCacheManager).

    ``check`` verifies the invariants of RequestTable and KVCacheManager, and these:

    * A request has blocks exactly while it is running or leaving. *Leaving*: it has ended, but a step in flight still
      writes to its blocks.
    * Steps in flight were sent and not answered.
    * Every accepted request ends exactly once.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: KVLayout,
        num_blocks: int,
        *,
        steady_decode: bool = True,
        hooks: SchedulerHooks = NO_HOOKS,
        kv_events: KVEventRecorder | None = None,
        num_host_pages: int = 0,
        num_disk_pages: int = 0,
        forgotten: int = 0,
        num_slots: int = 0,
    ) -> None:
        """
        Args:
            num_blocks: blocks of the pool, including the null block.
            steady_decode: False disables steady decode; decisions are the same and cost more.
            hooks: callbacks during events and steps.
            kv_events: recorder of cached blocks, or None if KV events are not published.
            num_host_pages, num_disk_pages: pages of host memory and on disk, page 0 of each included; 0 without, and
                ignored without prefix caching.
            forgotten: contents on disk up to this generation have been forgotten.
            num_slots: slots of recurrent states, slot 0 included; 0 for models without.

        Raises:
            ConfigError: a setting is unknown or contradicts the layout.
        """
        check_layout_fits(config, layout)
        self.kv = KVCacheManager(
            layout,
            num_blocks,
            config.enable_prefix_caching,
            watermark=config.watermark,
            max_step_tokens=config.step_tokens,
            min_step_tokens=1 if config.enable_chunked_prefill else config.step_tokens,
            pipeline_depth=config.pipeline_depth,
            pool_class=pool_maker(config, self.pool_class(config), kv_events),
            num_host_pages=num_host_pages if config.enable_prefix_caching else 0,
            num_disk_pages=num_disk_pages if config.enable_prefix_caching else 0,
            forgotten=forgotten,
            num_slots=num_slots,
        )
        self.steady_decode = SteadyDecode(self.kv.block_size, config.pipeline_depth, config.num_speculative_tokens)
        self.decisions = RecentDecisions()
        self.stats = Counters(config.num_speculative_tokens)
        calls, policy, vocab_size = Calls(), config.scheduling_policy, config.model.vocab_size
        self.in_flight = StepsInFlight(config, calls.due_rows_of)
        self.table = RequestTable(policy, self.steady_decode, vocab_size, calls, self.in_flight.left_steady)
        self.core = core = Core(config, self.table, self.kv, self.in_flight, self.decisions, self.stats, hooks, calls)
        self.pause = ""
        """Empty, ``pause_new`` (no request is admitted) or ``pause`` (no step is scheduled)."""
        self.features = tuple(self.make_features(core))
        for feature in self.features:
            setattr(self, feature.name, feature)
        known = [*POLICIES, *chain.from_iterable(feature.policies for feature in self.features)]
        if policy not in known:
            raise ConfigError(f"scheduling_policy must be one of {', '.join(known)} (got {policy!r})")
        calls.subscribe(self.features)
        self.planner = self.make_planner(core)
        self.results = Results(core)
        self.arrivals = Arrivals(core)
        core.finish, core.reject, core.statistics = self.results.finish, self.arrivals.reject, self.statistics
        core.admit, core.preempt = self.planner.admit, self.planner.preemption.preempt
        self._steady_allowed = steady_decode

    def make_features(self, core: Core) -> Sequence[Feature]:
        """Return the features, in the order in which they are called. The bare scheduler has none."""
        return ()

    def make_planner(self, core: Core) -> Planner:
        """Return the part that decides steps."""
        return Planner(core)

    def pool_class(self, config: EngineConfig) -> type[BlockPool]:
        """Return the class of the pool, which decides the order in which free blocks are reused."""
        return pool_class_for(config)

    @property
    def config(self) -> EngineConfig:
        """The configuration. It can be replaced between two steps, for example with a smaller token budget."""
        return self.core.config

    @config.setter
    def config(self, config: EngineConfig) -> None:
        self.core.config = config

    # ---- events

    def consume(self, event: Consumed, client: int = 0) -> None:
        """Apply one event. ``client``: index of the front end that sent it.

        Raises:
            WorkerFault: the event is an invalid result; nothing has changed.
        """
        match event:
            case AddRequest():
                self.arrivals.add(event, client, partial(self.arrivals.admission.accept, event, client))
            case Abort():
                for request_id in event.request_ids:
                    if request := self._live(client, request_id):
                        self.results.finish(request, EndReason.ABORTED)
            case Stop():
                if request := self._live(client, event.request_id):
                    self.results.stop_at(request, event.num_output_tokens)
            case Control():
                self._control(event, client)
            case Hold() | Release():
                if request := self._live(client, event.request_id):
                    self.arrivals.hold_or_release(event, request)
            case Refuse():
                if request := self._live(client, event.request_id):
                    self.arrivals.refuse(event, request)
            case Fail():
                if request := self._live(client, event.request_id):
                    self.results.finish(request, EndReason.ERROR, detail=event.detail)
            case ModelRunnerOutput():
                self.results.update_from_output(event)
            case _:
                self.core.calls.handlers[type(event)](event, client)
        self.after_event()

    def after_event(self) -> None:
        for feature in self.core.calls.after_event:
            feature.after_event()

    def drop_client(self, client: int) -> None:
        """Abort all requests of a front end that disconnected."""
        self._end([request for request in self.table.requests.values() if request.client == client], EndReason.ABORTED)
        self.after_event()

    def fail_all(self, detail: str) -> None:
        """End all requests with ERROR, because the engine cannot continue."""
        self._end(list(self.table.requests.values()), EndReason.ERROR, detail)

    def begin_worker_epoch(self, *, new_workers: bool = False) -> bool:
        """Return all running requests to the queue with their tokens, because the workers' state is not trusted.

        Steps in flight will not be applied, and the device's part of the prefix cache is emptied (protocol law 6).

        Args:
            new_workers: the workers were replaced and hold no rows, because the previous ones died or were stopped
                after a fault. Requests in the steps in flight may be the cause. If False, the next diff
                removes the rows that the workers may still hold.

        Returns whether a request was confirmed as the cause, and has ended.
        """
        self.stats.num_worker_restarts += new_workers
        for feature in self.core.calls.before_epoch if new_workers else ():
            feature.before_epoch()
        # Requests return to the queue first, since contents can only be dropped when no request holds a block; features
        # come last, because they decide with the queue as it then is.
        self.results.drop_steps(self.last_step)
        self.kv.drop_device_contents()
        if new_workers:
            self.table.take_removed()
            self.take_side_jobs()
        has_ended = False
        for feature in self.core.calls.new_epoch:
            has_ended |= feature.new_epoch(new_workers=new_workers)
        return has_ended

    def halve_token_budget(self) -> bool:
        """Halve the token budget of steps. Returns False if it is already minimal.

        The minimum is one token per request; without chunked prefill, also the longest possible prompt.
        """
        config = self.config
        least = config.max_num_seqs if config.enable_chunked_prefill else max(config.max_num_seqs, config.max_model_len)
        fewer = max(config.step_tokens // 2, least)
        if fewer == config.step_tokens:
            return False
        self.config = msgspec.structs.replace(self.config, max_num_batched_tokens=fewer)
        return True

    def take_messages(self) -> list[tuple[int, SchedulerToFrontEnd]]:
        """Return and clear the pending (client, message) pairs. If a step can be scheduled, call ``schedule`` first."""
        return self.arrivals.take_replies() + self.decisions.take_events() + self.core.outputs.take()

    def take_side_jobs(self) -> list[SideJob]:
        """Return and clear what workers are to do beside the steps."""
        messages, self.core.side_jobs = self.core.side_jobs, []
        return messages

    def _live(self, client: int, request_id: str) -> Request | None:
        request = self.table.requests.get((client, request_id))
        self.stats.num_stray_messages += request is None
        return request

    def _end(self, requests: list[Request], reason: EndReason, detail: str = "") -> None:
        for request in requests:
            self.results.finish(request, reason, detail=detail)

    def _control(self, event: Control, client: int) -> None:
        done = True
        match event.kind:
            case "statistics" | "requests":
                pass
            case "pause" | "pause_new":
                self.pause = event.kind
            case "resume":
                self.pause = ""
            case "abort_all":
                self._end(list(self.table.requests.values()), EndReason.ABORTED)
            case "reset_prefix_cache":
                done = self.kv.reset_prefix_cache()
                for feature in self.core.calls.contents_dropped if done else ():
                    feature.contents_dropped()
            case _:
                done = any(feature.order(event.kind) for feature in self.core.calls.order)
        is_listing = event.kind == "requests"
        reply = self.statistics(event.query, done, is_listing=is_listing)
        if is_listing:
            listed = list_requests(self.core, is_paused=bool(self.pause))
            reply = msgspec.structs.replace(reply, requests=listed)
        self.core.replies.append((client, reply))

    # ---- steps

    @property
    def can_schedule(self) -> bool:
        """Whether ``schedule`` may return a step: requests wait or run, and the pipeline has room."""
        room = len(self.in_flight) < self.config.pipeline_depth
        return room and self.pause != "pause" and bool(self.table.running or self.table.waiting)

    def schedule(self, now: float = 0.0) -> SchedulerOutput | None:
        """Decide one step.

        Args:
            now: seconds on the caller's clock, for metrics of the block pool; decisions do not depend on it.

        Returns:
            The diff for the workers, or None if no request can run now.
        """
        if not self.can_schedule:
            return None
        self.kv.pool.now = self.decisions.now = now
        plan = self.planner.plan(self.last_step + 1, self.pause)
        diff = self._commit(plan) if plan.rows or self.steady_decode.batch else None
        for feature in self.core.calls.after_step:
            feature.after_step(is_quiet=diff is None)
        return diff

    @property
    def last_step(self) -> int:
        """The number of the newest step."""
        return self.steady_decode.clock.sent

    @property
    def is_idle(self) -> bool:
        """Whether no request exists, and nothing that was sent is unanswered: no step, and nothing of a feature."""
        return not (self.table.requests or self.in_flight or any(each.is_busy() for each in self.core.calls.is_busy))

    @property
    def step_awaiting_inputs(self) -> InFlightStep | None:
        """The oldest step if its sampling waits for token bitmasks, or None.

        All tokens before this step are known, so the bitmasks can be computed.
        """
        oldest = self.in_flight.records[0] if self.in_flight else None
        return oldest if oldest is not None and oldest.awaits_inputs else None

    def _commit(self, plan: StepPlan) -> SchedulerOutput:
        """Commit the plan: build the diff, then advance the scheduled requests."""
        table, step, calls = self.table, plan.step, self.core.calls
        scheduled, running = len(plan.rows) + len(self.steady_decode.batch), len(table.running)
        assert scheduled <= running, f"{scheduled} requests in a step while {running} run"
        # Before any request advances, since the diff says where each row was.
        diff = build_diff(plan, table.unsteady.values(), table.take_removed(), self.kv, calls)
        record = InFlightStep(step, plan.rows, table.take_retired(), self.config.step_tokens - plan.budget)
        # Before the rows are counted: a request that joins steady decode counts its steps from this one.
        self.steady_decode.clock.sent = step
        for row in plan.rows.values():
            request = row.request
            if not record.add(row):
                continue
            for feature in calls.sent if row.num_drafts else ():
                feature.sent(row, step)
            until = min([NEVER, *(feature.steady_until(request) for feature in calls.steady_until)])
            if until > step + 1 and self._may_be_steady(request):
                table.join_steady(request, until, self.planner.decode_blocks.join(request))
            else:
                record.only_steady = False
                record.awaits_inputs |= request.has_grammar
        if record.awaits_inputs:
            diff = msgspec.structs.replace(diff, awaits_sample_inputs=True)
        # After all rows, because some of them have joined steady decode with this step.
        record.steady = self.steady_decode.share_batch()
        self.in_flight.records.append(record)
        for request in plan.last:
            table.leave_steady(request)  # its last result ends it
        self.stats.steps_by_size[record.num_tokens] += 1
        return diff

    def _may_be_steady(self, request: Request) -> bool:
        return (
            self._steady_allowed
            and not request.num_drafts_in_flight
            and not request.needs_no_more_steps
            and not request.is_watched
            and len(self.table.running) <= self.config.step_tokens
        )

    # ---- statistics and checks

    @property
    def num_results(self) -> int:
        """As of ``Core``."""
        return self.core.num_results

    def statistics(self, query: int = 0, done: bool = True, *, is_listing: bool = False) -> Statistics:
        """Return current gauges, and counters since start."""
        found = make_statistics(self.core, query, done, is_paused=bool(self.pause))
        for feature in self.core.calls.statistics:
            found = feature.statistics(found, is_listing=is_listing)
        return found

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold. O(blocks + requests): for tests and idle times."""
        for part in (self.kv, self.table, self.planner.decode_blocks):
            part.check()
        check_requests(self.table, self.kv, self.config, [record.requests() for record in self.in_flight.records])
        for feature in self.core.calls.check:
            feature.check()
