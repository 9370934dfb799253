"""What requests get beside their tokens, on the way from the workers to the client: arrays of rows by request."""

from typing import Generic, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from quire.protocol.wire.arrays import Float32, Int32

MAX_SIDE_BYTES = 64 * 2**20
"""Most bytes of the rows of one request; a request that would have more is refused."""
MAX_STEP_SIDE_BYTES = 2 * MAX_SIDE_BYTES
"""Most bytes of the rows of a step's prompts, which are one frame of a message: the rest is for later steps."""

_Number = TypeVar("_Number", np.float32, np.int32)


class _Rows(msgspec.Struct, Generic[_Number], array_like=True, frozen=True, eq=False):
    """Consecutive parts of ``values``, one per request.

    Part ``i`` belongs to request ``handles[i]``: its rows ``starts[i]`` to ``starts[i] + counts[i]`` (exclusive), of
    ``widths[i]`` values each. After a preemption a part may be sent a second time, with the same values.
    """

    handles: list[int]
    starts: list[int]
    counts: list[int]
    widths: list[int]
    values: npt.NDArray[_Number]

    def __len__(self) -> int:
        """Number of parts."""
        return len(self.handles)

    def parts(self) -> list[tuple[int, int, npt.NDArray[_Number]]]:
        """Return (handle, start, rows ``[count, width]``) of each part."""
        found, begin = [], 0
        for handle, start, count, width in zip(self.handles, self.starts, self.counts, self.widths, strict=True):
            found.append((handle, start, self.values[begin : begin + count * width].reshape(count, width)))
            begin += count * width
        return found

    def take(self, parts: list[int]) -> Self:
        """Return these parts only; the indices ascend."""
        if len(parts) == len(self):
            return self
        rows = self.parts()
        return self.of([rows[part] for part in parts])

    @classmethod
    def of(cls, parts: list[tuple[int, int, npt.NDArray[_Number]]]) -> Self:
        """Build from (handle, start, rows ``[count, width]``); there is at least one part."""
        return cls(
            [handle for handle, _, _ in parts],
            [start for _, start, _ in parts],
            [rows.shape[0] for _, _, rows in parts],
            [rows.shape[1] for _, _, rows in parts],
            np.concatenate([rows.ravel() for _, _, rows in parts]),
        )

    def shape_error(self) -> str | None:
        """Return why the numbers do not describe ``values``, or None if they do."""
        columns = (self.starts, self.counts, self.widths)
        if any(len(column) != len(self) for column in columns):
            return f"rows of {len(self)} requests have {', '.join(str(len(column)) for column in columns)} numbers"
        if any(min(column, default=0) < 0 for column in columns):
            return "a number of rows or values is negative"
        needed = sum(count * width for count, width in zip(self.counts, self.widths, strict=True))
        if needed != len(self.values):
            return f"rows have {len(self.values)} values, expected {needed}"
        return None


class PooledRows(_Rows[np.float32], array_like=True, frozen=True, eq=False):
    """Vectors and scores: one row at 0, or with the task token_embed a row for each token of the prompt."""

    values: Float32


class RoutedExperts(_Rows[np.int32], array_like=True, frozen=True, eq=False):
    """The experts to which each computed position was routed: ``num_moe_layers * num_experts_per_token`` values a row,
    by layer."""

    values: Int32
