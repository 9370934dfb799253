"""Token counts for penalties: lists of distinct tokens on a CPU, counts of the whole vocabulary on other devices."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.common.penalty_rows import PenaltyRows
from quire.kernels.cpu.native.library import load_native
from quire.kernels.cpu.sampling.penalties import ListedCounts
from quire.kernels.sampling.penalties import PROMPT_BIT, apply_penalties
from quire.worker_proc.device.transfer import Transfer

Tokens = npt.NDArray[np.integer[Any]]


class DenseCounts:
    """Counts of the whole vocabulary on the device, as ``kernels.sampling.penalties`` defines them, a text per slot.

    int32 ``[num_slots, vocab_size]``; all tokens must be in the vocabulary. Adding does not wait for the device.
    """

    def __init__(self, vocab_size: int, device: torch.device, transfer: Transfer) -> None:
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._transfer = transfer

    def __len__(self) -> int:
        return len(self._counts)

    def grow(self, num_slots: int) -> None:
        """Grow to at least ``num_slots``, by doubling: memory follows the highest number of simultaneous texts."""
        old = self._counts
        if num_slots > len(old):
            self._counts = old.new_zeros(max(num_slots, 2 * len(old)), old.shape[1])
            self._counts[: len(old)] = old

    def set_text(self, slot: int, prompt: Tokens, output: Tokens) -> None:
        """Replace the slot's content by the counts of a new text."""
        own = self._counts[slot]
        tokens = self._transfer(prompt.astype(np.int64), np.full(len(output), slot, np.int64), output.astype(np.int64))

        def count() -> None:
            own.zero_()
            own.index_fill_(0, tokens[0], PROMPT_BIT)
            self.add(*tokens[1:])

        self._transfer.then(count)

    def add(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count ``tokens[i]`` once more in the output of ``slots[i]``; both int64, duplicates allowed."""
        places = tokens.add(slots, alpha=self._counts.shape[1])
        self._counts.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def penalise(self, logits: torch.Tensor, rows: PenaltyRows) -> None:
        apply_penalties(logits, self._counts, rows)


TokenCounts = DenseCounts | ListedCounts


def make_counts(vocab_size: int, device: torch.device, transfer: Transfer) -> TokenCounts:
    native = load_native() if device.type == "cpu" else None
    return DenseCounts(vocab_size, device, transfer) if native is None else ListedCounts(native, vocab_size)
