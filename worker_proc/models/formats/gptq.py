"""Reader of GPTQ (AutoGPTQ, GPTQModel), with and without act-order.

A layer has ``qweight``, int32 ``[inputs / codes per word, outputs]`` with the lowest bits first; ``scales``
``[groups, outputs]``; ``qzeros``, int32 ``[groups, outputs / codes per word]``, from which the first version of the
format subtracts 1; and ``g_idx``, int32 ``[inputs]``: the group of each input. Symmetric files have zero points too.
"""

import torch

from quire.kernels.common.scaled_weight import CODE_BITS
from quire.worker_proc.models.formats.quantised import QuantisedLinear
from quire.worker_proc.models.formats.words import (
    enclosing,
    input_groups_slot,
    scale_slot,
    unpack_words,
    words_as_codes,
)
from quire.worker_proc.models.weight_slot import Cut, WeightSlot


def read_gptq(linear: QuantisedLinear, cut: Cut, held: slice) -> dict[str, WeightSlot]:
    form, pack = linear.form, linear.form.pack
    codes = linear.weight.data[held]
    columns = slice(cut.columns.start // pack, cut.columns.stop // pack)
    slots = {
        "qweight": WeightSlot(
            codes,
            (cut.total_columns // pack, cut.total_rows),
            (columns, cut.rows),
            dtypes=("I32",),
            rows_dim=1,
            put=lambda words: codes.copy_(words_as_codes(words.t(), form.kind)),
        ),
        "scales": scale_slot(linear, cut, held, transposed=True),
        "qzeros": _zeros(linear, cut, held),
    }
    if form.has_input_groups:
        slots["g_idx"] = input_groups_slot(linear, cut)
    return slots


def _zeros(linear: QuantisedLinear, cut: Cut, held: slice) -> WeightSlot:
    form, pack = linear.form, linear.form.pack
    units, within = enclosing(cut.rows, pack)
    bits = CODE_BITS[form.kind]
    middle = 2 ** (bits - 1)

    def unsigned(words: torch.Tensor) -> torch.Tensor:
        """Return the zero points ``[outputs, groups]``. The addition wraps as in the format's kernels."""
        zeros = (unpack_words(words, form.kind)[:, within] + form.zero_offset).t()
        return zeros.bitwise_and(2**bits - 1)

    def put(words: torch.Tensor) -> None:
        if linear.zeros is not None:
            linear.zeros.data[held].copy_(unsigned(words) - (0 if form.kind == "int4" else middle))

    def check(words: torch.Tensor) -> str | None:
        if linear.zeros is not None or bool((unsigned(words) == middle).all()):
            return None
        return f"has other zero points than {middle}, but config.json has sym true: it must be false"

    return WeightSlot(
        linear.weight.data[held],
        (linear.total_groups, -(-cut.total_rows // pack)),
        (linear.groups, units),
        dtypes=("I32",),
        rows_dim=1,
        put=put,
        check=check,
        dummy=0x77777777 if form.kind == "int4" else 0x7F7F7F7F,
    )
