"""Drafts: which requests have how many of them in a step, by a policy that learns from results."""

from collections.abc import Iterable

from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.feature import Feature
from quire.scheduler_proc.features.drafts.draft_state import DraftState
from quire.scheduler_proc.features.drafts.drafting import DraftPolicy, make_draft_policy
from quire.scheduler_proc.messages.steps import InFlightStep, StepRow
from quire.scheduler_proc.requests.request import Request


class Drafts(Feature):
    """Tells the policy what happens, and the core what it chooses. That a draft is a placeholder, which becomes a token
    or is subtracted, is a rule of the core: rows of several positions, of which the last ones may not count.
    """

    name = "drafts"

    def __init__(self, core: Core) -> None:
        self._core = core
        self.is_enabled = core.config.num_speculative_tokens > 0
        self._policy: DraftPolicy = make_draft_policy(core.config)
        self._states: dict[int, DraftState] = {}

    def added(self, request: Request) -> None:
        self._states[request.handle] = DraftState()

    def ended(self, request: Request) -> None:
        del self._states[request.handle]

    def speculate(self, decodes: list[Request], num_decoding: int, step: int) -> Iterable[int]:
        return self._policy.choose([self._states[request.handle] for request in decodes], num_decoding, step)

    def sent(self, row: StepRow, step: int) -> None:
        self._policy.drafts_sent(self._states[row.request.handle], step)

    def steady_until(self, request: Request) -> int:
        return self._policy.next_draft_step(self._states[request.handle])

    def acknowledged(self, record: InFlightStep, output: ModelRunnerOutput) -> None:
        """Learn from a step without prefills: one of those would outweigh all steps that show the cost of a draft."""
        if not record.prefill.tokens:
            num_verified = 0 if output.drafts is None else int(output.drafts.sum())
            num_tokens = record.num_tokens - record.num_drafts + num_verified
            self._policy.record_step_time(output.seconds, num_tokens, record.num_drafts > 0)

    def verified(self, request: Request, verified: int, accepted: int) -> None:
        stats = self._core.stats
        stats.num_drafts += verified > 0
        for position in range(accepted):
            stats.num_accepted_tokens_per_pos[position] += 1
        stats.num_draft_tokens += verified
        stats.num_accepted_tokens += accepted
        self._policy.verified(self._states[request.handle], verified, accepted)
