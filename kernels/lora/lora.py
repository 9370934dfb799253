"""LoRA adapters (arXiv 2106.09685): the addends of a fused linear layer whose rows use different adapters.

An adapter is in a *slot*. A *site* is one fused linear layer of a model; a *part* is what an adapter adds to some of
its outputs (an adapter of ``qkv`` has up to three). A row that uses a slot gets ``scale * (x A^T) B^T`` added to the
outputs of each of the slot's parts: the *shrink* to ``rank`` numbers, which stay float32, and the *expand*.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.launches import Launch, launch_nothing, layout_of, once_per_layout
from quire.kernels.common.triton_runtime import require_launchable

TOLERANCES = {torch.float32: 5e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Allowed difference from the reference, relative to the sum of the magnitudes of all products and of ``y``: one
rounding to the dtype, and the order of float32 sums."""

NUM_FIELDS = 6
"""Fields of a part in a table's entries: addresses of A and B, rank, first output, outputs, bits of the scale."""

TILE_ROWS = 16
"""Rows of a tile: the least that matrix instructions of GPUs take."""

NO_SLOT = -1

ALIGNMENT = 16
"""Bytes to which A and B are aligned on a GPU, which reads as many at a time."""


@dataclass(frozen=True)
class LoraPart:
    """What an adapter adds to consecutive outputs of a site.

    Attributes:
        a: ``[rank, inputs]``, contiguous.
        b: ``[rank, outputs]``, contiguous: B transposed.
        first: the site's output to which ``b``'s first column belongs.
        scale: factor of the addend.
    """

    a: torch.Tensor
    b: torch.Tensor
    first: int
    scale: float


