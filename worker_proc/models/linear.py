"""A linear layer and its implementations: torch, or on a CPU the native library with packed weights."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from quire.kernels.common.scaled_linear import PackedWeight
from quire.kernels.cpu.linear.linear import PackedLinear
from quire.kernels.cpu.native.library import Native, load_native
from quire.worker_proc.models.module import Module
from quire.worker_proc.models.weight_slot import Cut, WeightSlot

# Row count of every product without the native library in deterministic mode, so that a row's bits do not depend on
# the batch size. A decode step of up to 16 rows still reads the weights once.
TILE_ROWS = 16
WIDENED_ELEMENTS = 2**18
"""Elements of a 16-bit weight that are widened at a time, 1 MiB in float32: a usual L2 cache."""
CONVERTED_ELEMENTS = 2**24
"""Elements of a weight that are converted to another dtype at a time."""

Product = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, Product] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class Linear(Module):
    """``x @ weight.T + bias``, ``[tokens, inputs]`` → ``[tokens, outputs]`` of ``x``'s dtype.

    The weight may have a narrower dtype than ``x`` (bfloat16 under float32 activations): it takes half the memory
    traffic, and products and sums are still float32.

    Args:
        weight: ``[outputs, inputs]``; shared when given to two layers (tied embeddings).
        bias: ``[outputs]`` or None.
        float32_output: return the float32 sums instead of rounding them to ``x``'s dtype. The head needs it: logits
            between 16 and 32 that are rounded to bfloat16 are multiples of 0.125, so that the best tokens often tie.
        cuts: the projections that are concatenated by outputs, for ``weight_slots``; all with the same columns.
        stored_bias: the checkpoint has biases. A layer sharded by inputs holds them on rank 0 only.
        activation: one of ACTIVATIONS, which is applied to the outputs; "": none.
    """

    def __init__(
        self,
        weight: torch.nn.Parameter,
        bias: torch.nn.Parameter | None = None,
        *,
        float32_output: bool = False,
        cuts: Sequence[Cut] = (),
        stored_bias: bool = False,
        activation: str = "",
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.cuts = cuts
        self._stored_bias = stored_bias
        # A view that is made once; None: another product is used.
        self._transposed: torch.Tensor | None = None if float32_output or activation else weight.T
        self._float32_output = float32_output
        self._activation = activation
        self._native: PackedLinear | None = None
        self._product: Product | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self._transposed, self.bias
        if weight is not None and weight.dtype is x.dtype:
            # The same as F.linear, which takes 0.6 µs more of the host's time.
            return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
        if self._native is not None:
            return self._native(x, torch.float32 if self._float32_output else None)
        return self._plain(x) if self._product is None else self._product(x)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots of the checkpoint tensors of all projections, by name below the layer."""
        slots: dict[str, WeightSlot] = {}
        first = 0
        for cut in self.cuts:
            held = slice(first, first + cut.num_rows)
            first = held.stop
            slots |= {f"{cut.name}.{suffix}": slot for suffix, slot in self.projection_slots(cut, held).items()}
            if self._stored_bias:
                own = None if self.bias is None else self.bias.data[held]
                slots[f"{cut.name}.bias"] = bias_slot(own, cut.rows, cut.total_rows, self.weight)
        return slots

    def projection_slots(self, cut: Cut, held: slice) -> dict[str, WeightSlot]:
        """Slots of one projection without its bias, by suffix. ``held``: its rows of the fused weight."""
        packed, shape, part = self._native, (cut.total_rows, cut.total_columns), (cut.rows, cut.columns)
        if packed is None:
            return {"weight": WeightSlot(self.weight.data[held], shape, part)}
        target = torch.empty(cut.num_rows, packed.inputs, dtype=self.weight.dtype, device="meta")
        put = partial(write_rows, packed, held.start, dtype=target.dtype)
        return {"weight": WeightSlot(target, shape, part, put=put)}

    def gathered_rows(self) -> torch.Tensor | PackedLinear | PackedWeight:
        """Return the weight, as the rows of an embedding."""
        return self._native or self.weight.data

    def pack_as_read(self) -> None:
        """Free the weight, if ``prepack`` would choose the native library, and pack what is loaded in its place.

        So a checkpoint is copied once, and memory never holds both layouts. ``prepack`` completes the layer.
        """
        native, weight = self._library(), self.weight.data
        if native is not None:
            self._native = PackedLinear.unfilled(native, weight.shape[0], weight.shape[1], weight.dtype)
            self._free_weight()

    def prepack(self, *, deterministic: bool = False) -> bool:
        """Convert the loaded weight to the native library's layout, if the library accepts it.

        Args:
            deterministic: make a row's bits depend on that row alone, not on the number of rows, the row's index or
                the number of threads. The native library always does. With torch, rows are computed in tiles of one
                size, or one by one if a trial on this weight shows that the rows of a tile differ.

        Returns:
            Whether the layout changed: false on other devices, and if the library does not accept the weight.
        """
        native = self._library()
        if self._native is not None:
            self._native.set_bias(self.bias)
        elif native is not None:
            self._native = PackedLinear(native, self.weight.data, self.bias)
            self._free_weight()
        elif deterministic and self._product is None:
            self._transposed = None
            self._product = in_tiles(self._plain, self.weight.data)
        if self._native is not None and self._activation:
            self._native.set_activation(self._activation)
        return self._native is not None

    def _library(self) -> Native | None:
        """Return the native library if it accepts the weight."""
        weight = self.weight.data
        native = load_native() if weight.device.type == "cpu" else None
        return native if native is not None and PackedLinear.accepts(native, weight) else None

    def _free_weight(self) -> None:
        self._transposed = None
        self.weight = torch.nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        y = (_float32_linear if self._float32_output else _linear)(x, self.weight, self.bias)
        return ACTIVATIONS[self._activation](y) if self._activation else y


