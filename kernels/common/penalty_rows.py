"""The penalties of a step's positions, as every implementation takes them (``kernels.sampling.penalties``)."""

from collections.abc import Collection
from typing import NamedTuple

import torch

from quire.kernels.common.checks import check_tensor


class PenaltyRows(NamedTuple):
    """The penalties of a step's positions.

    Attributes:
        slots: int32 or int64 ``[num_positions]``: each position's row of the counts, or -1 for no penalties.
        repetition, frequency, presence: float32 ``[num_positions]``; the neutral values are 1, 0 and 0.
        offsets: int64 ``[num_positions]``: drafts before position ``p`` are ``drafts[p - offsets[p] : p]``.
        drafts: int64 ``[num_positions]``.
    """

    slots: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    offsets: torch.Tensor
    drafts: torch.Tensor

    def check(self, num_positions: int, device: torch.device, slot_dtypes: Collection[torch.dtype]) -> None:
        """Raise ValueError unless each tensor has its shape and dtype, and is on ``device``."""
        kinds = (slot_dtypes, *[(torch.float32,)] * 3, *[(torch.int64,)] * 2)
        for name, tensor, dtypes in zip(self._fields, self, kinds, strict=True):
            check_tensor(name, tensor, {"num_positions": num_positions}, dtypes, device)
