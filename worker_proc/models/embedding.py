"""The embedding: rows of a weight matrix by token id, of which each rank holds a part."""

import torch
import torch.nn.functional as F

from quire.kernels.common.scaled_linear import PackedWeight
from quire.kernels.cpu.linear.linear import PackedLinear
from quire.kernels.cpu.linear.packed_rows import EmbeddingRows
from quire.kernels.cpu.native.library import load_native
from quire.worker_proc.models.linear import Linear
from quire.worker_proc.models.module import Module
from quire.worker_proc.models.weights import Build
from quire.worker_proc.parallel.group import TensorParallel


def vocabulary_of_rank(parallel: TensorParallel, size: int) -> slice:
    """Return the token ids of this rank's rows of the embedding and the head. The last ranks may have fewer.

    They are sharded rather than replicated: the embedding is a quarter of a small model, one all-reduce per step costs
    little, and tied weights stay one tensor.
    """
    rows = -(-size // parallel.size)
    return slice(min(parallel.rank * rows, size), min((parallel.rank + 1) * rows, size))


def gather_vocabulary(parallel: TensorParallel, scores: torch.Tensor, size: int) -> torch.Tensor:
    """Return the scores of all tokens, of which each rank has those of ``vocabulary_of_rank``."""
    rows = -(-size // parallel.size)
    if scores.shape[1] < rows:
        scores = F.pad(scores, (0, rows - scores.shape[1]))
    return parallel.all_gather(scores)[:, :size]


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
        self._library: EmbeddingRows | None = None

    def prepack(self) -> None:
        """Let the native library gather rows, if it supports the prepacked table."""
        rows = self.table.gathered_rows()
        native = load_native() if self.table.weight.is_cpu else None
        if native is not None and EmbeddingRows.takes(rows, native):
            self._library = EmbeddingRows(native, rows, range(self.vocab.start, self.vocab.stop), self._factor)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Map ``[num_tokens]`` to new ``[num_tokens, hidden_size]``, the same on all ranks."""
        dtype, parallel = self.build.activation_dtype, self.build.parallel
        hidden = self._gathered(token_ids, dtype) if self._library is None else self._library(token_ids, dtype)
        return parallel.all_reduce(hidden) if parallel.size > 1 else hidden

    def _gathered(self, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rows = self.table.gathered_rows()
        if self.build.parallel.size == 1:
            hidden = _rows_of(rows, token_ids).to(dtype)
        else:
            row = token_ids - self.vocab.start
            elsewhere = (row < 0) | (row >= self.vocab.stop - self.vocab.start)
            hidden = _rows_of(rows, row.masked_fill(elsewhere, 0)).to(dtype)
            hidden.masked_fill_(elsewhere[:, None], 0)
        return hidden if self._factor == 1.0 else hidden.mul_(self._factor)


def _rows_of(weight: torch.Tensor | PackedLinear | PackedWeight, indices: torch.Tensor) -> torch.Tensor:
    """Return new rows of a weight that is not packed for the native library."""
    assert not isinstance(weight, PackedLinear), "the native library gathers rows of the layouts that it multiplies"
    return F.embedding(indices, weight) if isinstance(weight, torch.Tensor) else weight.dequantise(indices)
