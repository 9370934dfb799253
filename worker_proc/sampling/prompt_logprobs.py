"""Log probabilities of prompt tokens, computed with each prefill chunk for the requests that ask for them."""

from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels.common.logits import TopLogprobs
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.step_inputs import StepInputs
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.sampling.logprobs import token_logprobs

SLICE = 256
"""Maximum number of positions whose logits are in memory at a time."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Log probabilities of a step's prompt tokens.

    Request ``handles[i]`` has ``counts[i]`` consecutive tokens from prompt position ``starts[i]`` on; ``logprobs``
    concatenates the requests in this order.
    """

    handles: list[int]
    starts: list[int]
    counts: list[int]
    logprobs: TopLogprobs


def prompt_logprobs(model: Decoder, hidden: torch.Tensor, inputs: StepInputs, batch: InputBatch) -> PromptRows | None:
    """Compute the log probability of each prompt token whose predecessor is in ``inputs``; None if none is wanted.

    Args:
        hidden: ``[num_tokens, hidden_size]``, of all tokens of the step.
    """
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
    targets = torch.from_numpy(batch.tokens.data[own_rows, own_positions].astype(np.int64)).to(hidden.device)
    num_best = int(batch.num_prompt_logprobs[own_rows].max())
    index = torch.from_numpy(places).to(hidden.device)
    parts = [
        token_logprobs(model.logits(hidden[index[at : at + SLICE]]), targets[at : at + SLICE], num_best)
        for at in range(0, len(places), SLICE)
    ]
    begins = np.flatnonzero(np.diff(own_rows, prepend=-1))
    return PromptRows(
        handles=batch.handles[own_rows[begins]].tolist(),
        starts=own_positions[begins].tolist(),
        counts=np.diff(np.append(begins, len(own_rows))).tolist(),
        logprobs=TopLogprobs(
            torch.cat([part.token_ids for part in parts]),
            torch.cat([part.values for part in parts]),
            torch.cat([part.ranks for part in parts]),
        ),
    )
