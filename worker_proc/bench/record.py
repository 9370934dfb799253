"""What a section is given, and the rows that it leaves."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch

from quire.protocol.model.model_config import ModelConfig
from quire.worker_proc.bench.paged_case import PagedCase
from quire.worker_proc.bench.timing import Call, Clock

Size = Literal["full", "quick", "dry"]
T = TypeVar("T")
Rivals = dict[str, Callable[[PagedCase], list[Call]]]


class OutOfTime(Exception):
    """The time limit is reached: what was measured so far stands."""


@dataclass(slots=True)
class Row:
    """One figure.

    Attributes:
        case: what was computed.
        way: by whom; the first way of a section is ours.
        us: microseconds of one call; None: it failed, and ``error`` says how.
        figures: what follows from the time, and whatever else was found.
    """

    case: str
    way: str
    us: float | None = None
    figures: dict[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the device did in this run, at its best.

    Attributes:
        read: bytes per second of a reduction over memory that nothing is written to.
        copy: bytes per second read and written, together.
        matmul: floating point operations per second of a large product, by dtype.
    """

    read: float
    copy: float
    matmul: Mapping[torch.dtype, float]


@dataclass(slots=True)
class Bench:
    """One section's surroundings; ``rows`` is what it found."""

    device: torch.device
    clock: Clock
    size: Size
    models: Mapping[str, ModelConfig]
    limits: Limits
    deadline: float
    rivals: Rivals = field(default_factory=dict)
    """Attention of other libraries, by the name of its column."""
    rows: list[Row] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and caches on a GPU; Triton's interpreter computes bfloat16 wrongly."""
        return torch.float32 if self.size == "dry" else torch.bfloat16

    def require_time(self) -> None:
        """Raises OutOfTime."""
        if time.monotonic() > self.deadline:
            raise OutOfTime

    def pick(self, *, full: T, quick: T, dry: T) -> T:
        return full if self.size == "full" else quick if self.size == "quick" else dry

    def measure(
        self,
        case: str,
        way: str,
        make: Callable[[], Sequence[Call]],
        *,
        read: int = 0,
        moved: int = 0,
        flops: float = 0,
        dtype: torch.dtype | None = None,
        graph: bool = True,
    ) -> Row:
        """Time what ``make`` returns. A failure is a row too: it does not end the section.

        Args:
            read: bytes that must be read, to be compared with the limit of reading.
            moved: bytes read and written, to be compared with the limit of copying.
            flops: operations, to be compared with the matrix product's rate in ``dtype``.

        Raises:
            OutOfTime: nothing was measured any more.
        """
        self.require_time()
        row = Row(case, way)
        self.rows.append(row)
        try:
            seconds = self.clock.seconds(make(), graph=graph)
        except Exception as error:
            row.error = describe(error)
            return row
        row.us = seconds * 1e6
        if read:
            row.figures |= {"gb_per_s": read / seconds / 1e9, "of_read": read / seconds / self.limits.read}
        if moved:
            row.figures |= {"gb_per_s": moved / seconds / 1e9, "of_copy": moved / seconds / self.limits.copy}
        if flops:
            row.figures["tflop_per_s"] = flops / seconds / 1e12
            if dtype is not None and dtype in self.limits.matmul:
                row.figures["of_matmul"] = flops / seconds / self.limits.matmul[dtype]
        return row

    def note(self, case: str, way: str, seconds: float | None, **figures: float) -> None:
        """A row whose time was taken otherwise."""
        self.rows.append(Row(case, way, None if seconds is None else seconds * 1e6, figures))


def describe(error: BaseException) -> str:
    """In one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def free_memory(device: torch.device) -> None:
    """Give what is not referenced any more back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
