"""All changes of a step's logits before sampling, in this order:

1. logit bias
2. repetition, frequency and presence penalties
3. bans: allowed token ids, bad words, minimum length
4. plugins that may change the argmax
5. token bitmasks of grammars; where a grammar allows only the end of the text, 3 and 4 give way
6. the forced end of thinking, which overrides all of the above

Then the Sampler divides by the temperature. For rows that are not greedy, plugins that never change the argmax
(argmax-invariant) follow. Temperature, top-k, top-p and min-p are columns of the Sampler, not classes.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.request.logits_processors import BatchUpdate, LogitsProcessor
from quire.protocol.request.plugins import load_logits_processors
from quire.protocol.request.sampling_params import SamplingParams
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.positions import Ints, SampledPositions
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.sampling.accept import Accepted
from quire.worker_proc.sampling.builtin.allowed_token_ids import AllowedTokenIds
from quire.worker_proc.sampling.builtin.bad_words import BadWords
from quire.worker_proc.sampling.builtin.base import NO_INTS, LogitPlaces, RowProcessor
from quire.worker_proc.sampling.builtin.logit_bias import LogitBias
from quire.worker_proc.sampling.builtin.min_tokens import MinTokens
from quire.worker_proc.sampling.builtin.penalties import Penalties, Text
from quire.worker_proc.sampling.exhausted import end_tokens_left, exhausted
from quire.worker_proc.sampling.plugin_batch import PluginBatch
from quire.worker_proc.sampling.thinking import ThinkingBudget
from quire.worker_proc.sampling.token_masks import TokenMasks

NOTHING_ALLOWED = "no token is allowed by the request's constraints"
Failures = list[tuple[int, str]]
"""Positions without a valid token, each with the reason for the client."""


class LogitsProcessors:
    """Owns the built-in processors and the plugins of a worker.

    If ``needs_history``, the output lists must be complete when ``prepare`` and ``apply`` are called, so the host waits
    for the device first. Lengths and counts are known without waiting.
    """

    def __init__(
        self, config: EngineConfig, batch: InputBatch, device: torch.device, transfer: Transfer | None = None
    ) -> None:
        """
        Args:
            transfer: sends arrays to the device; None: one of its own.

        Raises:
            ConfigError: a plugin cannot be loaded or constructed.
        """
        self._batch = batch
        self._vocab_size, self._eos = config.model.vocab_size, frozenset(config.model.eos_token_ids)
        self._transfer = transfer or Transfer(device)
        made = (config, device, device.type == "cuda", self._transfer)
        self._bias = LogitBias(*made)
        self._penalties = Penalties(*made, text_of=self._text_of)
        self._allowed = AllowedTokenIds(*made)
        self._bad_words = BadWords(*made)
        self._min_tokens = MinTokens(*made, num_output=self._num_output)
        self._thinking = ThinkingBudget(*made)
        self._builtin: list[RowProcessor[Any]] = [
            self._bias,
            self._penalties,
            self._allowed,
            self._bad_words,
            self._min_tokens,
            self._thinking,
        ]
        self._plugins = PluginBatch(
            load_logits_processors(config.logits_processors, config.logits_processors_exclude),
            config,
            device,
            self._transfer,
        )

    @property
    def argmax_invariant(self) -> list[LogitsProcessor]:
        return [plugin.main for plugin in self._plugins.argmax_invariant if plugin.main is not None]

    @property
    def non_argmax_invariant(self) -> list[LogitsProcessor]:
        """The built-in processors, then plugins."""
        plugins = [plugin.main for plugin in self._plugins.non_argmax_invariant if plugin.main is not None]
        return [*self._builtin, *plugins]

    @property
    def all(self) -> Iterator[LogitsProcessor]:
        yield from self.argmax_invariant
        yield from self.non_argmax_invariant

    @property
    def active(self) -> bool:
        """Whether any processor has work for any row. The cost does not depend on the number of rows."""
        return bool(self._plugins.active) or any(processor.active for processor in self._builtin)

    @property
    def has_argmax_invariant(self) -> bool:
        """Whether a request uses an argmax-invariant plugin."""
        return any(plugin.is_argmax_invariant for plugin in self._plugins.active)

    @property
    def needs_history(self) -> bool:
        """Whether a processor reads output tokens of a request of the batch."""
        return bool(self._plugins.active) or self._bad_words.reads_outputs or self._thinking.active

    def reads_output(self, params: SamplingParams) -> bool:
        """Return whether a request's output tokens must be kept as a list on the host."""
        own = BadWords.reads_output(params) or self._thinking.reads_output(params)
        return own or bool(self._plugins.used_by(params))

    def update_state(self, update: BatchUpdate | None) -> None:
        """Apply a change of the batch's rows. Call it once per step, before ``apply``."""
        if update is not None:
            for processor in self._builtin:
                processor.update_state(update)
        self._plugins.update_state(update)

    def reset(self) -> None:
        """Start over with an empty batch, without regard to updates that were not applied."""
        for processor in self._builtin:
            processor.reset()
        self._plugins.reset()

    def prepare(self, positions: SampledPositions) -> None:
        """Send to the device what ``apply`` needs for these positions. Call it before each ``apply``."""
        for processor in self._builtin:
            if processor.active:
                processor.prepare(positions)

    def apply(self, logits: torch.Tensor, positions: SampledPositions, masks: TokenMasks | None) -> Failures:
        """Edit contiguous float32 ``[len(positions), vocab_size]`` in place.

        Each position is edited as if the drafts before it were output tokens.

        Returns:
            Positions at which the request's own constraints leave no token; their logits are set to 0. Positions whose
            logits were not finite before are not included.
        """
        if masks is None and not self.active:
            return []
        plugins = [plugin for plugin in self._plugins.active if not plugin.is_argmax_invariant]
        bad_words, min_tokens = self._bad_words.banned, self._min_tokens.banned
        usable, blocked = None, []
        if plugins:
            usable = _finite(logits)
        elif masks is not None or self._allowed.active or len(bad_words.positions) or len(min_tokens.positions):
            blocked = self._exhausted(logits, positions, [bad_words, min_tokens], masks)
        if self._bias.active:
            self._bias.edit(logits, positions)
        if self._penalties.active:
            self._penalties.edit(logits, positions)
        if self._allowed.active:
            self._allowed.edit(logits, positions)
        self._bad_words.ban(logits, bad_words)
        self._min_tokens.ban(logits, min_tokens)
        failed = self._plugins.apply(plugins, logits, positions) if plugins else {}
        if masks is not None:
            masks.apply(logits, self._transfer)
        forced = NO_INTS
        if self._thinking.active:
            forced = self._thinking.places
            self._thinking.force(logits)
        if usable is not None:
            blocked = _nothing_left(logits, usable)
        blocked = [at for at in set(blocked) - set(forced.tolist()) if not self._may_end(logits, at, masks)]
        failed = dict.fromkeys(blocked, NOTHING_ALLOWED) | failed
        return self._set_failed(logits, failed)

    def _may_end(self, logits: torch.Tensor, position: int, masks: TokenMasks | None) -> bool:
        """Allow the end of the text, although it is banned, if the grammar is complete: its answer would be lost."""
        ends = [] if masks is None else end_tokens_left(masks, position, self._eos)
        if ends:
            logits[position, ends] = 0.0
        return bool(ends)

    def apply_argmax_invariant(self, logits: torch.Tensor, positions: SampledPositions) -> Failures:
        """Apply argmax-invariant plugins in place, for rows that are not greedy, after their temperature.

        ``positions`` may leave out rows, but must have all positions of each of its rows. Failures are indices into
        ``positions``.
        """
        plugins = [plugin for plugin in self._plugins.active if plugin.is_argmax_invariant]
        if not plugins or not len(positions):
            return []
        usable = _finite(logits)
        failed = self._plugins.apply(plugins, logits, positions)
        return self._set_failed(logits, dict.fromkeys(_nothing_left(logits, usable), NOTHING_ALLOWED) | failed)

    def accepted(self, positions: SampledPositions, tokens: torch.Tensor, accepted: Accepted | None) -> None:
        """Count the tokens that the last ``apply`` led to. Does not wait for the device.

        Args:
            tokens: int64 ``[len(positions)]`` on the device: the samples.
            accepted: the accepted tokens, or None if all of ``tokens`` are.
        """
        if self._penalties.active:
            self._penalties.accepted(positions, tokens, accepted)

    def _exhausted(
        self, logits: torch.Tensor, positions: SampledPositions, bans: list[LogitPlaces], masks: TokenMasks | None
    ) -> list[int]:
        """Find positions whose constraints leave no token, except those whose logits are not finite."""
        banned = LogitPlaces(
            np.concatenate([places.positions for places in bans]), np.concatenate([places.tokens for places in bans])
        )
        lists = self._allowed.lists(positions)
        blocked = exhausted(len(positions), self._vocab_size, lists, banned, masks)
        if not blocked:
            return []
        usable = _finite(logits[blocked]).tolist()
        return [position for position, good in zip(blocked, usable, strict=True) if good]

    def _text_of(self, row: int) -> Text:
        """Return the prompt and the output of a newly added row, which the batch has completely."""
        batch = self._batch
        known = batch.tokens.data[row, : batch.tokens.length[row]]
        return known[: batch.num_prompt[row]], known[batch.num_prompt[row] :]

    def _num_output(self, rows: Ints) -> Ints:
        counts: Ints = self._batch.num_known[rows] - self._batch.num_prompt[rows]
        return counts.astype(np.int64)

    @staticmethod
    def _set_failed(logits: torch.Tensor, failed: dict[int, str]) -> Failures:
        """Set the logits of failed positions to 0, so that sampling can run; the sampled token is not used."""
        if failed:
            logits[list(failed)] = 0.0
        return sorted(failed.items())


def _finite(logits: torch.Tensor) -> torch.Tensor:
    """Whether each position's best logit is finite: bool ``[num_positions]``."""
    return torch.isfinite(logits.amax(-1))


def _nothing_left(logits: torch.Tensor, usable: torch.Tensor) -> list[int]:
    """Return the ``usable`` positions whose logits are all minus infinity now. Waits for the device."""
    found: list[int] = torch.nonzero(usable & (logits.amax(-1) == -torch.inf))[:, 0].tolist()
    return found
