"""Reader of compressed-tensors (llm-compressor), and of ``fp8`` checkpoints, whose tensors have nearly its names.

A layer has ``weight_packed`` (int32 words with the lowest bits first, along the inputs) or ``weight`` (int8, float8),
``weight_scale`` ``[outputs, groups]``, ``[outputs, 1]``, ``[1]`` or one for each block, and for asymmetric integers
``weight_zero_point``, of which packed ones are packed along the outputs. Stored integers are unsigned where packed:
their zero is 8 or 128. With actorder group, ``weight_g_idx`` ``[inputs]`` has the group of each input.
"""

from quire.worker_proc.models.formats.quantised import QuantisedLinear
from quire.worker_proc.models.formats.words import (
    enclosing,
    input_groups_slot,
    input_scale_slot,
    scale_slot,
    unpack_words,
    words_as_codes,
    wrong_fp8,
)
from quire.worker_proc.models.weight_slot import Cut, WeightSlot


def read_packed(linear: QuantisedLinear, cut: Cut, held: slice) -> dict[str, WeightSlot]:
    """Return the slots of format pack-quantized."""
    form, pack = linear.form, linear.form.pack
    codes = linear.weight.data[held]
    columns = slice(cut.columns.start // pack, cut.columns.stop // pack)
    slots = {
        "weight_packed": WeightSlot(
            codes,
            (cut.total_rows, cut.total_columns // pack),
            (cut.rows, columns),
            dtypes=("I32",),
            put=lambda words: codes.copy_(words_as_codes(words, form.kind)),
        ),
        "weight_scale": scale_slot(linear, cut, held, block_rows=form.block_rows),
    }
    if form.has_input_groups:
        slots["weight_g_idx"] = input_groups_slot(linear, cut)
    if linear.zeros is not None:
        zeros = linear.zeros.data[held]
        units, within = enclosing(cut.rows, pack)
        bias = 0 if form.kind == "int4" else 128
        slots["weight_zero_point"] = WeightSlot(
            zeros,
            (-(-cut.total_rows // pack), linear.total_groups),
            (units, linear.groups),
            dtypes=("I32",),
            put=lambda words: zeros.copy_((unpack_words(words.t(), form.kind).t() - bias)[within]),
        )
    return slots


def read_plain_codes(linear: QuantisedLinear, cut: Cut, held: slice) -> dict[str, WeightSlot]:
    """Return the slots of formats int-quantized and float-quantized, and of method fp8."""
    form = linear.form
    codes, is_fp8 = linear.weight.data[held], form.kind == "fp8"
    slots = {
        "weight": WeightSlot(
            codes,
            (cut.total_rows, cut.total_columns),
            (cut.rows, cut.columns),
            dtypes=("F8_E4M3",) if is_fp8 else ("I8",),
            check=wrong_fp8 if is_fp8 else None,
        )
    }
    name = "weight_scale_inv" if form.layout == "fp8" and form.group_size else "weight_scale"
    slots[name] = scale_slot(linear, cut, held, block_rows=form.block_rows)
    if linear.input_scale is not None:
        slots["input_scale"] = input_scale_slot(linear, linear.input_scale.data)
    if linear.zeros is not None:
        zeros = linear.zeros.data[held]
        shape = (cut.total_rows, linear.total_groups) if form.block_rows else (1,)
        slots["weight_zero_point"] = WeightSlot(
            zeros,
            shape,
            (cut.rows, linear.groups) if form.block_rows else (),
            dtypes=("I8",),
            rows_dim=0 if form.block_rows else None,
            put=lambda stored: zeros.copy_(stored.view(-1, stored.shape[-1])),
        )
    return slots
