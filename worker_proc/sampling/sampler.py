"""Chooses one token per position: processors first; then greedily, or by temperature, top-k, top-p and min-p, in turn.

Sampling is by inverse distribution function, with one uniform number per token (``noise.py``), as
``quire.kernels.sampling.sampling`` defines it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from quire.kernels.common.logits import TopLogprobs
from quire.kernels.sampling.sampling import sampled_logits
from quire.protocol.config import EngineConfig
from quire.protocol.request.logits_processors import BatchUpdate
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.positions import Ints, SampledPositions
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.sampling.accept import Accepted
from quire.worker_proc.sampling.draw import Draw, make_draw
from quire.worker_proc.sampling.logprobs import token_logprobs
from quire.worker_proc.sampling.processors import LogitsProcessors
from quire.worker_proc.sampling.token_masks import TokenMasks

Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From the sampled tokens and what they were drawn from (``Sampler.probabilities``) to those that are taken."""


@dataclass(slots=True)
class SampledLogprobs:
    """Of those positions that asked: ``at`` are indices into the sampled ones."""

    at: list[int]
    logprobs: TopLogprobs


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
class _Asked:
    """What any row of the batch asks for, so that a step without it pays for one look at a flag."""

    cuts: bool
    logprobs: bool

    @classmethod
    def of(cls, batch: InputBatch, rows: Ints | slice) -> "_Asked":
        cut = (batch.top_k[rows] > 0) | (batch.top_p[rows] < 1)
        return cls(bool((cut & (batch.temperature[rows] > 0)).any()), bool((batch.num_logprobs[rows] >= 0).any()))


