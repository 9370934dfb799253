"""The tokens that grammars allow, as they came, put to the positions that they are for."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.sampling.token_bitmask import apply_token_bitmask
from quire.protocol.wire.worker_messages import SampleInputs
from quire.worker_proc.batch.input_batch import InputBatch, StepRefused
from quire.worker_proc.batch.positions import Ints, SampledPositions


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks of some positions; the others may be anything.

    Attributes:
        positions: int64 ``[num_masks]``, ascending: indices of sampled positions.
        words: int32 ``[num_masks, ceil(vocab_size / 32)]``, as in ``SampleInputs``.
    """

    positions: Ints
    words: npt.NDArray[np.int32]

    @classmethod
    def of(cls, inputs: SampleInputs, batch: InputBatch, positions: SampledPositions) -> "TokenMasks | None":
        """``inputs`` for a step that samples ``positions``; None when they constrain nobody.

        Raises:
            StepRefused: masks for rows that are not sampled, or not one for each of their positions.
        """
        if not inputs.handles or inputs.bitmask is None:
            return None
        total = sum(inputs.counts)
        if len(inputs.counts) != len(inputs.handles) or not total or len(inputs.bitmask) % total:
            raise StepRefused("the masks of a step do not add up")
        words = inputs.bitmask.reshape(total, -1)
        found: list[Ints] = []
        for handle, count in zip(inputs.handles, inputs.counts, strict=True):
            own = np.flatnonzero(positions.rows == batch.row(handle))
            if len(own) != count:
                raise StepRefused(f"handle {handle} has {count} masks for {len(own)} positions")
            found.append(own)
        places = np.concatenate(found)
        order = np.argsort(places)
        return cls(places[order], words[order])

    def apply(self, logits: torch.Tensor) -> None:
        """Minus infinity, in place, for what the masks forbid: float32 ``[num_positions, vocab]``.

        A tokenizer may have fewer tokens than the model has logits, or its words more bits: bits that are missing
        forbid.
        """
        words = torch.from_numpy(_writable(self.words))
        rows = torch.from_numpy(self.positions)
        apply_token_bitmask(logits, rows.to(logits.device), words.to(logits.device))


def _writable(array: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Torch refuses, by a warning, memory that is read-only, as a frame of the wire may be."""
    return array if array.flags.writeable else array.copy()
