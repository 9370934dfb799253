"""Copies of a GPU's KV blocks to pinned memory and back, on streams beside that of the steps."""

from collections.abc import Callable, Mapping, Sequence

import torch

from quire.kernels.cache.block_copy import CacheSet
from quire.kernels.cache.block_staging import bytes_of_block, gather_blocks, scatter_blocks
from quire.kernels.cpu.pages.page_moves import Int64
from quire.protocol.model.kv_layout import KVLayout
from quire.worker_proc.batch.kv_cache import group_caches
from quire.worker_proc.transfers.pages import group_layout
from quire.worker_proc.transfers.state_parts import StateParts


class GpuBlocks:
    """The KV blocks of a GPU, as ``DeviceBlocks``. The steps run on the current stream of the thread of ``steps``."""

    def __init__(
        self,
        layout: KVLayout,
        caches: Mapping[int, torch.Tensor],
        num_blocks: int,
        meaning: Sequence[object],
        parts: StateParts | None = None,
    ) -> None:
        """Arguments as of ``block_groups`` and ``StagedMover``."""
        self._caches = [CacheSet.of(halves) for halves in group_caches(layout, caches, num_blocks)]
        self._device = self._caches[0].pointers.device
        self.num_blocks = num_blocks
        self.block_bytes: Sequence[int] = [bytes_of_block(caches) for caches in self._caches]
        self.layouts: Sequence[bytes] = [
            group_layout(layout, index, caches.caches[0].shape[2], meaning) for index, caches in enumerate(self._caches)
        ]
        if parts is not None:
            self._caches += [CacheSet.of([parts.memory], block_dim=0)] * len(parts.layouts)
            self.block_bytes = list(map(bytes_of_block, self._caches))
            self.layouts = [*self.layouts, *parts.layouts]

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def steps(self) -> Callable[[], None]:
        # A block may still be written, or read, by a step that is launched but has not run. Blocking: the thread that
        # waits gives its core to the one that launches steps.
        launched = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        launched.record(torch.cuda.current_stream(self._device))
        return launched.synchronize

    def copier(self, num_bytes: int) -> "GpuCopier":
        return GpuCopier(self._caches, num_bytes)


class GpuCopier:
    """Copies blocks through a buffer on the GPU, where one kernel gathers the parts of all layers.

    Owns that buffer and a stream. The host waits for each copy, so that nothing on the GPU depends on the order of
    streams, and memory is in use only during a call.
    """

    def __init__(self, caches: Sequence[CacheSet], num_bytes: int) -> None:
        """Also compiles the kernels, in the caller's thread."""
        device = caches[0].pointers.device
        self._caches, self._device = caches, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        most = num_bytes // min(map(bytes_of_block, caches))
        self._ids = torch.full((most,), -1, dtype=torch.int64, pin_memory=True)
        self._sent = torch.full((most,), -1, dtype=torch.int64, device=device)
        for each in caches:
            line = self._buffer[: bytes_of_block(each)].view(1, -1)
            gather_blocks(each, self._sent[:1], line)
            scatter_blocks(each, self._sent[:1], line)

    def store(self, group: int, block_ids: Int64, lines: torch.Tensor) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            buffer = self._buffer[: lines.nbytes].view(lines.shape)
            gather_blocks(self._caches[group], self._send(block_ids), buffer)
            lines.copy_(buffer, non_blocking=True)
            self._copied.record(self._stream)
        self._copied.synchronize()

    def load(self, group: int, block_ids: Int64, lines: torch.Tensor) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            buffer = self._buffer[: lines.nbytes].view(lines.shape)
            buffer.copy_(lines, non_blocking=True)
            scatter_blocks(self._caches[group], self._send(block_ids), buffer)
            self._copied.record(self._stream)
        self._copied.synchronize()

    def _send(self, block_ids: Int64) -> torch.Tensor:
        ids, sent = self._ids[: len(block_ids)], self._sent[: len(block_ids)]
        ids.copy_(torch.from_numpy(block_ids))
        sent.copy_(ids, non_blocking=True)
        return sent
