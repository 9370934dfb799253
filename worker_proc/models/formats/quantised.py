"""A linear layer whose weight is codes with scales."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from quire.kernels.common.scaled_linear import PackedWeight, round_to_fp8, scaled_linear
from quire.kernels.common.scaled_weight import CODE_BITS, CODE_DTYPES, ScaledWeight
from quire.kernels.cpu.linear.codes import CodesLinear
from quire.kernels.cpu.linear.fp8 import Fp8Linear
from quire.kernels.cpu.linear.linear import PackedLinear
from quire.kernels.cpu.native.library import load_native
from quire.kernels.dense.packed_linear import accepts, packed_linear
from quire.protocol.errors import ConfigError
from quire.protocol.model.weight_format import WeightFormat
from quire.worker_proc.models.linear import TILE_ROWS, Linear, in_tiles
from quire.worker_proc.models.weight_slot import Cut, WeightSlot

Reader = Callable[["QuantisedLinear", Cut, slice], dict[str, WeightSlot]]
"""Returns the slots of one projection's tensors, by suffix, given its rows of the fused codes and scales."""


class QuantisedLinear(Linear):
    """``Linear`` over a ``ScaledWeight``, which stays packed. Its parameter ``weight`` has the codes.

    It holds the scales of the groups that this rank's inputs belong to, a row of scales for each output. Where groups
    are not consecutive, or ranks cut one, it also holds the group of each input.

    Args:
        form: the stored format.
        cuts: the projections, concatenated by outputs.
        bias: ``[outputs]`` or None.
        layer: full name of the layer, for errors.
        read: the reader of the format.

    Raises:
        ConfigError: the group size does not divide the inputs, or this rank's share is not a whole number of stored
            words.
    """

    def __init__(
        self,
        form: WeightFormat,
        cuts: Sequence[Cut],
        bias: torch.nn.Parameter | None,
        layer: str,
        read: Reader,
        device: torch.device | str,
        *,
        stored_bias: bool,
        float32_output: bool = False,
    ) -> None:
        columns, total = cuts[0].columns, cuts[0].total_columns
        _check_columns(form, cuts[0], f"{layer}.{cuts[0].name}")
        outputs, inputs = sum(cut.num_rows for cut in cuts), cuts[0].num_columns

        def empty(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        codes = empty(outputs, inputs * CODE_BITS[form.kind] // 8, dtype=CODE_DTYPES[form.kind])
        super().__init__(codes, bias, float32_output=float32_output, cuts=cuts, stored_bias=stored_bias)
        self.form = form
        self._read = read
        size = form.group_size or total
        self.total_groups = -(-total // size)
        self.groups = slice(columns.start // size, -(-columns.stop // size))
        if form.act_order:
            self.groups = slice(0, self.total_groups)
        held = self.groups.stop - self.groups.start
        self.group_size = inputs if held == 1 else size
        self.scales = empty(outputs, held, dtype=getattr(torch, form.scale_dtype))
        self.zeros = empty(outputs, held, dtype=torch.int8) if form.zero_points else None
        self.row_scales = empty(outputs, dtype=torch.float32) if form.kind == "fp4" else None
        is_static = form.fp8_activations == "static"
        self.input_scale = torch.nn.Parameter(torch.zeros(1, device=device), requires_grad=False) if is_static else None
        self.input_groups: torch.nn.Parameter | None = None
        if form.act_order or (held > 1 and (columns.start % size or columns.stop % size)):
            self.input_groups = empty(inputs, dtype=torch.int32)
            at = torch.arange(columns.start, columns.stop, device=device) // size
            self.input_groups.data.copy_(at - self.groups.start)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.form.fp8_activations:
            x = round_to_fp8(x, self.form.activation_group, self.input_scale)
        return super().__call__(x)

    def projection_slots(self, cut: Cut, held: slice) -> dict[str, WeightSlot]:
        return self._read(self, cut, held)

    def move(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        """Hold the weight in this memory, of the same shapes; call it before the weight is loaded."""
        self.weight, self.scales = (torch.nn.Parameter(part, requires_grad=False) for part in (codes, scales))
        self.zeros = None if zeros is None else torch.nn.Parameter(zeros, requires_grad=False)
        self._transposed = None

    def scaled_weight(self) -> ScaledWeight:
        """Return the loaded weight as kernels take it. It shares the parameters' memory."""
        groups = None if self.input_groups is None else self.input_groups.data
        return ScaledWeight(
            self.form.kind,
            self.weight.data,
            self.scales.data,
            self.group_size,
            None if self.zeros is None else self.zeros.data,
            None if self.row_scales is None else self.row_scales.data,
            groups,
        )

    def prepack(self, *, deterministic: bool = False) -> bool:
        """Choose the product, as ``Linear.prepack`` does: on a CPU the native library, which holds a copy of its own.

        The codes are freed then. On a GPU it is a Triton kernel, which reads the codes in place.
        """
        if self._native is not None or self._product is not None:
            return self._native is not None
        weight = self.scaled_weight()
        native = load_native() if weight.codes.is_cpu else None
        if native is not None and CodesLinear.takes(native, weight):
            self._native = CodesLinear(native, weight, self.bias, int8_activations=self.form.int8_activations)
        elif native is not None and Fp8Linear.takes(native, weight):
            self._native = Fp8Linear(native, weight, self.bias)
        elif self._has_triton_product(weight):
            self._product = partial(packed_linear, weight=weight, bias=self.bias, deterministic=deterministic)
        elif deterministic:
            like = torch.empty(TILE_ROWS, self.cuts[0].num_columns, device=self.weight.device)
            self._product = in_tiles(self._plain, like)
        if self._native is not None:
            for name in ("weight", "scales", "zeros", "row_scales", "input_groups"):
                tensor = getattr(self, name)
                if tensor is not None:
                    setattr(self, name, torch.nn.Parameter(tensor.data.new_empty(0), requires_grad=False))
            self._transposed = None
        return self._native is not None

    def gathered_rows(self) -> torch.Tensor | PackedLinear | PackedWeight:
        return self._native or self.scaled_weight()

    def _has_triton_product(self, weight: ScaledWeight) -> bool:
        exact = self._float32_output or self.form.int8_activations
        return not weight.codes.is_cpu and accepts(weight) and not exact

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        return scaled_linear(
            x,
            self.scaled_weight(),
            self.bias,
            int8_activations=self.form.int8_activations,
            float32_output=self._float32_output,
        )


def _check_columns(form: WeightFormat, cut: Cut, name: str) -> None:
    """Raise ConfigError unless the inputs are whole groups, and this rank's part of them whole stored words."""
    total, size, pack = cut.total_columns, form.group_size, form.pack
    if size and total % size and form.kind != "fp8":
        raise ConfigError(f"{name}: group_size {size} does not divide its {total} inputs")
    if cut.columns.start % pack or cut.columns.stop % pack:
        raise ConfigError(
            f"{name}: its inputs {cut.columns.start} to {cut.columns.stop} of {total} on a rank must be a multiple of "
            f"{pack}, which share a stored word in {form.layout}: choose another tensor_parallel_size"
        )
