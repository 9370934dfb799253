"""Readers of NVFP4 in the forms of compressed-tensors and of ModelOpt.

A layer has ``weight_packed`` (ModelOpt: ``weight``), uint8 ``[outputs, inputs / 2]`` with the even input in the low
half; ``weight_scale``, float8 ``[outputs, inputs / 16]``; and ``weight_global_scale`` ``[1]``, which divides the scales
(ModelOpt: ``weight_scale_2``, which multiplies them).
"""

import torch

from quire.worker_proc.models.formats.quantised import QuantisedLinear
from quire.worker_proc.models.formats.words import wrong_scale
from quire.worker_proc.models.weight_slot import Cut, WeightSlot


def read_nvfp4(linear: QuantisedLinear, cut: Cut, held: slice) -> dict[str, WeightSlot]:
    row_scales = _row_scales(linear, held)
    return {
        "weight_packed": _codes(linear, cut, held),
        "weight_scale": _group_scales(linear, cut, held),
        "weight_global_scale": WeightSlot(
            row_scales,
            (1,),
            rows_dim=None,
            put=lambda stored: row_scales.copy_(1 / stored.float()),
            check=wrong_scale,
            dummy=150.0,
        ),
    }


def read_modelopt_nvfp4(linear: QuantisedLinear, cut: Cut, held: slice) -> dict[str, WeightSlot]:
    return {
        "weight": _codes(linear, cut, held),
        "weight_scale": _group_scales(linear, cut, held),
        "weight_scale_2": WeightSlot(_row_scales(linear, held), (1,), rows_dim=None, check=wrong_scale, dummy=1 / 150),
    }


def _row_scales(linear: QuantisedLinear, held: slice) -> torch.Tensor:
    assert linear.row_scales is not None
    return linear.row_scales.data[held]


def _codes(linear: QuantisedLinear, cut: Cut, held: slice) -> WeightSlot:
    columns = slice(cut.columns.start // 2, cut.columns.stop // 2)
    return WeightSlot(
        linear.weight.data[held], (cut.total_rows, cut.total_columns // 2), (cut.rows, columns), dtypes=("U8",)
    )


def _group_scales(linear: QuantisedLinear, cut: Cut, held: slice) -> WeightSlot:
    return WeightSlot(
        linear.scales.data[held],
        (cut.total_rows, linear.total_groups),
        (cut.rows, linear.groups),
        dtypes=("F8_E4M3",),
        check=_wrong_group_scale,
        dummy=1.0,
    )


def _wrong_group_scale(scales: torch.Tensor) -> str | None:
    """Return what is wrong with scales that are not all finite and at least 0, to which float8 rounds small ones."""
    wide = scales.float()
    wrong = ~((wide >= 0) & wide.isfinite())
    return f"has a scale of {float(wide[wrong][0]):g}; scales must be finite, and at least 0" if wrong.any() else None
