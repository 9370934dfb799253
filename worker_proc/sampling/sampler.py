"""Chooses one token per row: greedy, or temperature, then top-k, then top-p, then min-p.

Sampling is by inverse distribution function: one uniform number per token (``noise.py``) against the running sum of
probabilities. Rows that need a sorted distribution are sorted; the others never are.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.logits_processors import BatchUpdate
from quire.worker_proc.input_batch import InputBatch
from quire.worker_proc.sampling.accept import Accepted
from quire.worker_proc.sampling.logprobs import TokenLogprobs, best, token_logprobs
from quire.worker_proc.sampling.noise import uniform
from quire.worker_proc.sampling.positions import SampledPositions
from quire.worker_proc.sampling.token_masks import TokenMasks

Rows = npt.NDArray[np.int64]
Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From the sampled tokens and what they were drawn from (``Sampler.probabilities``) to those that are taken."""


@dataclass(slots=True)
class SampledLogprobs:
    """Of those positions that asked: ``at`` are indices into the sampled ones."""

    at: list[int]
    logprobs: TokenLogprobs


@dataclass(slots=True)
class Sampled:
    """Of each sampled position one token.

    Attributes:
        tokens: int64 ``[num_positions]``.
        bad: bool ``[num_positions]``, true where the model's logits were not finite.
        failed: (position, why) where there is no token for a reason of the request's own.
    """

    tokens: torch.Tensor
    bad: torch.Tensor
    logprobs: SampledLogprobs | None = None
    failed: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _SamplePlan:
    """How the sampled rows split; indices are into them. Kept while neither rows nor their order change."""

    rows: Rows
    plain: Rows
    sorted: Rows
    with_logprobs: Rows
    num_logprobs: int


