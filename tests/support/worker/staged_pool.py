"""A mover of KV blocks that goes through staging memory, as on a GPU, for KV caches on a CPU."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from host_pages import Pool

from quire.kernels.cache.block_copy import CacheSet
from quire.kernels.cache.block_staging import bytes_of_block, gather_blocks_reference, scatter_blocks_reference
from quire.kernels.cpu.pages.page_moves import Int64
from quire.worker_proc.batch.kv_cache import group_caches
from quire.worker_proc.transfers.staged import StagedMover
from quire.worker_proc.transfers.state_parts import StateParts


class SlowDevice:
    """A device whose steps end with ``end_steps``, and whose copies are noted.

    Attributes:
        events: ``step N`` when step N has ended, ``store`` and ``load`` with the blocks of a copy when it begins.
        error: raised by the next copies.
    """

    def __init__(self, pool: Pool, parts: StateParts | None = None) -> None:
        caches = group_caches(pool.layout, pool.caches, pool.num_blocks)
        self._caches = [CacheSet.of(halves) for halves in caches]
        of_parts = [] if parts is None else parts.layouts
        self._caches += [CacheSet.of([parts.memory], block_dim=0) for _ in of_parts if parts is not None]
        self.num_blocks = pool.num_blocks
        self.block_bytes: Sequence[int] = [bytes_of_block(caches) for caches in self._caches]
        self.layouts: Sequence[bytes] = [*(group.layout for group in pool.groups), *of_parts]
        self.events: list[object] = []
        self.error: Exception | None = None
        self.waiting = threading.Semaphore(0)
        self._launched = 0
        self._ended = threading.Condition()
        self._num_ended = 0

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8)

    def launch_step(self) -> None:
        self._launched += 1

    def end_steps(self) -> None:
        with self._ended:
            self._num_ended = self._launched
            self.events.append(f"step {self._launched}")
            self._ended.notify_all()

    def steps(self) -> Callable[[], None]:
        launched = self._launched

        def wait() -> None:
            with self._ended:
                if self._num_ended < launched:
                    self.waiting.release()
                    assert self._ended.wait_for(lambda: self._num_ended >= launched, 30)

        return wait

    def copier(self, num_bytes: int) -> "_Copier":
        return _Copier(self, self._caches, num_bytes)


class _Copier:
    def __init__(self, device: SlowDevice, caches: Sequence[CacheSet], num_bytes: int) -> None:
        self._device, self._caches, self._num_bytes = device, caches, num_bytes

    def store(self, group: int, block_ids: Int64, lines: torch.Tensor) -> None:
        self._note("store", block_ids, lines)
        gather_blocks_reference(self._caches[group], torch.from_numpy(block_ids), lines)

    def load(self, group: int, block_ids: Int64, lines: torch.Tensor) -> None:
        self._note("load", block_ids, lines)
        scatter_blocks_reference(self._caches[group], torch.from_numpy(block_ids), lines)

    def _note(self, kind: str, block_ids: Int64, lines: torch.Tensor) -> None:
        assert lines.nbytes <= self._num_bytes and len(lines) == len(block_ids)
        self._device.events.append((kind, block_ids.tolist()))
        if self._device.error is not None:
            raise self._device.error


@dataclass
class StagedPool(Pool):
    """A pool whose blocks are copied through staging memory."""

    with_disk: bool = False
    device: SlowDevice = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.device = SlowDevice(self)
        self.mover = StagedMover(  # type: ignore[assignment]
            self.native, self.device, self.watcher.wake, with_disk=self.with_disk
        )
