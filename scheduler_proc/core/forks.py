"""Forks: requests that continue the known tokens of another one. They wait until it has computed them, and share."""

from typing import Protocol

from quire.scheduler_proc.core.request_table import RequestTable
from quire.scheduler_proc.core.statistics import RecentDecisions
from quire.scheduler_proc.core.step import StepPlan, StepRow
from quire.scheduler_proc.core.suspects import Suspects
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.requests.hooks import SchedulerHooks
from quire.scheduler_proc.requests.reasons import Decision, WaitReason
from quire.scheduler_proc.requests.request import Request, RequestStatus


class ForkFields(Protocol):
    """``forked_from``: id of the parent, or empty."""

    @property
    def forked_from(self) -> str: ...


class Forks:
    """Holds children, requests that were forked from a *parent*, until they can run from its blocks.

    A child knows the tokens that its parent had when it arrived. It is admitted if there is a row and there are blocks:
    in the step that computes the last of these tokens, whose logits the two then share, or in a later one, in which it
    computes that token itself. It neither preempts a request nor overtakes one in the queue.

    When the parent ends first, the first child returns to the queue and becomes the parent of those that wait for the
    same tokens. A child whose parent no longer has the blocks returns to the queue too. Nothing else depends on them:
    there it is a request like others.
    """

    def __init__(
        self,
        table: RequestTable,
        kv: KVCacheManager,
        suspects: Suspects,
        decisions: RecentDecisions,
        hooks: SchedulerHooks,
    ) -> None:
        self._table, self._kv = table, kv
        self._suspects = suspects
        self._decisions = decisions
        self._hooks = hooks
        self._children: dict[int, list[Request]] = {}
        """Those that wait, by handle of the parent."""

    def parent_of(self, event: ForkFields, client: int) -> Request | None:
        """Return the request that an arrival names as its parent, with all its known tokens; None without one."""
        parent = self._table.requests.get((client, event.forked_from)) if event.forked_from else None
        if parent is not None:
            self._table.leave_steady(parent)
        return parent

    def hold(self, request: Request) -> None:
        """Hold a request of the queue until it can be forked, if it has a parent that will run."""
        parent = request.parent
        if parent is not None and parent.wait_reason is WaitReason.BEAMS:
            request.parent = None
        elif parent is not None and not parent.status.is_finished:
            self._table.hold(request, WaitReason.FORK)
            step = self._table.steady_decode.clock.sent + 1
            self._decisions.note(Decision(step, "wait", request.request_id, WaitReason.FORK))
            self._children.setdefault(parent.handle, []).append(request)

    def stop_waiting(self, request: Request) -> None:
        """Return a child to the queue, if it waits here. It keeps its parent, so that it can be held again."""
        parent = request.parent
        if parent is not None and request.wait_reason is WaitReason.FORK:
            children = self._children[parent.handle]
            children.remove(request)
            if not children:
                del self._children[parent.handle]
            self._table.release(request)

    def forget(self, request: Request) -> None:
        """Continue without a request that ends."""
        self.stop_waiting(request)
        self.orphan(request)
        request.parent = None

    def orphan(self, parent: Request) -> None:
        """Return the requests that wait for this one to the queue; those with the same tokens then wait for one."""
        first: Request | None = None
        for child in self._children.pop(parent.handle, ()):
            self._table.release(child)
            if first is None or child.diverges or child.num_tokens != first.num_tokens:
                first = first or child
                child.parent = None
            else:
                child.parent = first
                self.hold(child)

    def plan(self, plan: StepPlan, keep_free: int, *, sampling: bool = False, paused: bool = False) -> None:
        """Admit children of parents whose tokens earlier steps compute, all but the last.

        With ``sampling``: those of parents whose last token this step computes. The plan's rows must then be final.
        ``paused``: admit only the beams of searches that run already.
        """
        if not self._children or plan.preempted or self._suspects.alone is not None:
            return
        waiting = [child for children in self._children.values() for child in children if child.leader or not paused]
        for child in sorted(waiting, key=self._table.waiting.key):
            parent = child.parent
            assert parent is not None
            if parent.status is not RequestStatus.RUNNING or not parent.can_run or self._overtakes(child):
                continue
            root = self._computes_last(plan, parent, child)
            if sampling and root is not None:
                self._admit(plan, root, child, child.num_tokens, keep_free)
            elif not sampling and root is None and plan.budget and parent.num_computed_tokens >= child.num_tokens - 1:
                self._admit(plan, parent, child, child.num_tokens - 1, keep_free)

    @staticmethod
    def _computes_last(plan: StepPlan, parent: Request, child: Request) -> Request | None:
        """Return the request that computes the last token of parent and child in this step, or None.

        It is the parent, or the one that the parent itself is forked from in this step.
        """
        row = None if child.diverges else plan.rows.get(parent.handle)
        ends = row is not None and parent.num_computed_tokens + row.num_tokens == child.num_tokens == parent.num_tokens
        return (row.parent or parent) if row is not None and ends else None

    def _overtakes(self, child: Request) -> bool:
        queue = self._table.waiting
        return any(queue.key(head) < queue.key(child) for head in queue.heads() if head.tenant == child.tenant)

    def _admit(self, plan: StepPlan, parent: Request, child: Request, num_shared: int, keep_free: int) -> None:
        """Admit a child that shares this number of tokens, if there is room."""
        table, kv, samples = self._table, self._kv, num_shared == child.num_tokens
        if len(table.running) >= plan.config.max_num_seqs:
            return
        if plan.reported_tokens(child, num_shared) < child.num_tokens - num_shared:
            return
        if parent.handle in kv.forks:  # its own last block is not complete before the next step
            return
        if not kv.forks.can_fork(parent.handle, num_shared):
            self.stop_waiting(child)
            child.parent = None
            return
        if not kv.fork(parent, child, num_shared, keep_free, is_written=not samples):
            return
        self.stop_waiting(child)
        table.admit(child)
        child.parent = None
        child.begin(num_shared)
        if child.num_cached_tokens < 0:
            child.num_cached_tokens, child.admitted = num_shared, kv.pool.now
        self._hooks.admitted(child, num_shared)
        self._decisions.follow(child, "scheduled", num_tokens=num_shared)
        root = parent if samples else None
        plan.add(StepRow(child, child.num_tokens - num_shared, None, parent=root, forked_from=parent.handle))

    def check(self) -> None:
        """Raise AssertionError unless each child that waits is held, and its parent has not ended."""
        named = {request.handle: request for request in self._table.requests.values()}
        waiting = [child for children in self._children.values() for child in children]
        for handle, children in self._children.items():
            assert children, "no child waits for a parent"
            for child in children:
                assert child.parent is named.get(handle), f"{child!r} waits for a request that has ended"
        held = [r for r in self._table.skipped_waiting.values() if r.wait_reason is WaitReason.FORK]
        assert sorted(r.handle for r in held) == sorted(r.handle for r in waiting), "wrong requests wait for a fork"
