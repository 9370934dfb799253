"""Log probabilities of prompt tokens, computed with each prefill chunk for the requests that ask for them."""

from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels.common.logits import TopLogprobs
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.positions import Ints
from quire.worker_proc.batch.step_inputs import StepInputs
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.models.model import Model
from quire.worker_proc.sampling.logprobs import token_logprobs

SLICE = 256
"""Maximum number of positions whose logits are in memory at a time."""


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """The prompt tokens of a step whose log probabilities are wanted, one request after the other.

    Request ``handles[i]`` has ``counts[i]`` consecutive tokens from prompt position ``starts[i]`` on, and asks for
    ``num_best[i]`` most likely tokens.

    Attributes:
        index: int64 ``[n]`` on the device: index among the step's tokens of each one's predecessor.
        tokens: int64 ``[n]`` on the device: their ids.
    """

    handles: list[int]
    starts: list[int]
    counts: list[int]
    index: torch.Tensor
    tokens: torch.Tensor
    num_best: Ints

    @classmethod
    def of(cls, inputs: StepInputs, batch: InputBatch, transfer: Transfer) -> "PromptTargets | None":
        """Find the prompt tokens whose predecessor is in ``inputs``; None if none is wanted."""
        asking = batch.num_prompt_logprobs[inputs.rows] >= 0
        if not asking.any():
            return None
        following = inputs.positions + 1
        rows = inputs.token_rows
        wanted = (batch.num_prompt_logprobs[rows] >= 0) & (following < batch.num_prompt[rows])
        places = np.flatnonzero(wanted)
        if not len(places):
            return None
        own_rows, own_positions = rows[places], following[places]
        begins = np.flatnonzero(np.diff(own_rows, prepend=-1))
        index, tokens = transfer(places, batch.tokens.data[own_rows, own_positions].astype(np.int64))
        return cls(
            handles=batch.handles[own_rows[begins]].tolist(),
            starts=own_positions[begins].tolist(),
            counts=np.diff(np.append(begins, len(own_rows))).tolist(),
            index=index,
            tokens=tokens,
            num_best=batch.num_prompt_logprobs[own_rows[begins]],
        )

    def logprobs(self, model: Model, hidden: torch.Tensor) -> TopLogprobs:
        """Compute the log probabilities. ``hidden``: ``[num_tokens, hidden_size]``, of all tokens of the step."""
        most = int(self.num_best.max())
        parts = [
            token_logprobs(model.logits(hidden[self.index[at : at + SLICE]]), self.tokens[at : at + SLICE], most)
            for at in range(0, len(self.index), SLICE)
        ]
        return TopLogprobs(
            torch.cat([part.token_ids for part in parts]),
            torch.cat([part.values for part in parts]),
            torch.cat([part.ranks for part in parts]),
        )
