"""Codes in stored words and bytes, and checks of stored values that the readers share."""

from collections.abc import Callable, Sequence

import torch

from quire.kernels.common.scaled_weight import CODE_BITS, LARGEST_CODES
from quire.worker_proc.models.formats.quantised import QuantisedLinear
from quire.worker_proc.models.weight_slot import FLOATS, Cut, WeightSlot

DUMMY_DEVIATION = 0.02
CHECKED_AT_A_TIME = 2**20
"""Codes that are checked at a time: temporary arrays of whole weights would stay in the process's heap."""


def words_as_codes(words: torch.Tensor, kind: str) -> torch.Tensor:
    """View int32 words ``[outputs, words]``, with the first code in the lowest bits, as codes of a ``ScaledWeight``."""
    octets = words.contiguous().view(torch.uint8)
    return octets if kind == "int4" else (octets ^ 0x80).view(torch.int8)


def unpack_words(words: torch.Tensor, kind: str, order: Sequence[int] | None = None) -> torch.Tensor:
    """Unpack unsigned codes along the last dimension: int32 ``[..., words]`` → ``[..., codes]``.

    Args:
        order: the place of the code in each field of a word, from the lowest bits on; by default in order.
    """
    bits = CODE_BITS[kind]
    fields = range(32 // bits)
    places = list(order or fields)
    shifts = torch.tensor([bits * places.index(place) for place in fields], dtype=torch.int32, device=words.device)
    codes: torch.Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return codes.flatten(-2)


def enclosing(part: slice, size: int) -> tuple[slice, slice]:
    """Return the units of ``size`` that cover ``part``, and the place of ``part`` within them."""
    units = slice(part.start // size, -(-part.stop // size))
    first = part.start - units.start * size
    return units, slice(first, first + part.stop - part.start)


def scale_slot(
    linear: QuantisedLinear, cut: Cut, held: slice, *, transposed: bool = False, block_rows: int = 1
) -> WeightSlot:
    """Return the slot of scales ``[outputs / block_rows, groups]`` (or transposed), one for a tensor if 0 rows."""
    target = linear.scales.data[held]
    if block_rows == 0:
        return _scales(target, (1,), (), lambda stored: target.copy_(stored.reshape(1, 1)), None, linear)
    blocks, within = enclosing(cut.rows, block_rows)
    shape: tuple[int, ...] = (-(-cut.total_rows // block_rows), linear.total_groups)
    part: tuple[slice, ...] = (blocks, linear.groups)

    def put(stored: torch.Tensor) -> None:
        by_rows = stored.t() if transposed else stored
        target.copy_(by_rows if block_rows == 1 else by_rows.repeat_interleave(block_rows, 0)[within])

    if transposed:
        shape, part = shape[::-1], part[::-1]
    return _scales(target, shape, part, put, int(transposed), linear)


def input_scale_slot(linear: QuantisedLinear, target: torch.Tensor) -> WeightSlot:
    """Return the slot of the scale of activations; fused projections share the largest."""
    return _scales(target, (1,), (), lambda stored: target.clamp_(min=float(stored)), None, linear)


def _scales(
    target: torch.Tensor,
    shape: tuple[int, ...],
    part: tuple[slice, ...],
    put: Callable[[torch.Tensor], object],
    rows_dim: int | None,
    linear: QuantisedLinear,
) -> WeightSlot:
    kind = linear.form.kind
    # Random codes are uniform in the integers, or in the exponents up to 1 for fp8.
    dummy = DUMMY_DEVIATION * (2.0 if kind == "fp8" else 1.7 / LARGEST_CODES[kind])
    return WeightSlot(target, shape, part, dtypes=FLOATS, rows_dim=rows_dim, put=put, check=wrong_scale, dummy=dummy)


def input_groups_slot(linear: QuantisedLinear, cut: Cut) -> WeightSlot:
    """Return the slot of the group of each input, int32 ``[inputs]``."""
    size = linear.form.group_size or cut.total_columns
    in_order = torch.arange(cut.total_columns, dtype=torch.int32) // size
    own = in_order[cut.columns]

    def put(groups: torch.Tensor) -> None:
        if linear.form.act_order and linear.input_groups is not None:
            linear.input_groups.data.copy_(groups)

    def check(groups: torch.Tensor) -> str | None:
        if linear.form.act_order:
            low, high = int(groups.min()), int(groups.max())
            if low >= 0 and high < linear.total_groups:
                return None
            return f"has groups from {low} to {high}; the layer has groups 0 to {linear.total_groups - 1}"
        same = torch.equal(groups, own)
        return None if same else "has groups in another order, but config.json has no act-order: set desc_act"

    return WeightSlot(
        linear.scales.data,
        (cut.total_columns,),
        (cut.columns,),
        dtypes=("I32",),
        rows_dim=None,
        put=put,
        check=check,
        dummy=in_order,
    )


def wrong_scale(scales: torch.Tensor) -> str | None:
    """Return what is wrong with scales that are not all positive and finite."""
    wide = scales.float()
    wrong = ~((wide > 0) & wide.isfinite())
    return f"has a scale of {float(wide[wrong][0]):g}; scales must be positive and finite" if wrong.any() else None


def wrong_fp8(codes: torch.Tensor) -> str | None:
    """Return what is wrong with float8 e4m3 numbers that are not all finite."""
    octets = codes.view(torch.uint8).reshape(-1)
    for start in range(0, len(octets), CHECKED_AT_A_TIME):
        if int((octets[start : start + CHECKED_AT_A_TIME] & 0x7F).max()) == 0x7F:
            return "has non-finite values in float8_e4m3fn"
    return None
