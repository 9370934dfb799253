"""Addresses and shapes of several tensors in one small device tensor, so that one launch can access all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.kernels.common.checks import check_tensor

NUM_FIELDS = 5
"""Fields of a description: address, row stride in elements, rows, columns, block size. Kernels read them by index."""


@dataclass(frozen=True)
class TableSet:
    """Block tables of all KV groups: int32 tables of any number and size.

    Build it once: construction copies to the device and waits. It holds the tensors, so that their memory is not freed
    while a launch or a captured graph has the addresses.

    Attributes:
        tables: int32 ``[rows, columns]`` each; rows may be strided.
        block_sizes: tokens in a block, per table.
        descriptions: int64 ``[num_tables, NUM_FIELDS]`` on the tables' device.
    """

    tables: tuple[torch.Tensor, ...]
    block_sizes: tuple[int, ...]
    descriptions: torch.Tensor

    @classmethod
    def of(cls, tables: Sequence[torch.Tensor], block_sizes: Sequence[int]) -> "TableSet":
        """Describe ``tables``.

        Raises:
            ValueError: no table, tables on several devices or not 2-D int32, or a block size below 1.
        """
        if not tables or len(tables) != len(block_sizes):
            raise ValueError(
                f"{len(tables)} tables and {len(block_sizes)} block sizes, expected equal numbers, at least 1"
            )
        if min(block_sizes) < 1:
            raise ValueError(f"block_size is {min(block_sizes)}, expected at least 1")
        device = tables[0].device
        for table in tables:
            check_tensor("block_table", table, {"num_rows": None, "max_blocks": None}, (torch.int32,), device)
        fields = [
            [table.data_ptr(), table.stride(0), *table.shape, block_size]
            for table, block_size in zip(tables, block_sizes, strict=True)
        ]
        return cls(tuple(tables), tuple(block_sizes), torch.tensor(fields, dtype=torch.int64, device=device))

    @property
    def device(self) -> torch.device:
        return self.descriptions.device

    def __len__(self) -> int:
        return len(self.tables)
