"""Reader of AWQ (AutoAWQ, version gemm).

A layer has ``qweight``, int32 ``[inputs, outputs / 8]``; ``qzeros``, int32 ``[groups, outputs / 8]``; and ``scales``
``[groups, outputs]``. The fields of a word, from the lowest bits on, are the outputs 0, 2, 4, 6, 1, 3, 5, 7.
"""

import torch

from quire.kernels.common.scaled_weight import INT4_ZERO, pack_pairs
from quire.worker_proc.models.formats.quantised import QuantisedLinear
from quire.worker_proc.models.formats.words import enclosing, scale_slot, unpack_words
from quire.worker_proc.models.weight_slot import Cut, WeightSlot

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
OUTPUTS_AT_A_TIME = 64
"""Outputs that are transposed at a time, so that unpacked codes take little memory beside a large weight."""


def read_awq(linear: QuantisedLinear, cut: Cut, held: slice) -> dict[str, WeightSlot]:
    codes = linear.weight.data[held]
    units, within = enclosing(cut.rows, len(ORDER))
    words = -(-cut.total_rows // len(ORDER))

    def put_codes(stored: torch.Tensor) -> None:
        for start in range(0, len(codes), OUTPUTS_AT_A_TIME):
            stop = min(start + OUTPUTS_AT_A_TIME, len(codes))
            part, inner = enclosing(slice(within.start + start, within.start + stop), len(ORDER))
            unpacked = unpack_words(stored[:, part], "int4", ORDER)[:, inner]
            codes[start:stop].copy_(pack_pairs(unpacked.t()))

    def wrong_zeros(stored: torch.Tensor) -> str | None:
        if linear.zeros is not None or bool((unpack_words(stored, "int4") == INT4_ZERO).all()):
            return None
        return f"has other zero points than {INT4_ZERO}, but config.json has zero_point false: it must be true"

    def put_zeros(stored: torch.Tensor) -> None:
        if linear.zeros is not None:
            linear.zeros.data[held].copy_(unpack_words(stored, "int4", ORDER)[:, within].t())

    return {
        "qweight": WeightSlot(
            codes, (cut.total_columns, words), (cut.columns, units), dtypes=("I32",), rows_dim=1, put=put_codes
        ),
        "scales": scale_slot(linear, cut, held, transposed=True),
        "qzeros": WeightSlot(
            codes,
            (linear.total_groups, words),
            (linear.groups, units),
            dtypes=("I32",),
            rows_dim=1,
            put=put_zeros,
            check=wrong_zeros,
            dummy=-0x77777778,
        ),
    }
