"""What a step makes of its hidden states beside tokens: log probabilities of prompt tokens, and pooled rows."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.wire.logprobs import LogprobArrays, PromptLogprobs
from quire.protocol.wire.side_arrays import PooledRows
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.step_inputs import StepInputs
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.models.model import Model
from quire.worker_proc.pooling.pooled_values import PooledValues
from quire.worker_proc.pooling.pooler import Pooler, PoolTargets
from quire.worker_proc.sampling.prompt_logprobs import PromptRows, PromptTargets


class ExtraFields(NamedTuple):
    """Fields of the result message. ``bad``: handles of requests whose hidden states are not finite."""

    prompt_logprobs: PromptLogprobs | None
    pooled: PooledRows | None
    bad: list[int]


@dataclass(frozen=True, slots=True)
class StepExtras:
    """What a step returns beside its tokens; its tensors are on the device."""

    prompt_rows: PromptRows | None = None
    pooled: PooledValues | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return what the host needs."""
        prompt = None if self.prompt_rows is None else self.prompt_rows.logprobs
        tensors = [] if prompt is None else [prompt.token_ids, prompt.ranks, prompt.values]
        return tensors if self.pooled is None else tensors + self.pooled.tensors()

    def fields(self, arrays: list[npt.NDArray[Any]]) -> ExtraFields:
        """Return the fields of the result message. ``arrays``: copies of ``tensors``."""
        prompts, pooled, rows = None, None, self.prompt_rows
        bad: list[int] = []
        if rows is not None:
            prompts = PromptLogprobs(rows.handles, rows.starts, rows.counts, logprob_arrays(arrays[:3]))
            arrays = arrays[3:]
        if self.pooled is not None:
            pooled, bad = self.pooled.message(arrays)
        return ExtraFields(prompts, pooled, bad)


def logprob_arrays(copied: list[npt.NDArray[Any]]) -> LogprobArrays:
    """Return the message part of token ids, ranks and values that are copied to the host."""
    token_ids, ranks, values = copied
    return LogprobArrays.of(token_ids.astype(np.int32), values.copy(), ranks.astype(np.int32))


NO_EXTRAS = StepExtras()


@dataclass(frozen=True, slots=True)
class ExtraTargets:
    """The tokens of a step from whose hidden states extras are made."""

    model: Model
    prompts: PromptTargets | None
    pooled: PoolTargets | None

    def read(self, hidden: torch.Tensor) -> StepExtras:
        """Make the extras. ``hidden``: ``[num_tokens, hidden_size]``, of all tokens of the step."""
        if self.prompts is None and self.pooled is None:
            return NO_EXTRAS
        prompt_rows = None if self.prompts is None else self.prompts.logprobs(self.model, hidden)
        return StepExtras(prompt_rows, None if self.pooled is None else self.pooled.pool(hidden))


class ExtraReader:
    """Finds the ``ExtraTargets`` of each step. Owns the pooler, if the model has a pooling configuration."""

    def __init__(self, model: Model, batch: InputBatch, transfer: Transfer) -> None:
        self._model, self._batch, self._transfer = model, batch, transfer
        pooling = model.config.pooling
        self._pooler = None if pooling is None else Pooler(model, pooling, batch, transfer)

    def targets(self, inputs: StepInputs) -> ExtraTargets:
        """Return what the step reads; its arrays are sent with the step's one copy."""
        prompts = PromptTargets.of(inputs, self._batch, self._transfer)
        return ExtraTargets(self._model, prompts, None if self._pooler is None else self._pooler.targets(inputs))
