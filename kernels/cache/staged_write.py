"""Staged writes: write runs of int32 values to rows of several tables, from one packed buffer, in one launch.

Between two steps only a few block ids change in the tables of all KV groups. They are copied to the device in one
buffer, and this kernel scatters them: the cost depends on the number of changes, not on the size of rows or tables.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.cache.pointer_table import TableSet
from quire.kernels.common.checks import check_tensor
from quire.kernels.common.triton_runtime import require_launchable

HEADER_WORDS = 5
"""int32 values that describe a run: table, row, first column, length, and offset of its values in the buffer."""

TILE_WORDS = 256
"""Values that a program writes at a time: most runs are one block id, a new request's row may be thousands."""

Int32Array = npt.NDArray[np.int32]


def pack_runs(headers: npt.NDArray[np.integer[Any]], values: Int32Array) -> Int32Array:
    """Return the packed buffer: all headers, then all values.

    Args:
        headers: ``[num_runs, 4]``: table, row, first column, length. Runs must not overlap, because the order in which
            they are written is undefined.
        values: the runs' values, concatenated.
    """
    num_runs, num_header_words = len(headers), len(headers) * HEADER_WORDS
    out = np.empty(num_header_words + len(values), np.int32)
    packed = out[:num_header_words].reshape(num_runs, HEADER_WORDS)
    packed[:, :4] = headers
    packed[:, 4] = num_header_words + np.cumsum(headers[:, 3]) - headers[:, 3]
    out[num_header_words:] = values
    return out


def write_runs_reference(packed: torch.Tensor, num_runs: int, tables: TableSet) -> None:
    """Compute ``write_runs`` in plain torch. The two agree exactly.

    Raises:
        IndexError: a run is outside its table, or its values are outside the buffer.
    """
    headers = packed[: num_runs * HEADER_WORDS].view(num_runs, HEADER_WORDS)
    for index, row, start, length, offset in headers.tolist():
        table = tables.tables[index]
        end = start + length
        if min(index, row, start, length, offset) < 0 or end > table.shape[1] or offset + length > len(packed):
            raise IndexError(f"table {index} {tuple(table.shape)} has no columns {start} to {end} of row {row}")
        table[row, start:end] = packed[offset : offset + length]


def write_runs(packed: torch.Tensor, num_runs: int, tables: TableSet) -> None:
    """Scatter packed runs with the Triton kernel.

    Args:
        packed: int32 ``[num_words]`` from ``pack_runs``, on the tables' device.
        tables: tables to write to. A kernel cannot raise: values outside a table are not written.

    Raises:
        ValueError: a tensor does not have the shape, dtype or device above, or is too short for ``num_runs``.
        RuntimeError: Triton cannot launch in this process.
    """
    check_tensor("packed", packed, {"num_words": None}, (torch.int32,), tables.device)
    if not 0 <= num_runs * HEADER_WORDS <= len(packed):
        raise ValueError(f"packed: dimension 0 (num_words) is {len(packed)}, too short for {num_runs} runs")
    kernel = _kernel(tables.device)
    if num_runs:
        kernel[(num_runs,)](packed, tables.descriptions, len(packed), len(tables), **launch_constants())


def launch_constants() -> dict[str, int]:
    """Return the kernel's compile-time constants; also used by the ahead-of-time compilation test."""
    return {"HEADER_WORDS": HEADER_WORDS, "TILE_WORDS": TILE_WORDS}


def _kernel(device: torch.device) -> Any:
    require_launchable(device.type)
    from quire.kernels.cache.staged_write_triton import staged_write_kernel

    return staged_write_kernel