class SlotTable:
    """The parts of each slot at one site, and their description in memory that launches, plans and graphs read.

    It holds the parts' tensors until their slot is set or cleared.

    Attributes:
        entries: int64 ``[num_slots, max_parts, NUM_FIELDS]`` on ``device``; absent parts are zeros.
        max_rank: highest rank of a part.
    """

    def __init__(
        self,
        num_slots: int,
        inputs: int,
        outputs: int,
        max_parts: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.inputs, self.outputs, self.max_parts, self.max_rank = inputs, outputs, max_parts, max_rank
        self.dtype, self.device = dtype, device
        with torch.inference_mode(False):  # tensors of inference mode cannot be written to outside it
            self.entries = torch.zeros(num_slots, max_parts, NUM_FIELDS, dtype=torch.int64, device=device)
        self._parts: list[tuple[LoraPart, ...]] = [()] * num_slots

    def set(self, slot: int, parts: Sequence[LoraPart]) -> None:
        """Put an adapter's parts into a slot; steps that start later use them.

        Raises:
            ValueError: a tensor has another shape, dtype or device, or is not contiguous or aligned; two parts have the
                same output, or there are more than ``max_parts``.
        """
        if len(parts) > self.max_parts:
            raise ValueError(f"parts: {len(parts)}, expected at most {self.max_parts}")
        end = 0
        for i, part in enumerate(sorted(parts, key=lambda part: part.first)):
            self._check(f"parts[{i}]", part)
            if part.first < end:
                raise ValueError(f"parts[{i}]: output {part.first} belongs to another part, expected {end} or later")
            end = part.first + part.b.shape[1]
        fields = np.zeros((self.max_parts, NUM_FIELDS), np.int64)
        for row, part in zip(fields, parts, strict=False):
            scale = int(np.float32(part.scale).view(np.int32))
            row[:] = part.a.data_ptr(), part.b.data_ptr(), len(part.a), part.first, part.b.shape[1], scale
        self.entries[slot].copy_(torch.from_numpy(fields))
        self._parts[slot] = tuple(parts)

    def clear(self, slot: int) -> None:
        """Empty a slot: its rows get no addend."""
        self.set(slot, ())

    def parts(self, slot: int) -> tuple[LoraPart, ...]:
        return self._parts[slot]

    def __len__(self) -> int:
        return len(self._parts)

    def _check(self, name: str, part: LoraPart) -> None:
        check_tensor(f"{name}: a", part.a, {"rank": None, "inputs": self.inputs}, (self.dtype,), self.device)
        rank = len(part.a)
        check_tensor(f"{name}: b", part.b, {"rank": rank, "outputs": None}, (self.dtype,), self.device)
        if not 1 <= rank <= self.max_rank:
            raise ValueError(f"{name}: rank is {rank}, expected 1 to {self.max_rank}")
        if not (part.a.is_contiguous() and part.b.is_contiguous()):
            raise ValueError(f"{name}: expected contiguous tensors, strides are {part.a.stride()}, {part.b.stride()}")
        if self.device.type != "cpu" and (part.a.data_ptr() % ALIGNMENT or part.b.data_ptr() % ALIGNMENT):
            raise ValueError(f"{name}: expected addresses that are multiples of {ALIGNMENT}")
        if part.first < 0 or part.first + part.b.shape[1] > self.outputs:
            last = part.first + part.b.shape[1]
            raise ValueError(f"{name}: outputs {part.first} to {last}, expected 0 to {self.outputs}")


class AdapterRows:
    """Which slot each row of a step uses, sorted by slot, in memory that launches, plans and graphs read.

    Attributes:
        slots: int32 array ``[num_tokens]`` on the host, as assigned.
        order: int32 ``[max_tokens]`` on the device: rows, ascending within a slot; rows without a slot are absent.
        tiles: int32 ``[max_tiles, 3]`` on the device, ascending: a slot, and the first index in ``order`` and the end
            of at most TILE_ROWS rows that use it. Unused tiles are zeros.
    """

    def __init__(self, max_tokens: int, num_slots: int, device: torch.device) -> None:
        self.num_slots, self.device = num_slots, device
        self.slots: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        size = max_tokens + 3 * max_tiles(max_tokens, num_slots)
        with torch.inference_mode(False):  # as above
            self._memory = torch.zeros(size, dtype=torch.int32, device=device)
        self.order = self._memory[:max_tokens]
        self.tiles = self._memory[max_tokens:].view(-1, 3)

    @property
    def empty(self) -> bool:
        """Whether no row uses a slot."""
        return not bool((self.slots >= 0).any())

    def assign(self, slots: npt.NDArray[np.int32]) -> None:
        """Set the slot of each row, int32 ``[num_tokens]``; NO_SLOT for none. Steps that start later use them.

        Raises:
            ValueError: there are more than ``max_tokens`` rows, or a slot does not exist.
        """
        if not np.array_equal(slots, self.slots):
            self.store(slots, torch.from_numpy(self.sort(slots)))

    def store(self, slots: npt.NDArray[np.int32], packed: torch.Tensor) -> None:
        """Set the slot of each row. ``packed``: the result of ``sort`` for them, on the device or the host."""
        self._memory.copy_(packed)
        self.slots = slots

    def sort(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the content of the memory for these slots.

        Raises:
            ValueError: as for ``assign``.
        """
        if len(slots) > len(self.order):
            raise ValueError(f"slots: {len(slots)} rows, expected at most {len(self.order)}")
        if len(slots) and not NO_SLOT <= slots.min() <= slots.max() < self.num_slots:
            wrong = slots.min() if slots.min() < NO_SLOT else slots.max()
            raise ValueError(f"slots: {wrong}, expected {NO_SLOT} to {self.num_slots - 1}")
        host = np.zeros(len(self._memory), np.int32)
        order, tiles = host[: len(self.order)], host[len(self.order) :].reshape(-1, 3)
        counts = np.bincount(slots + 1, minlength=self.num_slots + 1)
        without, counts = counts[0], counts[1:]
        order[: len(slots) - without] = np.argsort(slots, kind="stable")[without:]
        ends = np.cumsum(counts)
        each = -(-counts // TILE_ROWS)
        slot = np.repeat(np.arange(self.num_slots), each)
        number = np.arange(len(slot)) - (np.cumsum(each) - each)[slot]  # within the slot
        used = tiles[: len(slot)]
        used[:, 0] = slot
        used[:, 1] = (ends - counts)[slot] + number * TILE_ROWS
        used[:, 2] = np.minimum(used[:, 1] + TILE_ROWS, ends[slot])
        return host


def max_tiles(num_tokens: int, num_slots: int) -> int:
    """Return the maximum number of tiles: each slot with rows may have one tile that is not full."""
    with_rows = min(num_tokens, num_slots)
    return with_rows + (num_tokens - with_rows) // TILE_ROWS


def add_adapters_reference(x: torch.Tensor, y: torch.Tensor, table: SlotTable, rows: AdapterRows) -> None:
    """Reference of ``add_adapters``, in float64, rounded once."""
    for slot in np.unique(rows.slots[rows.slots >= 0]).tolist():
        row = torch.from_numpy(np.flatnonzero(rows.slots == slot)).to(x.device)
        for part in table.parts(slot):
            shrunk = x[row].double() @ part.a.double().T * part.scale
            outputs = slice(part.first, part.first + part.b.shape[1])
            y[row, outputs] = (y[row, outputs].double() + shrunk @ part.b.double()).to(y.dtype)


def add_adapters(x: torch.Tensor, y: torch.Tensor, table: SlotTable, rows: AdapterRows) -> None:
    """Add to each row of ``y``, in place, what the adapter in the row's slot adds.

    On a CPU this is the reference; ``kernels.cpu.linear.lora.CpuAdapters`` is faster. A row's result depends on that
    row alone.

    Args:
        x: the layer's input, ``[num_tokens, inputs]`` of the table's dtype, rows may be strided.
        y: the layer's output, ``[num_tokens, outputs]`` of the table's dtype, rows may be strided. Rows past those
            assigned, and rows without a slot, are neither read nor written.

    Raises:
        ValueError: a tensor does not have this shape, dtype or device.
        RuntimeError: the tensors are on a GPU, and Triton cannot launch.
    """
    if table.device.type == "cpu":
        check_add(x, y, table, rows)
        add_adapters_reference(x, y, table, rows)
    else:
        launch_adapters(x, y, table, rows)


def launch_adapters(x: torch.Tensor, y: torch.Tensor, table: SlotTable, rows: AdapterRows) -> None:
    """As ``add_adapters``, by Triton kernels. A captured CUDA graph serves any later ``rows.assign`` and ``table.set``.

    Raises:
        ValueError: a tensor does not have that shape, dtype or device.
        RuntimeError: Triton cannot launch here.
    """
    tensors = table.entries, rows.tiles, rows.order
    layouts = (*map(layout_of, (x, y, *tensors)), table.inputs, table.outputs, table.max_rank)
    shrink, expand, splits = _prepare(layouts, x, y, table, rows)
    shrunk = x.new_empty(splits, len(x), table.max_parts, table.max_rank, dtype=torch.float32)
    shrink(x, *tensors, shrunk)
    expand(y, *tensors, shrunk)


@once_per_layout
def _prepare(
    x: torch.Tensor, y: torch.Tensor, table: SlotTable, rows: AdapterRows
) -> tuple[Callable[..., None], Callable[..., None], int]:
    """Check the arguments of ``launch_adapters``; return both launches, and the parts of a sum of the first."""
    check_add(x, y, table, rows)
    require_launchable(x.device.type)
    num_tokens = len(x)
    constants = launch_constants(table.max_parts, table.max_rank, table.inputs)
    splits = constants["SPLITS"]
    if num_tokens == 0:
        return launch_nothing, launch_nothing, splits
    from quire.kernels.lora import lora_triton

    num_tiles = max_tiles(num_tokens, len(table))
    first, second = shrink_constants(constants, table.dtype), expand_constants(constants, table.dtype)
    grids = (num_tiles, table.max_parts, splits), (num_tiles, -(-table.outputs // second["TILE_OUTPUTS"]))
    shrink = Launch(lora_triton.shrink_kernel, grids[0], (num_tokens, table.inputs, x.stride(0)), first)
    return shrink, Launch(lora_triton.expand_kernel, grids[1], (num_tokens, y.stride(0)), second), splits


def launch_constants(max_parts: int, max_rank: int, inputs: int) -> dict[str, int]:
    """Compile-time constants of both kernels; shared with the test that compiles them ahead of time.

    The tiles are estimates. A long sum is divided among programs, because a decode step has few tiles; how it is
    divided does not depend on the rows.
    """
    return {
        "MAX_PARTS": max_parts,
        "MAX_RANK": max_rank,
        "SPLITS": min(4, max(1, inputs // 1024)),
        "TILE_ROWS": TILE_ROWS,
        "TILE_RANK": min(32, max(16, 1 << (max_rank - 1).bit_length())),
    }


def shrink_constants(constants: dict[str, int], dtype: torch.dtype) -> dict[str, int]:
    """Add those of the shrink alone."""
    return constants | {"TILE_INPUTS": 64 if dtype is torch.float32 else 128}


def expand_constants(constants: dict[str, int], dtype: torch.dtype) -> dict[str, Any]:
    """Add those of the expand alone. The shrink's sums stay float32: as three TF32 products, B of 16 bits being one."""
    is_float32 = dtype is torch.float32
    return constants | {"TILE_OUTPUTS": 64, "PRECISION": "ieee" if is_float32 else "tf32x3"}


def check_add(x: torch.Tensor, y: torch.Tensor, table: SlotTable, rows: AdapterRows) -> None:
    """Raise ValueError for arguments of ``add_adapters`` that a kernel would misread."""
    check_tensor("x", x, {"num_tokens": None, "inputs": table.inputs}, (table.dtype,), table.device)
    check_tensor("y", y, {"num_tokens": len(x), "outputs": table.outputs}, (table.dtype,), table.device)
    if not len(rows.slots) <= len(x) <= len(rows.order):
        raise ValueError(f"x: {len(x)} rows, expected {len(rows.slots)} to {len(rows.order)}")
    if rows.num_slots != len(table) or rows.device != table.device:
        raise ValueError(f"rows: {rows.num_slots} slots on {rows.device}, the table has {len(table)} on {table.device}")
