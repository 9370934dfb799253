"""Reader of plain weights that are quantised as they are loaded (``--quantization``)."""

import torch

from quire.kernels.common.scaled_weight import INT4_ZERO, LARGEST_CODES, pack_pairs
from quire.worker_proc.models.formats.quantised import QuantisedLinear
from quire.worker_proc.models.weight_slot import Cut, WeightSlot

ELEMENTS_AT_A_TIME = 2**20
"""Elements that are widened to float32 at a time: 4 MiB."""


def read_online(linear: QuantisedLinear, cut: Cut, held: slice) -> dict[str, WeightSlot]:
    codes, scales = linear.weight.data[held], linear.scales.data[held]
    step = max(1, ELEMENTS_AT_A_TIME // cut.num_columns)

    def put(stored: torch.Tensor) -> None:
        for start in range(0, len(codes), step):
            rows = slice(start, start + step)
            wide = stored[rows].float()
            grouped = wide.view(len(wide), -1, linear.group_size)
            scale = _scales(grouped, linear.form.kind).to(scales.dtype)
            scales[rows].copy_(scale)
            codes[rows].copy_(_codes(grouped / scale.float()[..., None], linear.form.kind).flatten(1))

    return {
        "weight": WeightSlot(
            codes, (cut.total_rows, cut.total_columns), (cut.rows, cut.columns), put=put, check=_wrong_values
        )
    }


def _scales(grouped: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the scales ``[outputs, groups]`` of weights ``[outputs, groups, group_size]``.

    With four bits, -8 is the code of a group's largest magnitude, so that its scale may be negative: codes from -8 to 7
    reach 8 on one side only. Groups of zeros have scale 1.
    """
    if kind == "int4":
        largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True)).squeeze(-1)
        scale = largest / -INT4_ZERO
    else:
        scale = grouped.abs().amax(-1) / LARGEST_CODES[kind]
    return scale.masked_fill_(scale.abs() < torch.finfo(torch.float32).tiny, 1.0)


def _codes(values: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "fp8":
        return values.clamp_(-LARGEST_CODES[kind], LARGEST_CODES[kind]).to(torch.float8_e4m3fn)
    if kind == "int8":
        return values.round_().clamp_(-LARGEST_CODES[kind], LARGEST_CODES[kind]).to(torch.int8)
    return pack_pairs(values.round_().add_(INT4_ZERO).clamp_(0, 15))


def _wrong_values(stored: torch.Tensor) -> str | None:
    found = bool(stored.isfinite().all())
    return None if found else f"has non-finite values in {str(stored.dtype).removeprefix('torch.')}"
