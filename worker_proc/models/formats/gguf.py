"""GGUF files: in the file's blocks, but Q4_0 and Q8_0 on a GPU as codes with scales."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from quire.kernels.common.block_weight import BLOCK_TYPES, BlockWeight, block_scales, nibbles
from quire.kernels.common.scaled_linear import PackedWeight, scaled_linear
from quire.kernels.common.scaled_weight import pack_pairs
from quire.kernels.cpu.linear.codes import CodesLinear
from quire.kernels.cpu.linear.linear import PackedLinear
from quire.kernels.cpu.native.library import Native, load_native
from quire.protocol.errors import ConfigError
from quire.protocol.model.weight_format import WeightFormat
from quire.worker_proc.models.formats.quantised import QuantisedLinear
from quire.worker_proc.models.formats.words import enclosing
from quire.worker_proc.models.linear import TILE_ROWS, Linear, in_tiles
from quire.worker_proc.models.weight_slot import Cut, WeightSlot

TYPES = {"int4": "Q4_0", "int8": "Q8_0"}
"""Types that a ``ScaledWeight`` holds too, by the kind of its codes."""
NOT_FINITE = "has scales that are not finite"


def read_gguf(linear: QuantisedLinear, cut: Cut, held: slice) -> dict[str, WeightSlot]:
    """Return the slot of a layer in Q4_0 or Q8_0: blocks of 32 inputs with a float16 scale and no zero point."""
    kind = TYPES[linear.form.kind]
    codes, scales = linear.weight.data[held], linear.scales.data[held]
    size = BLOCK_TYPES[kind][0]
    first = cut.columns.start - linear.groups.start * linear.form.group_size
    columns = slice(first, first + cut.num_columns)

    def put(rows: torch.Tensor) -> None:
        blocks = rows.view(len(rows), -1, size)[:, linear.groups]
        scales.copy_(blocks[..., :2].contiguous().view(torch.float16).squeeze(-1))
        stored = blocks[..., 2:]
        if kind == "Q8_0":
            codes.copy_(stored.view(torch.int8).flatten(1)[:, columns])
        else:
            codes.copy_(pack_pairs(nibbles(stored).flatten(1)[:, columns]))

    return {"weight": _slot(codes, cut, kind, put)}


class BlockLinear(Linear):
    """``Linear`` over a ``BlockWeight``. It holds the whole blocks that this rank's inputs belong to.

    Raises:
        ConfigError: the block size does not divide the inputs.
    """

    def __init__(
        self,
        form: WeightFormat,
        cuts: Sequence[Cut],
        bias: torch.nn.Parameter | None,
        layer: str,
        device: torch.device | str,
        *,
        stored_bias: bool,
        float32_output: bool = False,
    ) -> None:
        self.kind = TYPES.get(form.kind, form.kind)
        columns, total, elements = cuts[0].columns, cuts[0].total_columns, form.group_size
        if total % elements:
            raise ConfigError(
                f"{layer}.{cuts[0].name}: type {self.kind} needs multiples of {elements} inputs ({total})"
            )
        self._held, self._inputs = enclosing(columns, elements)
        size = (self._held.stop - self._held.start) * BLOCK_TYPES[self.kind][0]
        blocks = torch.empty(sum(cut.num_rows for cut in cuts), size, dtype=torch.uint8, device=device)
        weight = torch.nn.Parameter(blocks, requires_grad=False)
        super().__init__(weight, bias, float32_output=float32_output, cuts=cuts, stored_bias=stored_bias)

    def projection_slots(self, cut: Cut, held: slice) -> dict[str, WeightSlot]:
        size, packed = BLOCK_TYPES[self.kind][0], self._native
        columns = slice(self._held.start * size, self._held.stop * size)
        if packed is None:
            target = self.weight.data[held]
            return {"weight": _slot(target, cut, self.kind, lambda rows: target.copy_(rows[:, columns]))}
        assert isinstance(packed, CodesLinear)
        target = torch.empty(cut.num_rows, columns.stop - columns.start, dtype=torch.uint8, device="meta")

        def pack(rows: torch.Tensor) -> str | None:
            return None if packed.write_blocks(held.start, rows[:, columns]) else NOT_FINITE

        return {"weight": replace(_slot(target, cut, self.kind, pack), check=None)}

    def pack_as_read(self) -> None:
        native = self._library()
        if native is not None:
            outputs, row_bytes = self.weight.shape
            self._native = CodesLinear.of_blocks(native, self.kind, outputs, self._inputs, row_bytes)
            self._free_weight()

    def prepack(self, *, deterministic: bool = False) -> bool:
        """Choose the product, as ``Linear.prepack`` does."""
        native = self._library()
        if self._native is not None:
            self._native.set_bias(self.bias)
        elif native is not None:
            self._native = CodesLinear(native, self._block_weight(), self.bias)
            self._free_weight()
        elif deterministic and self._product is None:
            like = torch.empty(TILE_ROWS, self.cuts[0].num_columns, device=self.weight.device)
            self._product = in_tiles(self._plain, like)
        return self._native is not None

    def _library(self) -> Native | None:
        native = load_native() if self.weight.is_cpu and self.weight.numel() else None
        return native if native is not None and CodesLinear.takes(native, self._block_weight()) else None

    def gathered_rows(self) -> torch.Tensor | PackedLinear | PackedWeight:
        return self._native or self._block_weight()

    def _block_weight(self) -> BlockWeight:
        return BlockWeight(self.kind, self.weight.data, self._inputs)

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        return scaled_linear(x, self._block_weight(), self.bias, float32_output=self._float32_output)


def _slot(target: torch.Tensor, cut: Cut, kind: str, put: Callable[[torch.Tensor], object]) -> WeightSlot:
    def check(rows: torch.Tensor) -> str | None:
        return None if block_scales(kind, rows).isfinite().all() else NOT_FINITE

    shape = (cut.total_rows, cut.total_columns)
    return WeightSlot(target, shape, (cut.rows, cut.columns), dtypes=(kind,), put=put, check=check)