class Sampler:
    """Reads the batch's sampling columns; keeps no state of a request but what is derived from them.

    Attributes:
        processors: what changes logits before they are sampled.
    """

    def __init__(self, batch: InputBatch, config: EngineConfig, device: torch.device, draw: Draw | None = None) -> None:
        """``draw``: another than the device's own."""
        self._batch = batch
        self._raw_logprobs = config.logprobs_mode == "raw_logprobs"
        self._transfer = Transfer(device)
        self._draw = make_draw(batch, device) if draw is None else draw
        self.processors = LogitsProcessors(config, batch, device)
        self._asked: _Asked | None = None

    @property
    def needs_history(self) -> bool:
        """Whether the batch's output lists must be exact before ``sample``: somebody's processor looks at them."""
        return bool(self._batch.outputs.num_kept)

    def reset(self) -> None:
        """The batch is empty, whatever updates were not told."""
        self._forget()
        self.processors.reset()

    def update_state(self, update: BatchUpdate | None) -> None:
        """Rows changed: what was derived from them is stale."""
        if update is not None:
            self._forget()
        self.processors.update_state(update)

    def _forget(self) -> None:
        self._asked = None
        self._draw.rows_changed()

    def is_plain(self, rows: Ints) -> bool:
        """Whether all of ``rows`` sample greedily, or by temperature and min-p alone: what a device can do unaided."""
        if self.processors.active:
            return False
        asked = self._asked_by_any()
        if asked.cuts or asked.logprobs:
            asked = _Asked.of(self._batch, rows)
        return not asked.cuts and not asked.logprobs

    def sample(
        self,
        logits: torch.Tensor,
        positions: SampledPositions,
        masks: TokenMasks | None = None,
        choose: Choose | None = None,
    ) -> Sampled:
        """A token for each of ``positions``, as if the drafts before it were part of the answer.

        Args:
            logits: contiguous float32 ``[len(positions), vocab]``; afterwards as the processors have left them.
            masks: what grammars allow.
            choose: has the last word on the tokens.
        """
        processors = self.processors
        edited = masks is not None or processors.active
        asking = self._asking(positions)
        raw = asking.logits_now(logits, edited=edited) if asking is not None and self._raw_logprobs else None
        model_bad, failed = None, []
        if edited:
            model_bad = self._draw.bad(logits)
            failed = processors.apply(logits, positions, masks)
        if processors.has_argmax_invariant:
            failed = failed + self._scale(logits, positions)
        tokens, bad = self._draw.draw(logits, positions, is_scaled=processors.has_argmax_invariant)
        if choose is not None:
            tokens = choose(tokens, self.probabilities(logits, positions))
        told = None
        if asking is not None:
            source = self._drawn_from(logits[asking.index], positions.rows[asking.at]) if raw is None else raw
            told = SampledLogprobs(asking.at.tolist(), token_logprobs(source, tokens[asking.index], asking.num_best))
        return Sampled(tokens, bad if model_bad is None else bad | model_bad, told, failed)

    def probabilities(self, logits: torch.Tensor, positions: SampledPositions) -> torch.Tensor:
        """What ``sample`` drew from: float32 ``[len(positions), vocab]``, of any sum; one token if greedy.

        ``logits``: as ``sample`` has left them.
        """
        greedy = torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
        (is_random,) = self._transfer(self._batch.temperature[positions.rows] > 0)
        drawn = torch.softmax(self._drawn_from(logits, positions.rows), dim=-1)
        return torch.where(is_random[:, None], drawn, greedy)

    def accepted(self, positions: SampledPositions, tokens: torch.Tensor, accepted: Accepted | None) -> None:
        """What became of the last ``sample``: all of its tokens are the rows' (None), or those that were ``accepted``.

        ``tokens``: int64 on the device, as ``sample`` gave them.
        """
        self.processors.accepted(positions, tokens, accepted)

    def _asked_by_any(self) -> _Asked:
        if self._asked is None:
            self._asked = _Asked.of(self._batch, slice(self._batch.num_rows))
        return self._asked

    def _asking(self, positions: SampledPositions) -> "_Asking | None":
        if not self._asked_by_any().logprobs:
            return None
        asked = self._batch.num_logprobs[positions.rows]
        at = np.flatnonzero(asked >= 0)
        return _Asking(at, self._transfer(at)[0], int(asked.max())) if len(at) else None

    def _scale(self, logits: torch.Tensor, positions: SampledPositions) -> list[tuple[int, str]]:
        """Put the temperature, and plugins that come between it and the cuts, to rows that are not greedy.

        Plugins see logits below the best one, over the temperature: however small that is, they are finite.
        """
        temperature = self._batch.temperature[positions.rows]
        at = np.flatnonzero(temperature > 0)
        random, heat = self._transfer(at, temperature[at])
        own = logits[random]
        own.sub_(own.amax(dim=-1, keepdim=True)).div_(heat[:, None])
        those = SampledPositions(positions.rows[at], positions.offsets[at], positions.drafts[at])
        failed = self.processors.apply_argmax_invariant(own, those)
        logits[random] = own
        return [(int(at[place]), why) for place, why in failed]

    def _drawn_from(self, logits: torch.Tensor, rows: Ints) -> torch.Tensor:
        """Logits of the distribution that tokens of ``rows`` were drawn from, one row each; of greedy ones, as edited.

        ``logits``: of these rows, as ``sample`` has left them.
        """
        batch = self._batch
        temperature = batch.temperature[rows]
        if self.processors.has_argmax_invariant:
            temperature = (temperature > 0).astype(np.float32)
        columns = self._transfer(temperature, batch.top_k[rows], batch.top_p[rows], batch.min_p[rows])
        return sampled_logits(logits, *columns)


@dataclass(frozen=True, slots=True)
class _Asking:
    """Positions that ask for log probabilities: int64 on the host, and on the device; and of how many best tokens."""

    at: Ints
    index: torch.Tensor
    num_best: int

    def logits_now(self, logits: torch.Tensor, *, edited: bool) -> torch.Tensor:
        """Their logits, which stay as they are where ``logits`` are ``edited`` afterwards."""
        return logits if len(self.at) == len(logits) and not edited else logits[self.index]
