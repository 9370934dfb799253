"""Addends of LoRA adapters by the native library: the checked launcher. Its reference is in ``kernels/lora``."""

import ctypes

import torch

from quire.kernels.cpu.native.library import Native
from quire.kernels.lora.lora import AdapterRows, SlotTable, check_add

DTYPES = (torch.float32, torch.bfloat16)


class CpuAdapters:
    """The library's function, looked up once."""

    def __init__(self, native: Native) -> None:
        pointer, long, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        rows = pointer, integer, pointer
        self._add = native.function(
            "quire_add_adapters", pointer, integer, *rows, pointer, long, long, pointer, long, integer
        )

    def add(self, x: torch.Tensor, y: torch.Tensor, table: SlotTable, rows: AdapterRows) -> None:
        """As ``kernels.lora.lora.add_adapters``, for float32 and bfloat16. A recorded plan serves any later
        ``rows.assign`` and ``table.set``.

        Raises:
            ValueError: a tensor does not have that shape, is not float32 or bfloat16, or is not on the CPU.
        """
        check_add(x, y, table, rows)
        if table.dtype not in DTYPES or table.device.type != "cpu":
            raise ValueError(f"table: {table.dtype} on {table.device}, expected float32 or bfloat16 on the CPU")
        sorted_rows = rows.tiles.data_ptr(), len(rows.tiles), rows.order.data_ptr()
        inputs = x.data_ptr(), x.stride(0), table.inputs
        outputs = y.data_ptr(), y.stride(0), table.dtype is torch.bfloat16
        self._add(table.entries.data_ptr(), table.max_parts, *sorted_rows, *inputs, *outputs)
