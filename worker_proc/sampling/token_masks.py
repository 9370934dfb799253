"""Token bitmasks of grammars, matched to the sampled positions."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.sampling.token_bitmask import apply_token_bitmask
from quire.protocol.wire.worker_messages import SampleInputs
from quire.worker_proc.batch.input_batch import InputBatch, StepRefused
from quire.worker_proc.batch.positions import Ints, SampledPositions
from quire.worker_proc.device.transfer import Transfer


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Token bitmasks of some positions; all tokens are allowed at the others.

    Attributes:
        positions: int64 ``[num_masks]``, ascending: indices of sampled positions.
        words: int32 ``[num_masks, ceil(vocab_size / 32)]``, as in ``SampleInputs``.
    """

    positions: Ints
    words: npt.NDArray[np.int32]

    @classmethod
    def of(cls, inputs: SampleInputs, batch: InputBatch, positions: SampledPositions) -> "TokenMasks | None":
        """Match the masks of ``inputs`` to the step's ``positions``; None if there are no masks.

        Raises:
            StepRefused: a row does not have exactly one mask for each of its sampled positions.
        """
        if not inputs.handles or inputs.bitmask is None:
            return None
        total = sum(inputs.counts)
        if len(inputs.counts) != len(inputs.handles) or not total or len(inputs.bitmask) % total:
            raise StepRefused(
                f"invalid token bitmasks: {len(inputs.handles)} handles, {len(inputs.counts)} counts, "
                f"{total} masks, {len(inputs.bitmask)} words"
            )
        words = inputs.bitmask.reshape(total, -1)
        found: list[Ints] = []
        for handle, count in zip(inputs.handles, inputs.counts, strict=True):
            own = np.flatnonzero(positions.rows == batch.row_of.get(handle, -1))  # -1: not held, so no position
            if len(own) != count:
                raise StepRefused(f"handle {handle} has {count} token bitmasks for {len(own)} sampled positions")
            found.append(own)
        places = np.concatenate(found)
        order = np.argsort(places)
        return cls(places[order], words[order])

    def apply(self, logits: torch.Tensor, transfer: Transfer) -> None:
        """Set forbidden logits of float32 ``[num_positions, vocab]`` to minus infinity, in place.

        A tokenizer may have fewer tokens than the model has logits, and the words may have more bits than the model has
        logits. Tokens without a bit are forbidden.
        """
        apply_token_bitmask(logits, *transfer(self.positions, _writable(self.words)))


def _writable(array: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Copy a read-only array, such as a received message frame: torch warns about read-only memory."""
    return array if array.flags.writeable else array.copy()
