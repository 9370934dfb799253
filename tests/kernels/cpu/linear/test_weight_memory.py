"""Memory of packed weights: aligned, beside each other, and freed."""

from pathlib import Path

import pytest
import torch

from quire.kernels.cpu.linear import weight_memory
from quire.kernels.cpu.linear.weight_memory import ALIGNMENT, HUGE_PAGE, allocate, allocate_alone

CHUNK = 32 << 20


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_memory, "CHUNK", CHUNK)
    monkeypatch.setattr(weight_memory, "_rest", torch.empty(0, dtype=torch.uint8))


def test_allocations_are_aligned_and_do_not_overlap() -> None:
    found = [allocate(size) for size in (1, 64, 100, 3 << 20, CHUNK + 1, 5)]
    for value, memory in enumerate(found):
        assert memory.data_ptr() % ALIGNMENT == 0
        memory.fill_(value)
    assert all(bool((memory == value).all()) for value, memory in enumerate(found))
    assert [len(memory) for memory in found] == [1, 64, 100, 3 << 20, CHUNK + 1, 5]


def test_untouched_memory_is_not_resident() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    size = CHUNK + 1
    held = [allocate(size)]
    before = resident()
    held += [allocate(size) for _ in range(3)]
    assert resident() - before < size // 4
    held[0].fill_(1)
    assert resident() - before > size * 3 // 4
    del held
    assert resident() - before < size // 4


def test_memory_of_its_own_is_freed_alone() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    size = 8 * HUGE_PAGE
    with torch.inference_mode():
        held = [allocate_alone(size) for _ in range(3)]
    before = resident()
    for memory in held:
        assert len(memory) == size and memory.data_ptr() % HUGE_PAGE == 0
        memory.fill_(1)
    assert resident() - before > 2 * size
    del held[1], memory
    assert resident() - before < 2 * size + size // 2
    assert bool((held[0] == 1).all() and (held[1] == 1).all())
    assert len(allocate_alone(100)) == 100


def test_chunk_that_begins_in_inference_mode_can_be_written_to_outside_it() -> None:
    with torch.inference_mode():
        inside = allocate(2 * CHUNK)
    outside = allocate(64)
    inside.zero_()
    outside.zero_()
    assert not inside.is_inference()
