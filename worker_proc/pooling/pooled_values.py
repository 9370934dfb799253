"""The vectors and scores of a step, between the device and the result message."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.wire.side_rows import POOLED, SideRows


class PooledPart(NamedTuple):
    """Rows of one request: ``num_rows`` rows from row ``start`` on."""

    handle: int
    start: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class PooledValues:
    """Values of groups of requests.

    Attributes:
        parts: of each group, in the order of its rows.
        values: of each group, float32 ``[rows, width]``.
        bad: of each group, bool ``[rows]``: the row is not finite.
    """

    parts: list[list[PooledPart]]
    values: list[torch.Tensor]
    bad: list[torch.Tensor]

    def tensors(self) -> list[torch.Tensor]:
        """Return what the host needs."""
        return [*self.values, *self.bad]

    def message(self, arrays: list[npt.NDArray[Any]]) -> tuple[list[SideRows], list[int]]:
        """Return the rows for the result message, and the handles whose rows are not finite.

        Args:
            arrays: copies of ``tensors``.
        """
        rows, bad_handles = [], []
        count = len(self.parts)
        for parts, values, bad in zip(self.parts, arrays[:count], arrays[count:], strict=True):
            ends = np.cumsum([part.num_rows for part in parts]).tolist()
            for part, end in zip(parts, ends, strict=True):
                own = slice(end - part.num_rows, end)
                rows.append((part.handle, part.start, [values[own]]))
                if bad[own].any():
                    bad_handles.append(part.handle)
        return SideRows.of(POOLED, rows), bad_handles
