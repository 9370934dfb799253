"""How one launch reaches several tensors: their addresses and shapes as numbers, in one small tensor on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.kernels.common.checks import check_tensor

NUM_FIELDS = 5
"""Of a description: address, row stride in elements, rows, columns, block size. ``slot_mapping_triton`` reads it."""


@dataclass(frozen=True)
class TableSet:
    """int32 tables of any number and size: the block tables of all KV groups.

    Built once, for it copies to the device and waits for that. It holds the tensors, so that their memory cannot be
    given away while a launch, or a captured graph, has the addresses.

    Attributes:
        tables: int32 ``[rows, columns]`` each; rows may be strided.
        block_sizes: tokens in a block, per table.
        descriptions: int64 ``[num_tables, NUM_FIELDS]`` beside the tables.
    """

    tables: tuple[torch.Tensor, ...]
    block_sizes: tuple[int, ...]
    descriptions: torch.Tensor

    @classmethod
    def of(cls, tables: Sequence[torch.Tensor], block_sizes: Sequence[int]) -> "TableSet":
        """Raises ValueError: no table, tables on several devices, other than 2-D int32, a block size below 1."""
        if not tables or len(tables) != len(block_sizes):
            raise ValueError(f"{len(tables)} tables and {len(block_sizes)} block sizes, expected as many, at least 1")
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
