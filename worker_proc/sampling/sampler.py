"""Samples one token per position: logits processors first, then argmax, or temperature, top-k, top-p and min-p.

Sampling inverts the cumulative distribution with one uniform number per token (``noise.py``), as
``quire.kernels.sampling.sampling`` defines it.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.common.logits import TopLogprobs
from quire.kernels.sampling.sampling import sampled_logits
from quire.protocol.config import EngineConfig
from quire.protocol.request.logits_processors import BatchUpdate
from quire.protocol.request.sampling_params import SamplingParams
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.positions import Ints, SampledPositions
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.sampling.accept import Accepted, Choose
from quire.worker_proc.sampling.draw import Draw, make_draw
from quire.worker_proc.sampling.logprobs import token_logprobs, with_given
from quire.worker_proc.sampling.processors import LogitsProcessors
from quire.worker_proc.sampling.token_masks import TokenMasks


@dataclass(slots=True)
class SampledLogprobs:
    """Log probabilities of the positions that ask for them.

    Attributes:
        at: indices into the sampled positions, ascending.
        num_best: how many most likely tokens each of them asks for; ``logprobs`` has the most of all of them.
    """

    at: list[int]
    num_best: Ints
    logprobs: TopLogprobs


@dataclass(slots=True)
class SampledTokens:
    """One token per sampled position.

    Attributes:
        tokens: int64 ``[num_positions]``.
        bad: bool ``[num_positions]``, true if the model's logits are not finite.
        failed: (position, reason) of positions at which the request's own constraints or plugins leave no token.
    """

    tokens: torch.Tensor
    bad: torch.Tensor
    logprobs: SampledLogprobs | None = None
    failed: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _UsedFeatures:
    """Whether any row uses top-k or top-p (``cuts``), or log probabilities; a step without them skips their code."""

    cuts: bool
    logprobs: bool

    @classmethod
    def of(cls, batch: InputBatch, rows: Ints | slice) -> "_UsedFeatures":
        cut = (batch.top_k[rows] > 0) | (batch.top_p[rows] < 1)
        return cls(bool((cut & (batch.temperature[rows] > 0)).any()), bool((batch.num_logprobs[rows] >= 0).any()))


class Sampler:
    """Samples by the batch's sampling columns; keeps only state that is derived from the batch.

    Attributes:
        processors: the logits processors.
    """

    def __init__(
        self,
        batch: InputBatch,
        config: EngineConfig,
        device: torch.device,
        draw: Draw | None = None,
        transfer: Transfer | None = None,
    ) -> None:
        """
        Args:
            draw: replaces the device's default.
            transfer: sends arrays to the device; None: one of its own.
        """
        self._batch = batch
        self._raw_logprobs = config.logprobs_mode == "raw_logprobs"
        self._transfer = transfer or Transfer(device)
        self._draw = make_draw(batch, device, self._transfer) if draw is None else draw
        self.processors = LogitsProcessors(config, batch, device, self._transfer)
        self._used: _UsedFeatures | None = None
        self._prepared_for: SampledPositions | None = None
        self._wanted: _LogprobPositions | None = None
        self._scaled: _ScaledPositions | None = None

    @property
    def needs_history(self) -> bool:
        """Whether the batch's output lists must be complete before ``prepare``, because a processor reads them."""
        return self.processors.needs_history

    def reads_output(self, params: SamplingParams) -> bool:
        """Return whether the output tokens of a request must be kept as a list on the host."""
        return self.processors.reads_output(params)

    def reset(self) -> None:
        """Start over with an empty batch, without regard to updates that were not applied."""
        self._forget()
        self.processors.reset()

    def update_state(self, update: BatchUpdate | None) -> None:
        """Apply a change of the batch's rows, and drop what is cached of them."""
        if update is not None:
            self._forget()
        self.processors.update_state(update)

    def _forget(self) -> None:
        self._used = None
        self._draw.rows_changed()

    def is_plain(self, rows: Ints) -> bool:
        """Whether all of ``rows`` use only temperature and min-p, or are greedy: a CUDA graph can sample them."""
        if self.processors.active:
            return False
        asked = self._used_by_any_row()
        if asked.cuts or asked.logprobs:
            asked = _UsedFeatures.of(self._batch, rows)
        return not asked.cuts and not asked.logprobs

    def prepare(self, positions: SampledPositions) -> None:
        """Send to the device what ``sample`` needs for these positions; otherwise ``sample`` does it.

        If ``needs_history``, the batch's output lists must be complete.
        """
        self._prepared_for = positions
        if self.processors.active:
            self.processors.prepare(positions)
        self._wanted = self._logprob_positions(positions)
        self._scaled = self._scaled_positions(positions) if self.processors.has_argmax_invariant else None
        self._draw.prepare(positions)

    def sample(
        self,
        logits: torch.Tensor,
        positions: SampledPositions,
        masks: TokenMasks | None = None,
        choose: Choose | None = None,
    ) -> SampledTokens:
        """Sample a token for each of ``positions``, as if the drafts before it were output tokens.

        Args:
            logits: contiguous float32 ``[len(positions), vocab]``; the processors edit them in place.
            masks: token bitmasks of grammars.
            choose: replaces the sampled tokens, such as rejection sampling does.
        """
        if positions is not self._prepared_for:
            self.prepare(positions)
        self._prepared_for = None
        processors, wanted = self.processors, self._wanted
        edited = masks is not None or processors.active
        # Copied before the processors run, which edit the logits in place. Without edits the same memory serves, and no
        # copy is made.
        raw = wanted.raw_logits(logits, edited=edited) if wanted is not None and self._raw_logprobs else None
        model_bad, failed = None, []
        if edited:
            # Checked before the processors, which may turn a value that is not finite into minus infinity, or make a
            # whole row of them: the first is a fault of the model, the second of the request.
            model_bad = self._draw.bad(logits)
            failed = processors.apply(logits, positions, masks)
        if self._scaled is not None:
            failed = failed + self._scale(logits, self._scaled)
        tokens, bad = self._draw.draw(logits, positions, is_scaled=processors.has_argmax_invariant)
        if choose is not None:
            tokens = choose(tokens, self.probabilities(logits, positions))
        logprobs = None
        if wanted is not None:
            source = self._sampled_logits(logits[wanted.index], wanted.columns) if raw is None else raw
            if wanted.beams is not None and (edited or raw is None):
                source[wanted.beams] = logits[wanted.index[wanted.beams]]
            values = token_logprobs(source, tokens[wanted.index], wanted.most_likely)
            if wanted.given is not None:
                values = with_given(values, source, *wanted.given)
            logprobs = SampledLogprobs(wanted.at.tolist(), wanted.num_best, values)
        return SampledTokens(tokens, bad if model_bad is None else bad | model_bad, logprobs, failed)

    def probabilities(self, logits: torch.Tensor, positions: SampledPositions) -> torch.Tensor:
        """Return the distributions that ``sample`` drew from: float32 ``[len(positions), vocab]``, one-hot if greedy.

        ``logits``: as ``sample`` left them.
        """
        greedy = torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
        (is_random,) = self._transfer(self._batch.temperature[positions.rows] > 0)
        columns = self._transfer(*self._drawn_from(positions.rows))
        drawn = torch.softmax(self._sampled_logits(logits, columns), dim=-1)
        return torch.where(is_random[:, None], drawn, greedy)

    def accepted(self, positions: SampledPositions, tokens: torch.Tensor, accepted: Accepted | None) -> None:
        """Pass the last ``sample``'s accepted tokens (None: all of them) to the processors.

        ``tokens``: int64 on the device, as ``sample`` returned them.
        """
        self.processors.accepted(positions, tokens, accepted)

    def _used_by_any_row(self) -> _UsedFeatures:
        if self._used is None:
            self._used = _UsedFeatures.of(self._batch, slice(self._batch.num_rows))
        return self._used

    def _logprob_positions(self, positions: SampledPositions) -> "_LogprobPositions | None":
        if not self._used_by_any_row().logprobs:
            return None
        asked = self._batch.num_logprobs[positions.rows]
        at = np.flatnonzero(asked >= 0)
        if not len(at):
            return None
        columns = () if self._raw_logprobs else self._drawn_from(positions.rows[at])
        beams = np.flatnonzero(self._batch.searches[positions.rows[at]])
        index, sent_beams, *sent = self._transfer(at, beams, *columns)
        found_beams = sent_beams if len(beams) else None
        most_likely, given = self._given_tokens(asked[at], self._batch.logprob_tokens[positions.rows[at]])
        return _LogprobPositions(at, index, asked[at], sent, found_beams, most_likely, given)

    def _given_tokens(self, asked: Ints, lists: npt.NDArray[Any]) -> tuple[int, list[torch.Tensor] | None]:
        """Return ``most_likely`` and ``given`` of _LogprobPositions, from the lists of given tokens at each of them."""
        rows = np.flatnonzero(lists)
        if not len(rows):
            return int(asked.max()), None
        given = np.zeros((len(rows), int(asked[rows].max())), np.int64)
        for row, tokens in zip(given, lists[rows], strict=True):
            row[: len(tokens)] = tokens
        return int(np.delete(asked, rows).max(initial=0)), self._transfer(rows, given)

    def _scaled_positions(self, positions: SampledPositions) -> "_ScaledPositions":
        temperature = self._batch.temperature[positions.rows]
        at = np.flatnonzero(temperature > 0)
        random = SampledPositions(positions.rows[at], positions.offsets[at], positions.drafts[at])
        return _ScaledPositions(at, random, *self._transfer(at, temperature[at]))

    def _scale(self, logits: torch.Tensor, scaled: "_ScaledPositions") -> list[tuple[int, str]]:
        """Apply the temperature, then argmax-invariant plugins, to the logits of rows that are not greedy, in place.

        The best logit is subtracted before the division, so that the result is finite at any temperature.
        """
        own = logits[scaled.index]
        own.sub_(own.amax(dim=-1, keepdim=True)).div_(scaled.divisor[:, None])
        failed = self.processors.apply_argmax_invariant(own, scaled.positions)
        logits[scaled.index] = own
        return [(int(scaled.at[index]), reason) for index, reason in failed]

    def _sampled_logits(self, logits: torch.Tensor, columns: list[torch.Tensor]) -> torch.Tensor:
        return sampled_logits(logits, *columns, any_cut=self._used_by_any_row().cuts)

    def _drawn_from(self, rows: Ints) -> tuple[npt.NDArray[Any], ...]:
        """Return the parameters of the distributions that ``rows`` are sampled from, for ``sampled_logits``."""
        batch = self._batch
        temperature = batch.temperature[rows]
        if self.processors.has_argmax_invariant:
            temperature = (temperature > 0).astype(np.float32)
        return temperature, batch.top_k[rows], batch.top_p[rows], batch.min_p[rows]


@dataclass(frozen=True, slots=True)
class _ScaledPositions:
    """The positions that are not greedy: indices on the host (``at``) and the device (``index``), and temperatures."""

    at: Ints
    positions: SampledPositions
    index: torch.Tensor
    divisor: torch.Tensor


@dataclass(frozen=True, slots=True)
class _LogprobPositions:
    """The positions that ask for log probabilities, int64 on the host (``at``) and on the device (``index``).

    ``num_best``: as of SampledLogprobs.
    ``columns``: the parameters of the distributions that they are sampled from, for processed log probabilities.
    ``beams``: int64, those of these positions that belong to beams; None without any.
    ``most_likely``: how many most likely tokens any of them asks for.
    ``given``: those of these positions that ask for given tokens, and these, as of ``with_given``; None without any.
    """

    at: Ints
    index: torch.Tensor
    num_best: Ints
    columns: list[torch.Tensor]
    beams: torch.Tensor | None
    most_likely: int
    given: list[torch.Tensor] | None

    def raw_logits(self, logits: torch.Tensor, *, edited: bool) -> torch.Tensor:
        """Return the logits of these positions; a copy if ``logits`` will be ``edited``."""
        return logits if len(self.at) == len(logits) and not edited else logits[self.index]
