"""What a step returns beside tokens: log probabilities of prompt tokens, pooled rows, and routed experts."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.common.logits import TopLogprobs
from quire.protocol.wire.side_rows import PROMPT_LOGPROBS, Rows, SideKind, SideRows
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.positions import Ints
from quire.worker_proc.batch.step_inputs import StepInputs
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.execute.routed_experts import RoutedExpertTable, RoutedRows
from quire.worker_proc.models.model import Model
from quire.worker_proc.pooling.pooled_values import PooledValues
from quire.worker_proc.pooling.pooler import Pooler, PoolTargets
from quire.worker_proc.sampling.prompt_logprobs import PromptTargets


class ExtraFields(NamedTuple):
    """Fields of the result message. ``bad``: handles of requests whose hidden states are not finite."""

    side: list[SideRows]
    bad: list[int]
    failed: list[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class StepExtras:
    """What a step returns beside its tokens; its tensors are on the device."""

    prompts: tuple[PromptTargets, TopLogprobs] | None = None
    pooled: PooledValues | None = None
    routed: RoutedRows | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return what the host needs."""
        found = [] if self.prompts is None else [self.prompts[1]]
        tensors = [tensor for each in found for tensor in (each.token_ids, each.ranks, each.values)]
        tensors += [] if self.pooled is None else self.pooled.tensors()
        return tensors if self.routed is None else [*tensors, self.routed.read()]

    def advance(self) -> None:
        """Note what is returned, after the rows were advanced by the tokens that they have computed and accepted."""
        if self.routed is not None:
            self.routed.advance()

    def fields(self, arrays: list[npt.NDArray[Any]]) -> ExtraFields:
        """Return the fields of the result message. ``arrays``: copies of ``tensors``."""
        side: list[SideRows] = []
        bad: list[int] = []
        failed: list[tuple[int, str]] = []
        if self.routed is not None:
            *arrays, values = arrays
            side, failed = self.routed.message(values), self.routed.failures
        if self.prompts is not None:
            of, _ = self.prompts
            side.append(logprob_rows(PROMPT_LOGPROBS, of.handles, of.starts, of.counts, of.num_best, arrays[:3]))
            arrays = arrays[3:]
        if self.pooled is not None:
            pooled, bad = self.pooled.message(arrays)
            side += pooled
        return ExtraFields(side, bad, failed)


def logprob_rows(
    kind: SideKind, handles: list[int], starts: list[int], counts: list[int], num_best: Ints, copied: Rows
) -> SideRows:
    """Return the message part of token ids, ranks and values that are copied to the host; ``num_best``: by request."""
    token_ids, ranks, values = copied
    widths = np.minimum(1 + num_best, token_ids.shape[1]).tolist()
    # The arrays are reused by a later step.
    table = [token_ids.astype(np.int32), ranks.astype(np.int32), values.copy()]
    return SideRows.of_table(kind, handles, starts, counts, widths, table)


NO_EXTRAS = StepExtras()


@dataclass(frozen=True, slots=True)
class ExtraTargets:
    """The tokens of a step from whose hidden states extras are made. ``routed``: what needs no hidden states."""

    model: Model
    prompts: PromptTargets | None
    pooled: PoolTargets | None
    routed: RoutedRows | None

    def read(self, hidden: torch.Tensor) -> StepExtras:
        """Make the extras. ``hidden``: ``[num_tokens, hidden_size]``, of all tokens of the step."""
        if self.prompts is None and self.pooled is None and self.routed is None:
            return NO_EXTRAS
        prompts = None if self.prompts is None else (self.prompts, self.prompts.logprobs(self.model, hidden))
        return StepExtras(prompts, None if self.pooled is None else self.pooled.pool(hidden), self.routed)


class ExtraReader:
    """Finds the ``ExtraTargets`` of each step. Owns the pooler, if the model has a pooling configuration."""

    def __init__(self, model: Model, batch: InputBatch, transfer: Transfer, experts: RoutedExpertTable | None) -> None:
        """``experts``: the experts of each position; None: they are not kept."""
        self._experts = experts
        self._model, self._batch, self._transfer = model, batch, transfer
        pooling = model.config.pooling
        self._pooler = None if pooling is None else Pooler(model, pooling, batch, transfer)

    def targets(self, inputs: StepInputs) -> ExtraTargets:
        """Return what the step reads; its arrays are sent with the step's one copy."""
        prompts = PromptTargets.of(inputs, self._batch, self._transfer)
        pooled = None if self._pooler is None else self._pooler.targets(inputs)
        routed = None if self._experts is None else self._experts.of_step(inputs)
        return ExtraTargets(self._model, prompts, pooled, routed)

    def batch_fields(self, rows: Ints) -> dict[str, Any]:
        """Return the fields of ``StepBatch`` that the requests of ``rows`` decide, for a model without a KV cache."""
        return {} if self._pooler is None else self._pooler.batch_fields(rows)

    def of_decode(self, inputs: StepInputs | None) -> StepExtras:
        """Return the extras of a step in which every row decodes, which need no hidden states.

        Args:
            inputs: those of a step with draft tokens; None for a steady decode step.
        """
        if self._experts is None:
            return NO_EXTRAS
        routed = self._experts.of_steady_step() if inputs is None else self._experts.of_step(inputs)
        return NO_EXTRAS if routed is None else StepExtras(routed=routed)