class Sampler:
    """Reads the batch's sampling columns; keeps no state of a request but what ``_plan`` derives from them."""

    def __init__(self, batch: InputBatch, config: EngineConfig, device: torch.device) -> None:
        self._batch = batch
        self._config = config
        self._device = device
        self._plan: _SamplePlan | None = None

    @property
    def needs_history(self) -> bool:
        """Whether the batch's output lists must be exact before ``sample``: somebody's processor looks at them."""
        return bool(self._batch.outputs.num_kept)

    def reset(self) -> None:
        """The batch is empty, whatever updates were not told."""
        self._plan = None

    def update_state(self, update: BatchUpdate | None) -> None:
        """Rows changed: what was derived from them is stale."""
        if update is not None:
            self._plan = None

    def is_plain(self, rows: Rows) -> bool:
        """Whether all of ``rows`` sample greedily, or by temperature and min-p alone: what a device can do unaided."""
        plan = self._plan_for(rows)
        return not len(plan.sorted) and not len(plan.with_logprobs)

    def sample(
        self,
        logits: torch.Tensor,
        positions: SampledPositions,
        masks: TokenMasks | None = None,
        choose: Choose | None = None,
    ) -> Sampled:
        """A token for each of ``positions``, as if the drafts before it were part of the answer.

        Args:
            logits: float32 ``[len(positions), vocab]``; not changed.
            masks: what grammars allow.
            choose: has the last word on the tokens.
        """
        rows = positions.rows
        plan = self._plan_for(rows)
        best_values, tokens = logits.max(dim=-1)
        if len(plan.plain) or len(plan.sorted):
            noise = uniform(self._batch.seed[rows], self._batch.num_known[rows] + positions.offsets)
            if len(plan.plain):
                tokens[plan.plain] = self._sample_plain(logits, plan, noise)
            if len(plan.sorted):
                tokens[plan.sorted] = self._sample_sorted(logits, plan, noise)
        if choose is not None:
            tokens = choose(tokens, self.probabilities(logits, positions, masks))
        return Sampled(tokens, ~torch.isfinite(best_values), self._logprobs(logits, tokens, plan))

    def probabilities(
        self, logits: torch.Tensor, positions: SampledPositions, masks: TokenMasks | None = None
    ) -> torch.Tensor:
        """What ``sample`` draws from: float32 ``[len(positions), vocab]``, of any sum; one token if greedy."""
        plan = self._plan_for(positions.rows)
        found = torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
        if len(plan.plain):
            found[plan.plain] = self._plain_probs(logits, plan)
        if len(plan.sorted):
            probs, order = self._sorted_probs(logits, plan)
            found[plan.sorted] = torch.zeros_like(logits[plan.sorted]).scatter_(-1, order, probs)
        return found

    def accepted(self, positions: SampledPositions, tokens: torch.Tensor, accepted: Accepted | None) -> None:
        """What became of the last ``sample``: all of its tokens are the rows' (None), or those that were ``accepted``.

        ``tokens``: int64 on the device, as ``sample`` gave them.
        """

    def _plan_for(self, rows: Rows) -> _SamplePlan:
        plan = self._plan
        if plan is not None and np.array_equal(plan.rows, rows):
            return plan
        batch = self._batch
        random = batch.temperature[rows] > 0
        cut = (batch.top_k[rows] > 0) | (batch.top_p[rows] < 1)
        asked = batch.num_logprobs[rows]
        self._plan = _SamplePlan(
            rows=rows,
            plain=np.flatnonzero(random & ~cut),
            sorted=np.flatnonzero(random & cut),
            with_logprobs=np.flatnonzero(asked >= 0),
            num_logprobs=int(asked.max(initial=0)),
        )
        return self._plan

    def _scaled(self, logits: torch.Tensor, plan: _SamplePlan, which: Rows) -> torch.Tensor:
        """Logits below the best one, over the temperature: however small that is, nothing overflows upwards."""
        temperature = self._tensor(self._batch.temperature[plan.rows[which]], logits)
        own = logits[which]
        return own.sub_(own.amax(dim=-1, keepdim=True)).div_(temperature[:, None])

    def _sample_plain(self, logits: torch.Tensor, plan: _SamplePlan, noise: npt.NDArray[np.float64]) -> torch.Tensor:
        return _draw(self._plain_probs(logits, plan), self._tensor(noise[plan.plain], logits))

    def _plain_probs(self, logits: torch.Tensor, plan: _SamplePlan) -> torch.Tensor:
        probs = torch.softmax(self._scaled(logits, plan, plan.plain), dim=-1)
        min_p = self._batch.min_p[plan.rows[plan.plain]]
        if min_p.any():
            floor = probs.amax(dim=-1, keepdim=True) * self._tensor(min_p, logits)[:, None]
            probs = probs.masked_fill(probs < floor, 0.0)
        return probs

    def _sample_sorted(self, logits: torch.Tensor, plan: _SamplePlan, noise: npt.NDArray[np.float64]) -> torch.Tensor:
        probs, order = self._sorted_probs(logits, plan)
        chosen = _draw(probs, self._tensor(noise[plan.sorted], logits))
        return order.gather(-1, chosen[:, None])[:, 0]

    def _sorted_probs(self, logits: torch.Tensor, plan: _SamplePlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities in falling order, and the tokens that they are of."""
        rows = plan.rows[plan.sorted]
        scaled = self._scaled(logits, plan, plan.sorted)
        vocab = scaled.shape[-1]
        top_k = np.where(self._batch.top_k[rows] > 0, np.minimum(self._batch.top_k[rows], vocab), vocab)
        values, order = best(scaled, int(top_k.max()))
        rank = torch.arange(values.shape[-1], device=logits.device)
        values = values.masked_fill(rank >= self._tensor(top_k, logits)[:, None], -torch.inf)
        probs = torch.softmax(values, dim=-1)
        # A token stays while the mass before it is below top_p, so that the best one always does.
        before = probs.cumsum(dim=-1) - probs
        probs = probs.masked_fill(before >= self._tensor(self._batch.top_p[rows], logits)[:, None], 0.0)
        floor = probs[:, :1] * self._tensor(self._batch.min_p[rows], logits)[:, None]
        return probs.masked_fill(probs < floor, 0.0), order

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, plan: _SamplePlan) -> SampledLogprobs | None:
        at = plan.with_logprobs
        if not len(at):
            return None
        return SampledLogprobs(at.tolist(), token_logprobs(logits[at], tokens[at], plan.num_logprobs))

    @staticmethod
    def _tensor(array: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(array).to(like.device)


def _draw(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The first index at which the running sum of ``probs`` ``[rows, n]`` passes ``noise`` of its total."""
    running = probs.cumsum(dim=-1, dtype=torch.float64)
    target = noise[:, None] * running[:, -1:]
    index = torch.searchsorted(running, target, right=True)[:, 0]
    # Rounding may put the target at the very end, behind trailing zeros: take the last index that has any mass.
    last = (running < running[:, -1:]).sum(dim=-1)
    return torch.minimum(index, last)
