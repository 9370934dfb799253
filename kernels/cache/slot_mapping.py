"""Slot mapping: the slot in the paged cache of each token of a step, for all KV groups.

A slot is ``block_id * block_size + position % block_size``, where ``block_id`` is entry ``position // block_size`` of
the row's block table.
"""

from typing import Any

import torch

from quire.kernels.cache.pointer_table import TableSet
from quire.kernels.common.checks import check_tensor
from quire.kernels.common.triton_runtime import require_launchable

PAD_SLOT_ID = -1
"""Slot of a token that is not written to the cache, such as padding."""

TILE_TOKENS = 128
"""Tokens that a program maps at a time: a decode row has one, a prefill chunk thousands."""


def slot_mapping_reference(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    row_of: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``compute_slot_mappings`` for one group, ``[num_tokens]``, in plain torch. The two agree exactly.

    Raises:
        IndexError: a position is past the last column of the block table, or a row past its last row.
    """
    query_lens = query_start_loc.diff().long()
    num_rows, num_tokens = len(query_lens), int(query_lens.sum())
    rows = torch.arange(num_rows, device=positions.device) if row_of is None else row_of.long()
    row = rows.repeat_interleave(query_lens)
    position = positions[:num_tokens]
    token = torch.nonzero(row >= 0).view(-1)
    block_id = block_table[row[token], position[token] // block_size].long()
    slot_mapping = torch.full_like(positions, PAD_SLOT_ID)
    slot = block_id * block_size + position[token] % block_size
    slot_mapping[token] = torch.where(block_id >= 0, slot, PAD_SLOT_ID)
    return slot_mapping


def slot_mappings_reference(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    tables: TableSet,
    row_of: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``compute_slot_mappings`` for all groups, ``[num_groups, num_tokens]``, in plain torch."""
    groups = zip(tables.tables, tables.block_sizes, strict=True)
    return torch.stack(
        [slot_mapping_reference(query_start_loc, positions, table, block_size, row_of) for table, block_size in groups]
    )


def compute_slot_mappings(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    tables: TableSet,
    row_of: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the slot of every token in every KV group, with one launch of the Triton kernel.

    Args:
        query_start_loc: int32 ``[num_rows + 1]``, ascending from 0: index of each row's first token.
        positions: int64 ``[num_tokens]``; those from ``query_start_loc[num_rows]`` on are padding and not read.
        tables: one block table per group; entries without a position in them are not read.
        row_of: int32 ``[num_rows]``: row of the tables for each row of the batch, negative for padding; None: the
            first ``num_rows``, in order.
        out: int64 ``[num_groups, num_tokens]`` to write to; None: a new tensor. A captured graph needs its own.

    Returns:
        int64 ``[num_groups, num_tokens]``: slots, and ``PAD_SLOT_ID`` for padding. A kernel cannot raise: a position or
        row outside the table or a negative block id, which are errors of the caller, give ``PAD_SLOT_ID`` instead of an
        access outside the memory.

    Raises:
        ValueError: a tensor does not have the shape, dtype or device above.
        RuntimeError: Triton cannot launch in this process.
    """
    num_rows, num_tokens = len(query_start_loc) - 1, len(positions)
    _check(query_start_loc, positions, tables, row_of)
    if out is None:
        out = torch.empty(len(tables), num_tokens, dtype=torch.int64, device=positions.device)
    check_tensor("out", out, {"num_groups": len(tables), "num_tokens": num_tokens}, (torch.int64,), positions.device)
    kernel = _kernel(positions.device)
    # One program per row, and one for the padding after the last row.
    kernel[(num_rows + 1, len(tables))](
        query_start_loc, positions, tables.descriptions, query_start_loc if row_of is None else row_of, out,
        num_rows, num_tokens, out.stride(0),
        **launch_constants(row_of is not None),
    )  # fmt: skip
    return out


def _check(
    query_start_loc: torch.Tensor, positions: torch.Tensor, tables: TableSet, row_of: torch.Tensor | None
) -> None:
    device = positions.device
    check_tensor("positions", positions, {"num_tokens": None}, (torch.int64,), device)
    starts = {"num_rows + 1": None if row_of is None else len(row_of) + 1}
    if row_of is not None:
        check_tensor("row_of", row_of, {"num_rows": None}, (torch.int32,), device)
    check_tensor("query_start_loc", query_start_loc, starts, (torch.int32,), device)
    if row_of is None and len(query_start_loc) - 1 > min(len(table) for table in tables.tables):
        size = len(query_start_loc)
        raise ValueError(f"query_start_loc: dimension 0 (num_rows + 1) is {size}, more than the table's rows")
    if tables.device != device:
        raise ValueError(f"tables: device is {tables.device}, expected {device}")


def launch_constants(has_row_of: bool) -> dict[str, int]:
    """Return the kernel's compile-time constants; also used by the ahead-of-time compilation test."""
    return {
        "HAS_ROW_OF": int(has_row_of),
        "TILE_TOKENS": TILE_TOKENS,
        "PAD_SLOT": PAD_SLOT_ID,
    }


def _kernel(device: torch.device) -> Any:
    require_launchable(device.type)
    from quire.kernels.cache.slot_mapping_triton import slot_mapping_kernel

    return slot_mapping_kernel
