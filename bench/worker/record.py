"""The arguments of a benchmark section, and the rows of its result."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch

from quire.bench.worker.paged_case import PagedCase
from quire.bench.worker.timing import Call, CallTimer
from quire.protocol.model.model_config import ModelConfig

Size = Literal["full", "quick", "dry"]
T = TypeVar("T")
Rivals = dict[str, Callable[[PagedCase], list[Call]]]


class OutOfTime(Exception):
    """The time limit is reached; results so far are kept."""


@dataclass(slots=True)
class CaseResult:
    """The result of one implementation in one case.

    Attributes:
        case: the computation and its shapes.
        implementation: name of the implementation; a section's first is Quire's.
        us: microseconds of one call, or None if it failed (see ``error``).
        figures: derived and further results, by name.
    """

    case: str
    implementation: str
    us: float | None = None
    figures: dict[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """The device's best measured rates in this run.

    Attributes:
        read: bytes per second of a reduction, which only reads memory.
        copy: bytes per second read and written, together.
        matmul: floating point operations per second of a large product, by dtype.
    """

    read: float
    copy: float
    matmul: Mapping[torch.dtype, float]


@dataclass(slots=True)
class Bench:
    """Arguments and helpers of one section; ``rows`` collects its results."""

    device: torch.device
    clock: CallTimer
    size: Size
    models: Mapping[str, ModelConfig]
    limits: Limits
    deadline: float
    rivals: Rivals = field(default_factory=dict)
    """Attention of other libraries, by column name."""
    rows: list[CaseResult] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and KV caches on a GPU. Dry runs use float32: Triton's interpreter miscomputes bfloat16."""
        return torch.float32 if self.size == "dry" else torch.bfloat16

    def require_time(self) -> None:
        """Raise OutOfTime after the deadline."""
        if time.monotonic() > self.deadline:
            raise OutOfTime

    def pick(self, *, full: T, quick: T, dry: T) -> T:
        return full if self.size == "full" else quick if self.size == "quick" else dry

    def measure(
        self,
        case: str,
        implementation: str,
        make: Callable[[], Sequence[Call]],
        *,
        read: int = 0,
        moved: int = 0,
        flops: float = 0,
        dtype: torch.dtype | None = None,
        graph: bool = True,
    ) -> CaseResult:
        """Time the calls that ``make`` returns, and append a row. A failure gives a row with an error.

        Args:
            read: bytes read, to compare with the read limit.
            moved: bytes read and written, to compare with the copy limit.
            flops: floating point operations, to compare with the matrix rate in ``dtype``.

        Raises:
            OutOfTime: the deadline has passed; no row is added.
        """
        self.require_time()
        row = CaseResult(case, implementation)
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

    def compare(self, case: str, implementations: Sequence[str], calls: Sequence[Call]) -> None:
        """Time one call of each implementation in turn; append a row each, with the first's share of the others' time.

        Raises:
            OutOfTime: the deadline has passed; no row is added.
        """
        self.require_time()
        times = self.clock.alternating(calls)
        others = zip(implementations[1:], times[1:], strict=True)
        figures = {f"of_{name}".replace(" ", "_"): times[0] / seconds for name, seconds in others}
        for name, seconds in zip(implementations, times, strict=True):
            self.note(case, name, seconds, **figures)
            figures = {}

    def note(self, case: str, implementation: str, seconds: float | None, **figures: float) -> None:
        """Append a row with a time that the caller measured."""
        self.rows.append(CaseResult(case, implementation, None if seconds is None else seconds * 1e6, figures))


def describe(error: BaseException) -> str:
    """Format an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def free_memory(device: torch.device) -> None:
    """Free unreferenced memory of the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
