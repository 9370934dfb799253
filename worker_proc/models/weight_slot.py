"""What a rank loads: the place of each checkpoint tensor, and this rank's part of a projection."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.protocol.model.checkpoint import DTYPE_BYTES

FLOATS = tuple(DTYPE_BYTES)
"""Stored dtypes of weights that are not quantised, and of scales."""


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Destination of one checkpoint tensor.

    Attributes:
        target: a view into a (possibly fused) parameter, into which this rank's part of the checkpoint tensor is
            broadcast. Empty if another rank holds all of it.
        shape: the required shape of the checkpoint tensor.
        part: this rank's part: one slice with both ends per leading dimension; further dimensions are whole.
        offset: number that is added to the stored values.
        dtypes: the stored dtypes that are allowed.
        rows_dim: dimension of the stored tensor along which the projections of a fused layer are concatenated; None if
            they share the tensor.
        put: writes this rank's part if it is stored in another form than ``target``'s, which then may be on ``meta``;
            returns what is wrong with it as text.
        check: returns what is wrong with this rank's part, or None.
        order: indices of the rows of this rank's part in the order in which ``target`` has them; None: the same order.
        dummy: values of dummy weights, in the stored form; None: random ones.
    """

    target: torch.Tensor
    shape: tuple[int, ...]
    part: tuple[slice, ...] = ()
    offset: float = 0.0
    dtypes: tuple[str, ...] = FLOATS
    rows_dim: int | None = 0
    put: Callable[[torch.Tensor], object] | None = None
    check: Callable[[torch.Tensor], str | None] | None = None
    dummy: float | torch.Tensor | None = None
    order: torch.Tensor | None = None

    def fill(self, values: torch.Tensor) -> str | None:
        """Store this rank's part of the checkpoint tensor; return what is wrong with it, or None."""
        if self.order is not None:
            values = values[self.order]
        if self.put is not None:
            problem = self.put(values)
            return problem if isinstance(problem, str) else None
        self.target.copy_(values.float() + self.offset if self.offset else values)
        return None


@dataclass(frozen=True, slots=True)
class Cut:
    """This rank's part of one projection, which the checkpoint has for ``total_rows`` outputs and ``total_columns``
    inputs.

    Attributes:
        name: the projection's name below its layer, for example ``self_attn.q_proj``.
    """

    name: str
    rows: slice
    total_rows: int
    columns: slice
    total_columns: int

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def num_columns(self) -> int:
        return int(self.columns.stop - self.columns.start)
