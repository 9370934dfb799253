"""Recorded plans: the native calls of one pass through a model, which run again in one call, without Python.

A CPU's counterpart of a CUDA graph. While a plan is recorded, launchers take the memory of their outputs from the
recording (``empty``), which keeps it in place for as long as the plan lives.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels.cpu.native.library import Native

ALIGNMENT = 64
MOST_NAMES = 16
"""Kinds of operations in a profile."""

Result = TypeVar("Result")


class NotRecordable(Exception):
    """The pass calls something besides the native library; the message names it."""


class Arena:
    """Memory of a plan's tensors. What a tensor leaves is used again, as it will be in each run of the plan."""

    def __init__(self) -> None:
        self._blocks: list[npt.NDArray[np.uint8]] = []
        self._free: list[tuple[int, int]] = []  # bytes and index of the blocks that no tensor uses

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = max(1, int(np.prod(shape)) * dtype.itemsize)
        fitting = [entry for entry in self._free if entry[0] >= size]
        if fitting:
            entry = min(fitting)
            self._free.remove(entry)
        else:
            held = np.empty(size + ALIGNMENT, np.uint8)
            start = -held.ctypes.data % ALIGNMENT
            self._blocks.append(held[start : start + size])
            entry = (size, len(self._blocks) - 1)
        view = self._blocks[entry[1]][:size]
        weakref.finalize(view, self._free.append, entry)  # the tensor's storage keeps the view
        return torch.from_numpy(view).view(dtype)[: size // dtype.itemsize].view(tuple(shape))


_arena: Arena | None = None
"""Memory of the plan that is being recorded; the library also records one plan at a time in a thread."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate the output of a native call, in the plan's memory while one is recorded."""
    return torch.empty(shape, dtype=dtype) if _arena is None else _arena.empty(shape, dtype)


class _OnlyViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses torch operators, which a plan would not run again, except those that only make views."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            raise NotRecordable(f"torch operator {func}")
        return func(*args, **(kwargs or {}))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here. By default torch imports its compiler for the first operator, for two seconds."""
        return False


class RecordedPlan:
    """Native calls that run again on the same memory."""

    def __init__(self, native: Native, handle: int, arena: Arena, keep: Any) -> None:
        pointer = ctypes.c_void_p
        self._run: Callable[[int], int] = native.function("quire_plan_run", pointer, returns=ctypes.c_int64)
        self._profile: Callable[..., int] = native.function(
            "quire_plan_profile", pointer, pointer, pointer, ctypes.c_int64, returns=ctypes.c_int64
        )
        self._handle, self._arena, self._keep = handle, arena, keep
        weakref.finalize(self, native.function("quire_plan_free", pointer), handle)

    def run(self) -> int:
        """Run the calls; return the first error code of a call, or 0."""
        return self._run(self._handle)

    def profile(self) -> dict[str, float]:
        """Run each operation alone; return the seconds of all operations of each name."""
        names, seconds = (ctypes.c_char_p * MOST_NAMES)(), (ctypes.c_double * MOST_NAMES)()
        count = self._profile(self._handle, names, seconds, MOST_NAMES)
        return {(names[i] or b"").decode(): seconds[i] for i in range(count)}


def record(native: Native, body: Callable[[], Result], keep: Any = None) -> tuple[RecordedPlan, Result]:
    """Run ``body``, and return its native calls as a plan, with its result, whose memory belongs to the plan.

    Args:
        keep: what must live as long as the plan: the owners of memory that the calls read or write.

    Raises:
        NotRecordable: ``body`` also calls torch operators that compute something.
    """
    global _arena
    arena = _arena = Arena()
    native.function("quire_plan_begin")()
    try:
        with _OnlyViews():  # type: ignore[no-untyped-call]
            result = body()
    finally:
        _arena = None
        handle = native.function("quire_plan_end", returns=ctypes.c_void_p)()
    if handle is None:
        raise NotRecordable("a native call that is not an operation")
    return RecordedPlan(native, handle, arena, keep), result
