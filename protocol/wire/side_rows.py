"""Rows that requests get beside their tokens, on the way from the workers to the client, as one message part.

``SIDE_KINDS`` is the table of kinds. All stops on the way (worker, check, collection by client, stream) treat a part by
its entry there, so that a new kind is an entry, and a field of the client's ``Update``.
"""

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import mul
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from quire.protocol.model.model_config import ModelConfig
from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.request.sampling_params import MAX_CANDIDATES, SamplingParams
from quire.protocol.wire.arrays import Float32, Int32
from quire.protocol.wire.logprobs import LogprobArrays

MAX_SIDE_BYTES = 64 * 2**20
"""Most bytes of the rows of one request; a request that would have more is refused."""
MAX_STEP_SIDE_BYTES = 2 * MAX_SIDE_BYTES
"""Most bytes of the rows of a step's prompts, which are one frame of a message: the rest is for later steps."""
HIGHEST_LOGPROB = 1e-3
"""Largest value accepted as a log probability: 0 is the logarithm of 1, and rounding may exceed it slightly."""

Rows = list[npt.NDArray[Any]]
"""The arrays of one part, each ``[count, width]`` or ``[count, 1]``, in the order of the kind's arrays."""


class RowsOf(enum.Enum):
    """To what a row belongs. This decides which rows of a request may be in a result, and when they are dropped."""

    TOKENS = 1
    """Sampled tokens: row 0 is the first token of the request in the result, which has a row for each of them. A row is
    dropped with its token."""
    PROMPT = 2
    """Prompt tokens from the second on, which is row 1."""
    POSITIONS = 3
    """Computed positions, of prompt and output."""
    POOLED = 4
    """What a prompt is turned into: one row at its end, or one for each token. The result must have them."""


