"""Prepare decode: make the inputs of a steady decode step from device tensors, without the host.

Every row computes one token: its last sampled token, at the first position that is not computed yet. ``prepare_decode``
runs before the forward pass and ``advance_decode`` after sampling, so that one captured graph of the whole step can be
replayed step after step. Grids and shapes are fixed by the number of rows that the graph was captured for; a smaller
batch is padded.
"""

from dataclasses import dataclass
from typing import Any

import torch

from quire.kernels.cache.pointer_table import TableSet
from quire.kernels.cache.slot_mapping import PAD_SLOT_ID, slot_mappings_reference
from quire.kernels.common.checks import check_tensor
from quire.kernels.common.triton_runtime import require_launchable

TILE_ROWS = 128
"""Rows of the batch per program: one per thread."""


@dataclass(frozen=True)
class DecodeInputs:
    """Inputs of a step of ``num_rows`` rows with one token each. Must be kept as long as a graph uses it.

    Attributes:
        input_ids, positions: int64 ``[num_rows]``; 0 for padding.
        seq_lens: int32 ``[num_rows]``, including the new token; 0 for padding.
        query_start_loc: int32 ``[num_rows + 1]``; padding rows have no tokens, so its last entries are equal.
        slot_mapping: int64 ``[num_groups, num_rows]``; ``PAD_SLOT_ID`` for padding.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int, num_groups: int, device: torch.device) -> "DecodeInputs":
        """Allocate uninitialised tensors."""
        return cls(
            input_ids=torch.empty(num_rows, dtype=torch.int64, device=device),
            positions=torch.empty(num_rows, dtype=torch.int64, device=device),
            seq_lens=torch.empty(num_rows, dtype=torch.int32, device=device),
            query_start_loc=torch.empty(num_rows + 1, dtype=torch.int32, device=device),
            slot_mapping=torch.empty(num_groups, num_rows, dtype=torch.int64, device=device),
        )

    def check(self, num_rows: int, num_groups: int, device: torch.device) -> None:
        """Raise ValueError unless all tensors have the shapes and dtypes above and are on ``device``."""
        rows = {"num_rows": num_rows}
        check_tensor("input_ids", self.input_ids, rows, (torch.int64,), device)
        check_tensor("positions", self.positions, rows, (torch.int64,), device)
        check_tensor("seq_lens", self.seq_lens, rows, (torch.int32,), device)
        starts = {"num_rows + 1": num_rows + 1}
        check_tensor("query_start_loc", self.query_start_loc, starts, (torch.int32,), device)
        slots = {"num_groups": num_groups, "num_rows": num_rows}
        check_tensor("slot_mapping", self.slot_mapping, slots, (torch.int64,), device)


def prepare_decode_reference(
    row_of: torch.Tensor,
    last_sampled: torch.Tensor,
    num_computed: torch.Tensor,
    tables: TableSet,
    out: DecodeInputs,
) -> None:
    """Compute ``prepare_decode`` in plain torch. The two agree exactly.

    Raises:
        IndexError: a row past the last one, or a position outside the block table.
        ValueError: padding before a row.
    """
    live = row_of >= 0
    num_live = int(live.sum())
    if not bool(live[:num_live].all()):
        first = int((~live).nonzero()[0])
        raise ValueError(f"row_of: padding at index {first} before a row, expected it after all {num_live} rows")
    row = row_of[:num_live].long()
    for values in (out.input_ids, out.positions, out.seq_lens):
        values.zero_()
    out.input_ids[:num_live] = last_sampled[row]
    out.positions[:num_live] = num_computed[row].long()
    out.seq_lens[:num_live] = num_computed[row] + 1
    out.query_start_loc.copy_(torch.arange(len(row_of) + 1).clamp(max=num_live))
    out.slot_mapping.copy_(slot_mappings_reference(out.query_start_loc, out.positions, tables, row_of))


def prepare_decode(
    row_of: torch.Tensor,
    last_sampled: torch.Tensor,
    num_computed: torch.Tensor,
    tables: TableSet,
    out: DecodeInputs,
) -> None:
    """Write a steady decode step's inputs with one launch of the Triton kernel. Safe in a captured graph.

    Args:
        row_of: int32 ``[num_rows]``: the row, in tables and columns, of each row of the batch; negative for padding,
            which must come after all rows. If it is 0, 1, 2 .., attention can read the tables without a gather.
        last_sampled: int64 ``[max_rows]``: the token of each row.
        num_computed: int32 ``[max_rows]``: its position.
        tables: one block table per KV group, with at least ``max_rows`` rows.
        out: written to.

    A kernel cannot raise: it treats a row past the last one as padding, and does not write a token without a block.

    Raises:
        ValueError: a tensor does not have the shape, dtype or device above.
        RuntimeError: Triton cannot launch in this process.
    """
    device = row_of.device
    _check_rows(row_of, last_sampled, num_computed)
    if tables.device != device:
        raise ValueError(f"tables: device is {tables.device}, expected {device}")
    out.check(len(row_of), len(tables), device)
    require_launchable(device.type)
    from quire.kernels.cache.prepare_decode_triton import prepare_decode_kernel

    prepare_decode_kernel[(-(-(len(row_of) + 1) // TILE_ROWS),)](
        row_of, last_sampled, num_computed, tables.descriptions, out.input_ids, out.positions, out.seq_lens,
        out.query_start_loc, out.slot_mapping, len(row_of), len(last_sampled), out.slot_mapping.stride(0),
        **launch_constants(len(tables)),
    )  # fmt: skip


def advance_decode_reference(
    row_of: torch.Tensor, sampled: torch.Tensor, last_sampled: torch.Tensor, num_computed: torch.Tensor
) -> None:
    """Compute ``advance_decode`` in plain torch. The two agree exactly.

    Raises:
        IndexError: a row past the last one.
    """
    live = row_of >= 0
    row = row_of[live].long()
    last_sampled[row] = sampled[live]
    num_computed[row] += 1


def advance_decode(
    row_of: torch.Tensor, sampled: torch.Tensor, last_sampled: torch.Tensor, num_computed: torch.Tensor
) -> None:
    """Store the sampled tokens of a steady decode step as the rows' next inputs, and advance the rows' positions.

    One launch of the Triton kernel; safe in a captured graph.

    Args:
        row_of: int32 ``[num_rows]``, as for ``prepare_decode``, without duplicate rows.
        sampled: int64 ``[num_rows]``; entries of padding are not read.
        last_sampled, num_computed: int64 and int32 ``[max_rows]``; modified for the rows of the batch.

    Raises:
        ValueError: a tensor does not have the shape, dtype or device above.
        RuntimeError: Triton cannot launch in this process.
    """
    _check_rows(row_of, last_sampled, num_computed)
    check_tensor("sampled", sampled, {"num_rows": len(row_of)}, (torch.int64,), row_of.device)
    kernel = _advance_kernel(row_of.device)
    if len(row_of):
        kernel[(-(-len(row_of) // TILE_ROWS),)](
            row_of, sampled, last_sampled, num_computed, len(row_of), len(last_sampled), TILE_ROWS=TILE_ROWS
        )


def _check_rows(row_of: torch.Tensor, last_sampled: torch.Tensor, num_computed: torch.Tensor) -> None:
    check_tensor("row_of", row_of, {"num_rows": None}, (torch.int32,), row_of.device)
    check_tensor("last_sampled", last_sampled, {"max_rows": None}, (torch.int64,), row_of.device)
    check_tensor("num_computed", num_computed, {"max_rows": len(last_sampled)}, (torch.int32,), row_of.device)


def launch_constants(num_groups: int) -> dict[str, int]:
    """Return the compile-time constants of the kernel; also used by the ahead-of-time compilation test."""
    return {
        "NUM_GROUPS": num_groups,
        "TILE_ROWS": TILE_ROWS,
        "PAD_SLOT": PAD_SLOT_ID,
    }


def _advance_kernel(device: torch.device) -> Any:
    require_launchable(device.type)
    from quire.kernels.cache.prepare_decode_triton import advance_decode_kernel

    return advance_decode_kernel
