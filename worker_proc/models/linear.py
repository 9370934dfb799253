"""A linear layer, and who multiplies: torch, or on a CPU the native library or oneDNN, with weights in their layout."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from quire.kernels.cpu.linear import PackedLinear
from quire.kernels.cpu.native import load_native
from quire.worker_proc.device.device import has_matrix_instructions

# Rows that a product without the library is computed for, however many there are, where its bits must not depend on
# that. The 1 to 16 rows of a small decode step then read the weights once, as they should.
TILE_ROWS = 16

Product = Callable[[torch.Tensor], torch.Tensor]


class Linear(torch.nn.Module):
    """``x @ weight.T + bias``, ``[tokens, inputs]`` → ``[tokens, outputs]`` of ``x``'s dtype.

    The weight may be narrower than ``x`` (a bfloat16 checkpoint under float32 activations): half the memory to read,
    and products and sums are float32 all the same.

    Args:
        weight: ``[outputs, inputs]``; shared when given to two layers (tied embeddings).
        bias: ``[outputs]`` or None.
    """

    def __init__(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._native: PackedLinear | None = None
        self._product: Product | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._native is not None:
            return self._native(x)
        return _plain(x, self.weight, self.bias) if self._product is None else self._product(x)

    __call__ = forward  # without looking for hooks, several times a layer

    def prepack(self, *, keep: bool = False, deterministic: bool = False) -> bool:
        """Once the weight is loaded: choose who multiplies, and lay the weight out for it.

        The native library, unless oneDNN has matrix instructions for the weight's dtype: it reads 16-bit weights as
        they are, and is faster than MKL and oneDNN in float32 for any number of tokens.

        Args:
            keep: the plain weight stays, at the price of a second copy: someone else reads it. Otherwise it is gone.
            deterministic: a row's bits depend on that row alone: not on how many rows there are, on its place among
                them or on the number of threads. The native library is always so. Without it rows are computed in
                tiles of one size, or one by one where a trial on this weight shows that a tile's rows differ.

        Returns:
            Whether the layout changed: false on other devices, and where neither library takes the weight.
        """
        if self._native is not None or self._product is not None:
            return True
        weight = self.weight.data
        native = load_native() if weight.device.type == "cpu" else None
        wanted = deterministic or not has_matrix_instructions(weight.dtype)
        if native is not None and wanted and PackedLinear.accepts(native, weight):
            self._native = PackedLinear(native, weight, self.bias)
        else:
            self._product = _onednn(weight, self.bias)
        changed = self._native is not None or self._product is not None
        if deterministic and self._native is None:
            self._product = in_tiles(self._product or _plainly(self.weight, self.bias), weight)
        if changed and not keep:
            self.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)
        return changed


def in_tiles(product: Product, weight: torch.Tensor) -> Product:
    """``product`` with rows that do not depend on their batch: always computed for the same number of rows.

    Which kernel a matrix library takes, and in which order it adds, follows from the shape. Within one shape it may
    still follow from the row's place and the number of threads, so both are tried, once, on this weight.
    """
    rows = TILE_ROWS if _rows_agree(product, weight) else 1

    def tiled(x: torch.Tensor) -> torch.Tensor:
        # A copy, at torch's own alignment: a view of the caller's may have another, and with it other arithmetic.
        padded = x.new_zeros(max(1, -(-len(x) // rows)) * rows, x.shape[1])
        padded[: len(x)] = x
        tiles = [product(padded[start : start + rows]) for start in range(0, len(padded), rows)]
        return torch.cat(tiles)[: len(x)]

    return tiled


def _rows_agree(product: Product, weight: torch.Tensor) -> bool:
    """Whether every place in a tile, with any other rows around, and one thread, give the same bits for a row."""
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(TILE_ROWS, weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
    expected = product(x)
    agree = torch.equal(product(x.roll(1, 0)), expected.roll(1, 0))
    if weight.device.type == "cpu" and torch.get_num_threads() > 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            agree = agree and torch.equal(product(x), expected)
        finally:
            torch.set_num_threads(threads)
    return agree


def _plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if weight.dtype is not x.dtype:
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return F.linear(x, weight, bias)


def _plainly(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    return lambda x: _plain(x, weight, bias)


def _onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Product | None:
    """oneDNN's product with a reordered copy of the weight; None where this torch or device has none.

    torch's own choice for float32, MKL, is 1.3 to 3 times slower for the 2 to 64 tokens of a decode step, and
    bfloat16 gains about as much. Inductor calls the same private operators.
    """
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        torch.ops.mkldnn._linear_pointwise(weight[:1], packed, bias, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    dtype = weight.dtype

    def product(x: torch.Tensor) -> torch.Tensor:
        # oneDNN multiplies only what it has instructions for: activations of another dtype are rounded to the weight's.
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x.to(dtype), packed, bias, "none", [], "")
        return out.to(x.dtype)

    return product