class SideRows(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """Rows of one kind: part ``i`` is those of request ``handles[i]``, each of which occurs once.

    A list of one number holds for all parts; otherwise there is one per part. After a preemption rows may be sent a
    second time, with the same values.

    Attributes:
        kind: number of the ``SideKind``.
        starts: row number of the first row of each part, as of ``RowsOf``.
        counts: number of rows of each part, at least 1.
        widths: values in each row of a part.
        ints, floats: the kind's arrays. Each has the rows of all parts one after the other, flattened.
    """

    kind: int
    handles: list[int]
    starts: list[int]
    counts: list[int]
    widths: list[int]
    ints: list[Int32] = []
    floats: list[Float32] = []

    @classmethod
    def of(cls, kind: "SideKind", parts: Iterable[tuple[int, int, Rows]]) -> list[Self]:
        """Build from (handle, start, rows), for the list of a message; return an empty list without parts."""
        found = list(parts)
        if not found:
            return []
        flat = [np.concatenate([rows[at].ravel() for _, _, rows in found]) for at in range(len(kind.is_wide))]
        counts = [len(rows[0]) for _, _, rows in found]
        widths = [rows[kind.is_wide.index(True)].shape[1] for _, _, rows in found]
        return [cls._packed(kind, [h for h, _, _ in found], [s for _, s, _ in found], counts, widths, flat)]

    @classmethod
    def of_table(
        cls, kind: "SideKind", handles: list[int], starts: list[int], counts: list[int], widths: list[int], table: Rows
    ) -> Self:
        """Build from rows in the order of the parts, of which a part with a smaller width takes the first columns."""
        flat = [rows.ravel() for rows in table]
        widest = table[kind.is_wide.index(True)].shape[1]
        if min(widths) < widest:
            kept = np.arange(widest) < np.repeat(widths, counts)[:, None]
            flat = [rows[kept] if wide else rows.ravel() for rows, wide in zip(table, kind.is_wide, strict=True)]
        return cls._packed(kind, handles, starts, counts, widths, flat)

    @classmethod
    def _packed(
        cls, kind: "SideKind", handles: list[int], starts: list[int], counts: list[int], widths: list[int], flat: Rows
    ) -> Self:
        starts, counts, widths = (c[:1] if len(set(c)) == 1 else c for c in (starts, counts, widths))
        ints = [each.astype(np.int32, copy=False) for each in flat[: kind.num_ints]]
        return cls(kind.number, handles, starts, counts, widths, ints, flat[kind.num_ints :])

    def __len__(self) -> int:
        """Number of parts."""
        return len(self.handles)

    @property
    def spans(self) -> Iterator[tuple[int, int, int, int]]:
        """(handle, start, count, width) of each part."""
        columns = (column * len(self) if len(column) == 1 else column for column in self._numbers)
        return zip(self.handles, *columns, strict=True)

    @property
    def _arrays(self) -> Iterator[tuple[npt.NDArray[Any], bool]]:
        """The arrays, and whether each is wide."""
        return zip((*self.ints, *self.floats), SIDE_KINDS[self.kind].is_wide, strict=True)

    @property
    def _numbers(self) -> tuple[list[int], list[int], list[int]]:
        return self.starts, self.counts, self.widths

    def parts(self) -> Iterator[tuple[int, int, Rows]]:
        """Yield (handle, start, rows) of each part; the rows are views."""
        begins = [0] * (len(self.ints) + len(self.floats))
        arrays = list(self._arrays)
        for handle, start, count, width in self.spans:
            rows: Rows = []
            for at, (values, wide) in enumerate(arrays):
                end = begins[at] + (count * width if wide else count)
                rows.append(values[begins[at] : end].reshape(count, -1))
                begins[at] = end
            yield handle, start, rows

    def items(self) -> list[Any]:
        """Return the value of each row, of a kind of which a value is a list.

        Rows of one width are converted at once: a call for each part would cost five times as much.
        """
        kind = SIDE_KINDS[self.kind]
        if len(self.widths) == 1:
            width = self.widths[0]
            found: list[Any] = kind.value([array.reshape(-1, width if wide else 1) for array, wide in self._arrays])
            return found
        spans, by_width = list(self.spans), dict[int, Iterator[Any]]()
        for width in set(self.widths):
            own = self.first_rows([count if wide == width else 0 for _, _, count, wide in spans])
            by_width[width] = iter([] if own is None else own.items())
        return [next(by_width[width]) for _, _, count, width in spans for _ in range(count)]

    def first_rows(self, kept: list[int]) -> "SideRows | None":
        """Return the first rows of each part, as many as ``kept`` says; None if that is none at all."""
        spans = list(self.spans)
        counts = [count for _, _, count, _ in spans]
        if kept == counts:
            return self
        left = [(*span, num_kept) for span, num_kept in zip(spans, kept, strict=True) if num_kept]
        if not left:
            return None
        ends = np.repeat(np.cumsum(counts) - counts + kept, counts)
        rows = np.arange(len(ends)) < ends
        values = np.repeat(rows, np.repeat([width for *_, width in spans], counts))
        flat = [array[values if wide else rows] for array, wide in self._arrays]
        handles, starts, _, widths, new_counts = (list(column) for column in zip(*left, strict=True))
        return self._packed(SIDE_KINDS[self.kind], handles, starts, new_counts, widths, flat)

    def shape_error(self) -> str | None:
        """Return why the numbers do not describe the arrays, or None if they do."""
        kind, count = SIDE_KINDS.get(self.kind), len(self)
        if kind is None:
            return f"the kind must be one of {sorted(SIDE_KINDS)} (got {self.kind})"
        if not count or len(set(self.handles)) < count:
            return "no part" if not count else "a handle occurs twice"
        if any(len(column) not in (1, count) for column in self._numbers):
            return f"{count} parts have {', '.join(str(len(column)) for column in self._numbers)} numbers"
        starts, counts, widths = self._numbers
        if min(starts) < 0 or min(*counts, *widths) < 1 or max(*starts, *counts, *widths) >= 2**31:
            return "a start, count or width is out of range"
        all_counts, all_widths = (column * count if len(column) == 1 else column for column in (counts, widths))
        num_rows, num_values = sum(all_counts), sum(map(mul, all_counts, all_widths))
        expected = [num_values if wide else num_rows for wide in kind.is_wide]
        sizes = [*map(len, self.ints)], [*map(len, self.floats)]
        if sizes != (expected[: kind.num_ints], expected[kind.num_ints :]):
            return f"arrays of {sizes[0]} integers and {sizes[1]} numbers, expected sizes {expected}"
        return None


@dataclass(frozen=True, slots=True, eq=False)
class SideKind:
    """One kind of rows.

    Attributes:
        number: its number in messages.
        name: its name in errors.
        rows: to what its rows belong.
        field: the field of the client's ``Update`` that receives the rows.
        num_ints: number of its arrays of int32; the others are of float32.
        is_wide: of each array, whether its rows have the part's width; otherwise they have one value.
        width: returns the width of the rows of a request, or None if the request has not asked for them.
        value: converts rows to the value of ``field``; of sampled tokens, a list with an item for each.
        value_error: returns why values are invalid, for a vocabulary of this size, or None.
    """

    number: int
    name: str
    rows: RowsOf
    field: str
    num_ints: int
    is_wide: tuple[bool, ...]
    width: Callable[[SamplingParams, PoolingParams | None, ModelConfig], int | None]
    value: Callable[[Rows], Any]
    value_error: Callable[[SideRows, int], str | None] | None = None


def find_rows(side: list[SideRows], kind: SideKind) -> SideRows | None:
    """Return the rows of this kind in a message, or None."""
    return next((rows for rows in side if rows.kind == kind.number), None)


def _logprobs(rows: Rows) -> LogprobArrays:
    ids, ranks, values = rows
    return LogprobArrays(ids, values, ranks[:, 0])


def _token_id_error(rows: SideRows, vocab_size: int) -> str | None:
    highest = rows.ints[0].view(np.uint32).max()  # as unsigned, a negative id is a huge one
    if highest < vocab_size:
        return None
    return f"log probability of token id {highest.view(np.int32)}, but the vocabulary has {vocab_size} tokens"


def _logprob_error(rows: SideRows, vocab_size: int) -> str | None:
    values, ranks = rows.floats[0], rows.ints[1]
    valid = values <= HIGHEST_LOGPROB  # false for NaN
    if not valid.all():
        return f"a log probability must be at most 0 (got {values[~valid][0]:g})"
    valid = (ranks >= 1) & (ranks <= vocab_size)
    if not valid.all():
        return f"token rank must be between 1 and {vocab_size} (got {ranks[~valid][0]})"
    return _token_id_error(rows, vocab_size)


LOGPROBS = SideKind(
    1,
    "log probabilities",
    RowsOf.TOKENS,
    "logprobs",
    num_ints=2,  # the token itself and the most likely ones, and the rank of the token itself
    is_wide=(True, False, True),
    width=lambda sampling, _, model: None if (n := sampling.num_candidates) is None else 1 + min(n, model.vocab_size),
    value=lambda rows: _logprobs(rows).entries(MAX_CANDIDATES),
    value_error=_logprob_error,
)
PROMPT_LOGPROBS = SideKind(
    2,
    "prompt log probabilities",
    RowsOf.PROMPT,
    "prompt_logprobs",
    num_ints=2,
    is_wide=(True, False, True),
    width=lambda sampling, _, model: None if (n := sampling.prompt_logprobs) is None else 1 + min(n, model.vocab_size),
    value=_logprobs,
    # Values are not checked: a prompt's hidden states are known to be bad only when it samples, maybe in a later step.
    value_error=_token_id_error,
)
POOLED = SideKind(
    3,
    "pooled rows",
    RowsOf.POOLED,
    "pooled",
    num_ints=0,
    is_wide=(True,),
    width=lambda _, pooling, model: (
        None if pooling is None or model.pooling is None else model.pooling.width(pooling.task, pooling.dimensions)
    ),
    value=lambda rows: rows[0],
)
ROUTED_EXPERTS = SideKind(
    4,
    "routed experts",
    RowsOf.POSITIONS,
    "routed_experts",
    num_ints=1,
    is_wide=(True,),
    width=lambda sampling, _, model: (
        len(model.moe.layers) * model.moe.num_experts_per_token
        if sampling.return_routed_experts and model.moe is not None
        else None
    ),
    value=lambda rows: rows[0],
)
SIDE_KINDS = {kind.number: kind for kind in (LOGPROBS, PROMPT_LOGPROBS, POOLED, ROUTED_EXPERTS)}