def write_rows(packed: PackedLinear, first: int, rows: torch.Tensor, *, dtype: torch.dtype) -> str | None:
    """Convert and pack rows of a weight; return what is wrong with them, or None."""
    finite = True
    for start in range(0, len(rows), step := max(1, CONVERTED_ELEMENTS // max(1, rows.shape[1]))):
        finite &= packed.write_rows(first + start, rows[start : start + step].to(dtype))
    return None if finite else f"has non-finite values in {str(dtype).removeprefix('torch.')}"


def bias_slot(bias: torch.Tensor | None, rows: slice, total: int, like: torch.Tensor) -> WeightSlot:
    """Return the slot of a bias; without ``bias`` another rank holds it."""
    if bias is None:
        return WeightSlot(like.data.new_empty(0), (total,), (slice(0, 0),))
    return WeightSlot(bias, (total,), (rows,))


def in_tiles(product: Product, weight: torch.Tensor) -> Product:
    """Wrap ``product`` so that it is always called with the same number of rows: a row's bits ignore its batch.

    A matrix library chooses its kernel, and with it the order of its sums, by shape. Within one shape the order may
    still depend on the row's index and the number of threads, so both are tried once on this weight. Where threads
    matter, as they do to MKL on CPUs with AMX, a product takes one thread.
    """
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(TILE_ROWS, weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
    alone = _on_one_thread(product)
    if weight.device.type == "cpu" and not all(torch.equal(alone(part), product(part)) for part in (x, x[:1])):
        product = alone
    rows = TILE_ROWS if torch.equal(product(x.roll(1, 0)), product(x).roll(1, 0)) else 1

    def tiled(x: torch.Tensor) -> torch.Tensor:
        # A copy with torch's alignment: a view of the caller may be aligned differently, which can change the result.
        padded = x.new_zeros(max(1, -(-len(x) // rows)) * rows, x.shape[1])
        padded[: len(x)] = x
        tiles = [product(padded[start : start + rows]) for start in range(0, len(padded), rows)]
        return torch.cat(tiles)[: len(x)]

    return tiled


def _on_one_thread(product: Product) -> Product:
    def alone(x: torch.Tensor) -> torch.Tensor:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return product(x)
        finally:
            torch.set_num_threads(threads)

    return alone


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if weight.dtype is not x.dtype:
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return F.linear(x, weight, bias)


def _float32_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply with float32 sums and output. ``x`` and the weight may be narrower: they are widened, never rounded."""
    if x.dtype is weight.dtype is torch.float32:
        return F.linear(x, weight, bias)
    if x.dtype is weight.dtype and not x.is_cpu:
        out = torch.mm(x, weight.T, out_dtype=torch.float32)
    else:
        # torch has no such product on a CPU. A part of the weight is widened at a time, so that the copy stays in a
        # cache: four to ten times as fast as to widen all of it.
        wide = x.float()
        out = wide.new_empty(len(x), len(weight))
        step = max(1, WIDENED_ELEMENTS // weight.shape[1])
        for start in range(0, len(weight), step):
            torch.mm(wide, weight[start : start + step].float().T, out=out[:, start : start + step])
    return out if bias is None else out.add_(bias)
