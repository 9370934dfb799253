"""Chooses one token per row: greedy, or temperature, then top-k, then top-p, then min-p.

Sampling is by inverse distribution function: one uniform number per token (``noise.py``) against the running sum of
probabilities. Rows that need a sorted distribution are sorted; the others never are.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.worker_proc.batch_update import BatchUpdate
from quire.worker_proc.input_batch import InputBatch
from quire.worker_proc.sampling.noise import uniform

Rows = npt.NDArray[np.int64]


@dataclass(slots=True)
class SampledLogprobs:
    """Of those ``rows`` (indices into the sampled tokens) that asked; ``[len(rows), width]``, sampled token first."""

    rows: list[int]
    token_ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor


@dataclass(slots=True)
class Sampled:
    """``tokens``: int64 ``[num_rows]``; ``bad``: bool ``[num_rows]``, true where logits were not finite."""

    tokens: torch.Tensor
    bad: torch.Tensor
    logprobs: SampledLogprobs | None


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

    def __init__(self, batch: InputBatch) -> None:
        self._batch = batch
        self._plan: _SamplePlan | None = None

    def update_state(self, update: BatchUpdate | None) -> None:
        """Rows changed: what was derived from them is stale."""
        if update is not None:
            self._plan = None

    def is_plain(self, rows: Rows) -> bool:
        """Whether all of ``rows`` sample greedily, or by temperature and min-p alone: what a device can do unaided."""
        plan = self._plan_for(rows)
        return not len(plan.sorted) and not len(plan.with_logprobs)

    def sample(self, logits: torch.Tensor, rows: Rows) -> Sampled:
        """``logits``: float32 ``[len(rows), vocab]`` of the batch's ``rows``; not changed."""
        plan = self._plan_for(rows)
        best, tokens = logits.max(dim=-1)
        if len(plan.plain) or len(plan.sorted):
            noise = uniform(self._batch.seed[rows], self._batch.num_known[rows])
            if len(plan.plain):
                tokens[plan.plain] = self._sample_plain(logits, plan, noise)
            if len(plan.sorted):
                tokens[plan.sorted] = self._sample_sorted(logits, plan, noise)
        return Sampled(tokens, ~torch.isfinite(best), self._logprobs(logits, tokens, plan))

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
        probs = torch.softmax(self._scaled(logits, plan, plan.plain), dim=-1)
        min_p = self._batch.min_p[plan.rows[plan.plain]]
        if min_p.any():
            floor = probs.amax(dim=-1, keepdim=True) * self._tensor(min_p, logits)[:, None]
            probs = probs.masked_fill(probs < floor, 0.0)
        return _draw(probs, self._tensor(noise[plan.plain], logits))

    def _sample_sorted(self, logits: torch.Tensor, plan: _SamplePlan, noise: npt.NDArray[np.float64]) -> torch.Tensor:
        rows = plan.rows[plan.sorted]
        scaled = self._scaled(logits, plan, plan.sorted)
        vocab = scaled.shape[-1]
        top_k = np.where(self._batch.top_k[rows] > 0, np.minimum(self._batch.top_k[rows], vocab), vocab)
        values, order = _best(scaled, int(top_k.max()))
        rank = torch.arange(values.shape[-1], device=logits.device)
        values = values.masked_fill(rank >= self._tensor(top_k, logits)[:, None], -torch.inf)
        probs = torch.softmax(values, dim=-1)
        # A token stays while the mass before it is below top_p, so that the best one always does.
        before = probs.cumsum(dim=-1) - probs
        probs = probs.masked_fill(before >= self._tensor(self._batch.top_p[rows], logits)[:, None], 0.0)
        floor = probs[:, :1] * self._tensor(self._batch.min_p[rows], logits)[:, None]
        probs = probs.masked_fill(probs < floor, 0.0)
        chosen = _draw(probs, self._tensor(noise[plan.sorted], logits))
        return order.gather(-1, chosen[:, None])[:, 0]

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, plan: _SamplePlan) -> SampledLogprobs | None:
        if not len(plan.with_logprobs):
            return None
        all_values = torch.log_softmax(logits[plan.with_logprobs], dim=-1)
        sampled = tokens[plan.with_logprobs][:, None]
        value = all_values.gather(-1, sampled)
        values, token_ids = _best(all_values, min(plan.num_logprobs, all_values.shape[-1]))
        return SampledLogprobs(
            rows=plan.with_logprobs.tolist(),
            token_ids=torch.cat([sampled, token_ids], dim=-1),
            values=torch.cat([value, values], dim=-1),
            ranks=(all_values > value).sum(dim=-1) + 1,
        )

    @staticmethod
    def _tensor(array: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(array).to(like.device)


def _best(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` best of each row of a float32 ``[rows, n]`` and their indices, best first; of equals the lower index.

    ``torch.topk`` alone orders equals (frequent in 16-bit logits) in a way that depends on ``k``, and with it on what
    other rows ask for. So it is given keys that are never equal: value and index as one integer.
    """
    bits = values.view(torch.int32).to(torch.int64)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats count backwards
    index = torch.arange(values.shape[-1], device=values.device)
    order = torch.topk((ordered << 32) - index, k, dim=-1).indices
    return values.gather(-1, order), order


def _draw(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The first index at which the running sum of ``probs`` ``[rows, n]`` passes ``noise`` of its total."""
    running = probs.cumsum(dim=-1, dtype=torch.float64)
    target = noise[:, None] * running[:, -1:]
    index = torch.searchsorted(running, target, right=True)[:, 0]
    # Rounding may put the target at the very end, behind trailing zeros: take the last index that has any mass.
    last = (running < running[:, -1:]).sum(dim=-1)
    return torch.minimum(index, last)
