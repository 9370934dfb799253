"""Forks: requests that continue the known tokens of another one. They wait until it has computed them, and share."""

from itertools import chain
from typing import Any

import msgspec

from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.feature import Feature, Known
from quire.scheduler_proc.core.step import Contents, StepPlan
from quire.scheduler_proc.messages.arrivals import Refusal
from quire.scheduler_proc.messages.steps import StepRow
from quire.scheduler_proc.requests.reasons import Decision, WaitReason
from quire.scheduler_proc.requests.request import Request, RequestPart, RequestStatus

PARENT = RequestPart[Request | None]("parent", None)
"""The request whose blocks one will share, until it is admitted or returns to the queue."""
DIVERGES = RequestPart("diverges", False)
"""Whether the last token of a request is not one of its parent's."""


class Forks(Feature):
    """Holds children, requests that were forked from a *parent*, until they can run from its blocks.

    A child knows the tokens that its parent had when it arrived. It is admitted if there is a row and there are blocks:
    in the step that computes the last of these tokens, whose logits the two then share, or in a later one, in which it
    computes that token itself. It neither preempts a request nor overtakes one in the queue.

    When the parent ends first, the first child returns to the queue and becomes the parent of those that wait for the
    same tokens. A child whose parent no longer has the blocks returns to the queue too. Nothing else depends on them:
    there it is a request like others.
    """

    name = "forks"

    def __init__(self, core: Core) -> None:
        self._core, self._table, self._kv = core, core.table, core.kv
        self._children: dict[int, list[Request]] = {}
        """Those that wait, by handle of the parent."""

    # ---- arrivals

    def parent_of(self, event: Any, client: int) -> Request | None:
        """Return the request that an arrival names as its parent, with all its known tokens; None without one."""
        parent = self._table.requests.get((client, event.forked_from)) if event.forked_from else None
        if parent is not None:
            self._table.leave_steady(parent)
        return parent

    def known_tokens(self, event: Any, client: int) -> Known | None:
        """Return the known tokens of the parent, for a request that names one."""
        if not event.forked_from:
            return None
        parent = self.parent_of(event, client)
        if parent is None:
            text = f"there is no request {event.forked_from!r} to fork"
            raise Refusal("parent_not_found", "forked_from", text)
        if len(event.prompt_token_ids) or event.output_token_ids is not None:
            raise Refusal(
                "invalid_value", "prompt", "a forked request has the tokens of its parent, and none of its own"
            )
        if event.sampling.prompt_logprobs is not None:
            text = "prompt_logprobs cannot be combined with forked_from: the prompt has been computed"
            raise Refusal("invalid_value", "prompt_logprobs", text)
        for feature in self._core.calls.check_parent:
            feature.check_parent(event, parent)
        num_tokens = event.num_forked_tokens or parent.num_tokens
        if not parent.num_prompt_tokens <= num_tokens <= parent.num_tokens:
            text = (
                f"num_forked_tokens must be from {parent.num_prompt_tokens} to {parent.num_tokens}, the tokens of the "
                f"prompt and of all of the request to fork (got {num_tokens})"
            )
            raise Refusal("invalid_value", "num_forked_tokens", text)
        return Known(parent.tokens.fork(num_tokens), parent.num_prompt_tokens, parent, self._check_output)

    def prepare(self, request: Request, event: Any, parent: Request | None) -> None:
        if event is not None:
            PARENT.put(request, parent)

    def _check_output(self, request: Request) -> None:
        if request.needs_no_more_steps:
            text = f"the request to fork has {request.num_output_tokens} output tokens there, so that no token is left"
            raise Refusal("invalid_value", "max_tokens", text)
        if request.repeats_itself:
            raise Refusal("invalid_value", "repetition_detection", "the output to continue repeats itself already")

    def arrived(self, request: Request, event: Any) -> None:
        self.hold(request)

    def released(self, request: Request) -> None:
        self.hold(request)

    # ---- waiting

    def hold(self, request: Request) -> None:
        """Hold a request of the queue until it can be forked, if it has a parent that will run."""
        parent = PARENT.of(request)
        if parent is not None and parent.wait_reason is WaitReason.BEAMS:
            PARENT.put(request, None)
        elif parent is not None and not parent.status.is_finished:
            self._table.hold(request, WaitReason.FORK)
            self._core.decisions.note(Decision(self._core.next_step, "wait", request.request_id, WaitReason.FORK))
            self._children.setdefault(parent.handle, []).append(request)

    def hold_derived(self, request: Request, parent: Request) -> None:
        """Hold a new request that has the tokens of ``parent`` but the last."""
        PARENT.put(request, parent)
        DIVERGES.put(request, True)
        self.hold(request)

    def stop_waiting(self, request: Request) -> None:
        """A child keeps its parent, so that it can be held again."""
        parent = PARENT.of(request)
        if parent is not None and request.wait_reason is WaitReason.FORK:
            children = self._children[parent.handle]
            children.remove(request)
            if not children:
                del self._children[parent.handle]
            self._table.release(request)

    def ending(self, request: Request) -> None:
        self.stop_waiting(request)
        self.orphan(request)
        PARENT.put(request, None)

    def orphan(self, parent: Request) -> None:
        """Return the requests that wait for this one to the queue; those with the same tokens then wait for one."""
        first: Request | None = None
        for child in self._children.pop(parent.handle, ()):
            self._table.release(child)
            if first is None or DIVERGES.of(child) or child.num_tokens != first.num_tokens:
                first = first or child
                PARENT.put(child, None)
            else:
                PARENT.put(child, first)
                self.hold(child)

    # ---- steps

    def after_running(self, plan: StepPlan, *, is_paused: bool) -> None:
        """Admit children of parents whose tokens earlier steps compute, all but the last.

        Before other waiting requests, which would take the rows and blocks: a child costs one position and shares what
        its parent holds now.
        """
        if self._children:
            self._plan(plan, is_paused=is_paused, sampling=False)

    def after_waiting(self, plan: StepPlan, *, is_paused: bool) -> None:
        """Admit children of parents whose last token this step computes, which must be certain: rows are final now."""
        if self._children:
            self._plan(plan, is_paused=is_paused, sampling=True)

    def _plan(self, plan: StepPlan, *, is_paused: bool, sampling: bool) -> None:
        """Admit children. A pause admits only the beams of searches that run already."""
        if plan.preempted or plan.alone is not None:
            return
        held = chain.from_iterable(self._children.values())
        waiting = [child for child in held if child.client < 0 or not is_paused]
        for child in sorted(waiting, key=self._table.waiting.key):
            parent = PARENT.of(child)
            assert parent is not None
            if parent.status is not RequestStatus.RUNNING or self._table.pause_reason(parent) or self._overtakes(child):
                continue
            root = self._computes_last(plan, parent, child)
            if sampling and root is not None:
                self._admit(plan, root, child, child.num_tokens)
            elif not sampling and root is None and plan.budget and parent.num_computed_tokens >= child.num_tokens - 1:
                self._admit(plan, parent, child, child.num_tokens - 1)

    @staticmethod
    def _computes_last(plan: StepPlan, parent: Request, child: Request) -> Request | None:
        """Return the request that computes the last token of parent and child in this step, or None.

        It is the parent, or the one that the parent itself is forked from in this step.
        """
        row = None if DIVERGES.of(child) else plan.rows.get(parent.handle)
        ends = row is not None and parent.num_computed_tokens + row.num_tokens == child.num_tokens == parent.num_tokens
        return (row.parent or parent) if row is not None and ends else None

    def _overtakes(self, child: Request) -> bool:
        queue = self._table.waiting
        return any(queue.key(head) < queue.key(child) for head in queue.heads() if head.account == child.account)

    def _admit(self, plan: StepPlan, parent: Request, child: Request, num_shared: int) -> None:
        """Admit a child that shares this number of tokens, if there is room."""
        table, kv, samples = self._table, self._kv, num_shared == child.num_tokens
        if len(table.running) >= plan.config.max_num_seqs:
            return
        if any(budget.left(child, num_shared) < child.num_tokens - num_shared for budget in plan.budgets):
            return
        if kv.awaits_copy(parent.handle):
            return
        num_new = child.num_tokens - num_shared
        can_compute = all(each.chunk(child, num_shared, num_new, num_new) == num_new for each in self._core.calls.chunk)
        if not (can_compute and kv.can_fork(parent, num_shared, is_written=not samples)):
            self.stop_waiting(child)
            PARENT.put(child, None)
            return
        if not kv.fork(parent, child, num_shared, plan.keep_free, is_written=not samples):
            return
        self.stop_waiting(child)
        table.start(child)
        PARENT.put(child, None)
        child.begin(num_shared)
        if child.num_cached_tokens < 0:
            child.num_cached_tokens, child.admitted = num_shared, kv.pool.now
        self._core.hooks.admitted(child, num_shared)
        self._core.decisions.follow(child, "scheduled", num_tokens=num_shared)
        root = parent if samples else None
        plan.add(StepRow(child, num_new, None, parent=root, shares_with=parent.handle))

    def contents(self, row: StepRow, found: dict[Any, Contents]) -> Contents | None:
        """Return what a new child has, as its parent's first child had it: many children are read once."""
        request, num_shared = row.request, row.request.num_computed_tokens
        if row.shares_with < 0 or DIVERGES.of(request):
            return None
        key = row.shares_with, num_shared
        if (first := found.get(key)) is not None:
            return first[0], self._kv.block_ids(request, first[1], num_shared)
        found[key] = request.tokens.array(), self._kv.block_ids(request)
        return found[key]

    def sending(self, plan: StepPlan, diff: SchedulerOutput) -> SchedulerOutput:
        copies = self._kv.forks.take()
        if not (copies or plan.rows):
            return diff
        forks = [(handle, row.parent.handle) for handle, row in plan.rows.items() if row.parent is not None]
        return msgspec.structs.replace(diff, block_copies=copies, forks=forks) if copies or forks else diff

    def check(self) -> None:
        """Raise AssertionError unless each child that waits is held, and its parent has not ended."""
        named = {request.handle: request for request in self._table.requests.values()}
        waiting = [child for children in self._children.values() for child in children]
        for handle, children in self._children.items():
            assert children, "no child waits for a parent"
            for child in children:
                assert PARENT.of(child) is named.get(handle), f"{child!r} waits for a request that has ended"
        held = [r for r in self._table.skipped_waiting.values() if r.wait_reason is WaitReason.FORK]
        assert sorted(r.handle for r in held) == sorted(r.handle for r in waiting), "wrong requests wait for a fork"
