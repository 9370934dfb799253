"""Step plan: the decisions of one step while it is planned, and the diff built from them."""

from collections.abc import Callable, Sequence
from typing import Protocol

from quire.protocol.config import EngineConfig
from quire.protocol.wire.arrays import Int32
from quire.scheduler_proc.kv.decode_blocks import NewBlocks
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.messages.steps import StepRow
from quire.scheduler_proc.requests.reasons import WaitReason
from quire.scheduler_proc.requests.request import Request


class Budget(Protocol):
    """Something that a feature rations between the rows of one step. Tokens and prefills are rationed by the plan.

    Attributes:
        reason: why a request waits for which too little is left.
    """

    reason: WaitReason

    def left(self, request: Request, num_computed: int) -> int:
        """Return how many positions after the first ``num_computed`` of a request the rest has room for."""

    def take(self, row: StepRow) -> None:
        """Take what a row needs, which is added to the plan."""

    def give_back(self, row: StepRow) -> None:
        """Give back what a row has taken, which is withdrawn."""


Chunks = Callable[[Request, int, int, int], int]
"""``Feature.chunk``."""


class StepPlan:
    """Decisions of one call of ``schedule()``.

    A row can be withdrawn until the plan is committed, because the progress of requests changes only at the commit.

    Invariant: the tokens of all rows, one token per request in steady decode, and ``budget`` add up to the step budget.

    Attributes:
        step: number of the step.
        config: limits of the step.
        budget: tokens left.
        prefill_budget: tokens left for prefills, of ``prefill_limit``.
        budgets: what features ration in the step.
        grown: requests in steady decode that got the blocks in ``new_blocks``.
        last: requests in steady decode whose last token is sampled in this step.
        alone: the only request that may be in the step, or None; others_wait: then the reason of all others.
        keep_free: blocks that admission leaves free, as of when it began. Requests admitted since do not raise it.
    """

    def __init__(
        self,
        step: int,
        config: EngineConfig,
        kv: KVCacheManager,
        budgets: Sequence[Budget] = (),
        chunks: Sequence[Chunks] = (),
    ) -> None:
        """``chunks``: what decides where chunks end."""
        self.step = step
        self.config = config
        self._kv, self._chunks = kv, chunks
        self.budget = self.prefill_budget = self.prefill_limit = config.step_tokens
        self.budgets = budgets
        self.rows: dict[int, StepRow] = {}
        self.preempted: list[Request] = []
        self.num_claimed = 0
        """Preempted requests whose blocks or rows were claimed for another account; they do not stop admission."""
        self.grown: list[Request] = []
        self.new_blocks = NewBlocks([], [], [])
        self.last: list[Request] = []
        self.alone: Request | None = None
        self.others_wait = WaitReason.QUEUED
        self.keep_free = 0

    def bound_prefill(self, num_steady: int) -> None:
        """Set the prefill budget: a part of the step while requests decode, whose next tokens wait for the step."""
        self.prefill_budget = self.budget
        if self.config.enable_chunked_prefill and (num_steady or self.rows):
            part = int(self.config.max_prefill_share * self.config.step_tokens)
            self.prefill_budget = min(self.budget, max(part, 1))
        self.prefill_limit = self.prefill_budget

    def lacks_tokens(self) -> WaitReason | None:
        """Return why no request can be admitted to the step, or None if one can."""
        if self.budget <= 0:
            return WaitReason.TOKEN_BUDGET
        return WaitReason.PREFILL_SHARE if self.prefill_budget <= 0 else None

    def lacks_room(self, request: Request, num_hit_tokens: int) -> WaitReason | None:
        """Return why a waiting request cannot be admitted to the step, apart from rows and blocks, or None."""
        if (reason := self.lacks_tokens()) is not None:
            return reason
        missing, chunked = request.num_tokens - num_hit_tokens, self.config.enable_chunked_prefill
        for budget in self.budgets:
            if budget.left(request, num_hit_tokens) < (1 if chunked else missing):
                return budget.reason
        return None if chunked or missing <= self.budget else WaitReason.WHOLE_PROMPT

    def prefill_tokens(self, request: Request, wanted: int, num_computed: int, part: int | None = None) -> int:
        """Return how many of the ``wanted`` positions of a prefill the step can compute.

        ``part``: most of them by the division of the prefill budget; None: all that is left of it.
        """
        most = min(wanted, self.budget)
        for budget in self.budgets:
            most = min(most, budget.left(request, num_computed))
        most = min(most, self._kv.step_tokens(request.num_tokens))
        num_tokens = min(most, self.prefill_budget if part is None else min(part, self.prefill_budget))
        num_tokens = min(num_tokens, self.config.long_prefill_token_threshold or num_tokens)
        for chunks in self._chunks if num_tokens > 0 else ():
            num_tokens = chunks(request, num_computed, num_tokens, most)
        return num_tokens

    def add(self, row: StepRow) -> None:
        request = row.request
        self.rows[request.handle] = row
        for budget in self.budgets:
            budget.take(row)
        self.budget -= row.num_tokens
        if row.is_prefill:
            self.prefill_budget -= row.num_tokens

    def withdraw(self, request: Request) -> None:
        """Remove the request's row from the plan and return its tokens to the budget."""
        row = self.rows.pop(request.handle, None)
        if row is not None:
            for budget in self.budgets:
                budget.give_back(row)
            self.budget += row.num_tokens
            if row.is_prefill:
                self.prefill_budget += row.num_tokens
        elif request.is_steady:
            self.budget += 1
        if request in self.grown:
            self.grown.remove(request)
            self.new_blocks.remove(request.handle)


Contents = tuple[Int32, list[Int32]]
"""The tokens of a new request, and its block ids by KV group."""
