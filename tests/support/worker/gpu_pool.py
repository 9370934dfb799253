"""KV caches on a GPU, or on a CPU in Triton's interpreter, with a mover that goes through pinned memory."""

from dataclasses import dataclass, field

import torch
from host_pages import Pool

from quire.worker_proc.attention.cpu import CpuBackend
from quire.worker_proc.batch.kv_cache import allocate_kv_caches, group_caches
from quire.worker_proc.transfers.gpu import GpuBlocks
from quire.worker_proc.transfers.staged import StagedMover


@dataclass
class GpuPool(Pool):
    """A pool on a device. ``caches`` and ``groups`` are in memory of the host, and only filled."""

    place: torch.device = field(default_factory=lambda: torch.device("cuda", 0))

    def __post_init__(self) -> None:
        self.on_device = allocate_kv_caches(self.layout, self.num_blocks, CpuBackend(native=False), self.place)
        super().__post_init__()
        blocks = GpuBlocks(self.layout, self.on_device, self.num_blocks, self.meaning)
        self.mover = StagedMover(self.native, blocks, self.watcher.wake)  # type: ignore[assignment]

    def fill(self, seed: int) -> None:
        super().fill(seed)
        for layer, cache in self.on_device.items():
            cache.view(torch.uint8).copy_(self.caches[layer].view(torch.uint8))

    def block(self, block: int, group: int = 0) -> bytes:
        halves = group_caches(self.layout, self.on_device, self.num_blocks)[group]
        return b"".join(half[:, block].cpu().numpy().tobytes() for half in halves)
