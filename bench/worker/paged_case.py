"""Test case for attention: rows with randomly placed blocks in a KV cache of random numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.worker_proc.attention.backend import StepBatch


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of an attention layer, and the block size of its KV cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads}x{self.head_dim}"

    def key_bytes(self, num_tokens: int, dtype: torch.dtype) -> int:
        """Return the bytes of the tokens' keys and values."""
        return 2 * num_tokens * self.num_kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class PagedCase:
    """One step's rows. ``tables`` has one block table for each copy of the rows' keys and values in the cache.

    Attributes:
        query: ``[num_tokens, num_heads, head_dim]``.
        kv_cache: ``[2, num_blocks, block_size, num_kv_heads, head_dim]``, or head-major (see ``make_case``).
        tables: int32 ``[num_rows, max_blocks]`` each.
        query_start_loc, seq_lens: int32, on the device.
    """

    heads: HeadShape
    query: torch.Tensor
    kv_cache: torch.Tensor
    tables: list[torch.Tensor]
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    query_lens_cpu: npt.NDArray[np.int32]
    seq_lens_cpu: npt.NDArray[np.int32]

    def batch(self, table: torch.Tensor) -> StepBatch:
        """Return the step as an attention backend's argument, without slots to write."""
        return StepBatch(
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_table=table,
            slot_mapping=torch.full((len(self.query),), -1, dtype=torch.int64, device=self.query.device),
            query_lens_cpu=self.query_lens_cpu,
            seq_lens_cpu=self.seq_lens_cpu,
            block_size=self.heads.block_size,
        )

    def dense(self, copy: int) -> torch.Tensor:
        """View the cache as contiguous keys and values of equal rows: ``[2, num_rows, length, kv_heads, head_dim]``.

        Requires equal lengths and blocks of ``[block_size, num_kv_heads, head_dim]``. The numbers are not those that
        the block tables address.
        """
        length, rows = int(self.seq_lens_cpu[0]), len(self.seq_lens_cpu)
        flat = self.kv_cache.flatten(1, 2)
        start = copy * rows * length
        return flat[:, start : start + rows * length].view(2, rows, length, *flat.shape[2:])


def make_case(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    heads: HeadShape,
    dtype: torch.dtype,
    device: torch.device,
    copies: int,
    *,
    query_dtype: torch.dtype | None = None,
    head_major: bool = False,
) -> PagedCase:
    """Build a case with random contents.

    Args:
        copies: number of copies of all rows' keys and values, each in separate blocks.
        head_major: blocks are ``[num_kv_heads, block_size, head_dim]``.
    """
    needed = [-(-length // heads.block_size) for length in seq_lens]
    per_copy = sum(needed)
    order = torch.randperm(copies * per_copy, device=device).int()
    inner = (heads.num_kv_heads, heads.block_size) if head_major else (heads.block_size, heads.num_kv_heads)
    cache = torch.empty(2, copies * per_copy, *inner, heads.head_dim, dtype=dtype, device=device)
    cache.normal_()
    tables = []
    for copy in range(copies):
        table = torch.zeros(len(seq_lens), max(needed), dtype=torch.int32, device=device)
        start = copy * per_copy
        for row, count in enumerate(needed):
            table[row, :count] = order[start : start + count]
            start += count
        tables.append(table)
    query_shape = (sum(query_lens), heads.num_heads, heads.head_dim)
    return PagedCase(
        heads=heads,
        query=torch.randn(query_shape, device=device).to(query_dtype or dtype),
        kv_cache=cache,
        tables=tables,
        query_start_loc=torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        query_lens_cpu=np.array(query_lens, np.int32),
        seq_lens_cpu=np.array(seq_lens, np.int32),
    )
