"""Slot mapping: where in the paged cache each token of a step goes.

A slot is ``block_id * block_size + position % block_size``, where ``block_id`` is entry ``position // block_size`` of
the row's block table.
"""

from typing import Any

import torch

from quire.kernels.checks import check_tensor
from quire.kernels.triton_runtime import require_launchable

PAD_SLOT_ID = -1
"""The slot of a token that is not written."""

TILE_TOKENS = 128
"""Tokens that a program handles at a time: a decode row has one, a prefill chunk thousands."""


def slot_mapping_reference(
    query_start_loc: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor, block_size: int
) -> torch.Tensor:
    """What ``compute_slot_mapping`` computes, in plain torch. The two agree exactly.

    Raises:
        IndexError: a position lies past the last column of the block table.
    """
    query_lens = query_start_loc.diff().long()
    num_rows, num_tokens = len(query_lens), int(query_lens.sum())
    row_of_token = torch.arange(num_rows, device=positions.device).repeat_interleave(query_lens)
    position = positions[:num_tokens]
    block_id = block_table[row_of_token, position // block_size].long()
    slot_mapping = torch.full_like(positions, PAD_SLOT_ID)
    slot_mapping[:num_tokens] = block_id * block_size + position % block_size
    return slot_mapping


def compute_slot_mapping(
    query_start_loc: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Slot of every token, by the Triton kernel.

    Args:
        query_start_loc: int32 ``[num_rows + 1]``, ascending from 0: where each row's tokens start.
        positions: int64 ``[num_tokens]``; those from ``query_start_loc[num_rows]`` on are padding and not read.
        block_table: int32 ``[num_rows, max_blocks]``; entries that no position falls into are not read.
        block_size: tokens in a block, any positive number.

    Returns:
        int64 ``[num_tokens]``: slots, and ``PAD_SLOT_ID`` for padding. A device cannot raise: a position outside the
        block table is a caller's mistake that gets ``PAD_SLOT_ID`` rather than a read outside the table.

    Raises:
        ValueError: a tensor does not have the shape, dtype or place above.
        RuntimeError: Triton cannot launch here.
    """
    device = positions.device
    check_tensor("positions", positions, {"num_tokens": None}, (torch.int64,), device)
    check_tensor("block_table", block_table, {"num_rows": None, "max_blocks": None}, (torch.int32,), device)
    num_rows, max_blocks = block_table.shape
    check_tensor("query_start_loc", query_start_loc, {"num_rows + 1": num_rows + 1}, (torch.int32,), device)
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, expected at least 1")
    kernel = _kernel(device)
    slot_mapping = torch.empty_like(positions)
    # One program a row, and one for the padding behind the last.
    kernel[(num_rows + 1,)](
        query_start_loc,
        positions,
        block_table,
        slot_mapping,
        num_rows,
        len(positions),
        max_blocks,
        block_table.stride(0),
        BLOCK_SIZE=block_size,
        TILE_TOKENS=TILE_TOKENS,
        PAD_SLOT=PAD_SLOT_ID,
    )
    return slot_mapping


def _kernel(device: torch.device) -> Any:
    require_launchable(device.type)
    from quire.kernels.slot_mapping_triton import slot_mapping_kernel

    return slot_mapping_kernel
