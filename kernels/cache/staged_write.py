"""Staged writes: runs of int32 put into rows of several tables, from one packed buffer, in one launch.

What changed in the tables of all KV groups since the last step is a few ids here and there. They travel in one copy
from host to device, and this scatters them: the cost follows what changed, never the size of a row or a table.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.cache.pointer_table import TableSet
from quire.kernels.common.checks import check_tensor
from quire.kernels.common.triton_runtime import require_launchable

HEADER_WORDS = 5
"""int32 numbers that describe a run: table, row, first column, length, and where in the buffer its values begin."""

TILE_WORDS = 256
"""Values that a program moves at a time: most runs are one block id, a new request's row is thousands."""

Int32Array = npt.NDArray[np.int32]


def pack_runs(headers: npt.NDArray[np.integer[Any]], values: Int32Array, out: Int32Array | None = None) -> Int32Array:
    """The packed buffer: all headers, then all values.

    Args:
        headers: ``[num_runs, 4]``: table, row, first column, length. No place in a table may be in two runs: they are
            written in no order.
        values: the runs' values, one run behind the other.
        out: int32 ``[num_runs * HEADER_WORDS + len(values)]``, such as pinned memory; absent: made.
    """
    num_runs, num_header_words = len(headers), len(headers) * HEADER_WORDS
    if out is None:
        out = np.empty(num_header_words + len(values), np.int32)
    packed = out[:num_header_words].reshape(num_runs, HEADER_WORDS)
    packed[:, :4] = headers
    packed[:, 4] = num_header_words + np.cumsum(headers[:, 3]) - headers[:, 3]
    out[num_header_words:] = values
    return out


def write_runs_reference(packed: torch.Tensor, num_runs: int, tables: TableSet) -> None:
    """What ``write_runs`` does, in plain torch. The two agree exactly.

    Raises:
        IndexError: a run lies outside its table, or its values outside the buffer.
    """
    headers = packed[: num_runs * HEADER_WORDS].view(num_runs, HEADER_WORDS)
    for index, row, start, length, offset in headers.tolist():
        table = tables.tables[index]
        end = start + length
        if min(index, row, start, length, offset) < 0 or end > table.shape[1] or offset + length > len(packed):
            raise IndexError(f"table {index} {tuple(table.shape)} has no columns {start} to {end} of row {row}")
        table[row, start:end] = packed[offset : offset + length]


def write_runs(packed: torch.Tensor, num_runs: int, tables: TableSet) -> None:
    """Scatter packed runs, by the Triton kernel.

    Args:
        packed: int32 ``[num_words]``, what ``pack_runs`` made, on the tables' device.
        tables: written to. A device cannot raise: what a run says of places outside its table is not written.

    Raises:
        ValueError: a tensor does not have the shape, dtype or place above, or is too short for so many runs.
        RuntimeError: Triton cannot launch here.
    """
    check_tensor("packed", packed, {"num_words": None}, (torch.int32,), tables.device)
    if not 0 <= num_runs * HEADER_WORDS <= len(packed):
        raise ValueError(f"packed: dimension 0 (num_words) is {len(packed)}, too short for {num_runs} runs")
    kernel = _kernel(tables.device)
    if num_runs:
        kernel[(num_runs,)](packed, tables.descriptions, len(packed), len(tables), **launch_constants())


def launch_constants() -> dict[str, int]:
    """What the kernel is compiled for; shared with the test that compiles it ahead."""
    return {"HEADER_WORDS": HEADER_WORDS, "TILE_WORDS": TILE_WORDS}


def _kernel(device: torch.device) -> Any:
    require_launchable(device.type)
    from quire.kernels.cache.staged_write_triton import staged_write_kernel

    return staged_write_kernel
