"""The embedding: rows of a weight matrix by token id, of which each rank holds a part."""

import torch
import torch.nn.functional as F

from quire.kernels.cpu.native import load_native
from quire.kernels.cpu.packed_rows import EmbeddingRows
from quire.worker_proc.models.linear import Linear
from quire.worker_proc.models.module import Module
from quire.worker_proc.models.weights import Build


class Embedding(Module):
    """Token ids to the first residual stream.

    Args:
        table: the layer whose weight has the rows; with tied embeddings it is the head.
        vocab: token ids of this rank's rows.
        factor: number that every row is multiplied by.
    """

    def __init__(self, build: Build, table: Linear, vocab: slice, factor: float) -> None:
        self.build = build
        self.table = table
        self.vocab = vocab
        self._factor = factor
        self._rows: EmbeddingRows | None = None

    def prepack(self) -> None:
        """Let the native library gather the rows if it supports the loaded table. Call it after the table's."""
        native = load_native() if self.table.weight.device.type == "cpu" else None
        rows = self.table.gathered_rows()
        if native is not None and EmbeddingRows.takes(native, rows):
            self._rows = EmbeddingRows(native, rows, range(self.vocab.start, self.vocab.stop), self._factor)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Map ``[num_tokens]`` to new ``[num_tokens, hidden_size]``, the same on all ranks."""
        hidden = (
            self._torch_rows(token_ids) if self._rows is None else self._rows(token_ids, self.build.activation_dtype)
        )
        return self.build.parallel.all_reduce(hidden) if self.build.parallel.size > 1 else hidden

    def _torch_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        weight, dtype = self.table.weight, self.build.activation_dtype
        if self.build.parallel.size == 1:
            hidden = F.embedding(token_ids, weight).to(dtype)
        else:
            row = token_ids - self.vocab.start
            elsewhere = (row < 0) | (row >= self.vocab.stop - self.vocab.start)
            hidden = F.embedding(row.masked_fill(elsewhere, 0), weight).to(dtype).masked_fill_(elsewhere[:, None], 0)
        return hidden if self._factor == 1.0 else hidden.mul_(self._factor)
