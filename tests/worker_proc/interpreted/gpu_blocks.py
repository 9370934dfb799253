"""Blocks in the GPU's own path to pages and back, with its kernel in Triton's interpreter; run by test_gpu_blocks.py.

Streams and events do nothing here: the interpreter computes at once.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_moves import round_trip
from gpu_pool import GpuPool
from host_pages import LAYOUTS, Pool

from quire.kernels.cpu.native.library import load_native
from quire.protocol.model.kv_layout import KVLayout
from quire.worker_proc.transfers import staging

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(staging, "BUFFER_BYTES", 5000)
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    for name, fake in {
        "Stream": lambda device: None,
        "Event": lambda blocking: event,
        "stream": lambda stream: nullcontext(),
        "device": lambda device: nullcontext(),
        "current_stream": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for name in ("empty", "full"):
        make = getattr(torch, name)

        def unpinned(*args: Any, make: Any = make, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            made: torch.Tensor = make(*args, **kwargs)
            return made

        monkeypatch.setattr(torch, name, unpinned)
    yield


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_round_trip(layout: KVLayout) -> None:
    native = load_native()
    round_trip(GpuPool(layout, native, place=CPU), GpuPool(layout, native, place=CPU), 9)


def test_pages_are_those_of_a_cpu() -> None:
    native, layout = load_native(), LAYOUTS["gemma"]
    round_trip(GpuPool(layout, native, place=CPU), Pool(layout, native), 9)
    round_trip(Pool(layout, native), GpuPool(layout, native, place=CPU), 9)
