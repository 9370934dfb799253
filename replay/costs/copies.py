"""The duration of copies of KV blocks to host memory and disk, and back."""

import heapq
from dataclasses import dataclass, field

from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.transfer_messages import BlocksMoved, MoveBlocks, MoveKind
from quire.replay.costs.cost import CostModel
from quire.replay.costs.roofline import ModelOnChips

PAGE_HEADER, PAGE_ALIGNMENT = 256, 4096
"""Bytes; as in worker_proc/transfers, which a test compares."""
DEFAULT_HOST_BANDWIDTH = 25e9
"""Bytes per second of a chip that no cost model names: 80 % of a PCIe 4 slot with 16 lanes."""


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Bytes per second. The two directions do not slow each other down.

    Attributes:
        host: between host memory and each rank's device, one way.
        disk_read, disk_write: of the disk, which all ranks share: data sheets of NVMe drives with PCIe 4.
        host_seconds, disk_seconds: fixed part of a transfer: a few descriptors of about 4 us each, and the latency of a
            read.
    """

    host: float = DEFAULT_HOST_BANDWIDTH
    disk_read: float = 6.5e9
    disk_write: float = 4e9
    host_seconds: float = 2e-5
    disk_seconds: float = 1e-4


@dataclass(frozen=True, slots=True)
class Tiers:
    """The pages behind a simulated pool.

    Attributes:
        num_host_pages, num_disk_pages: with page 0 of each; 0 without the tier.
        page_bytes: of one rank.
    """

    num_host_pages: int = 0
    page_bytes: int = 0
    rates: CopyRates = field(default_factory=CopyRates)
    num_disk_pages: int = 0
    num_ranks: int = 1


NO_TIERS = Tiers()


def copy_rates(cost: CostModel | None) -> CopyRates:
    """Return the rates, with that of the cost model's chip to host memory if it names one."""
    return CopyRates(cost.host_bandwidth) if isinstance(cost, ModelOnChips) else CopyRates()


def page_bytes(layout: KVLayout, num_ranks: int) -> int:
    """Return the bytes of a page of one rank as workers make it: a header and a block of any group."""
    ranked = layout.of_rank(num_ranks)
    return -(-(PAGE_HEADER + ranked.block_bytes) // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


class CopyClock:
    """Decides when the transfers of a simulated worker end.

    Each tier has a queue for each direction, so that loads never wait for stores. A store begins when the steps that
    were sent before it have run. The parts of a load from two tiers are copied side by side. All ranks copy at the same
    time, and share the disk.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._free = {(tier, is_load): 0.0 for tier in ("host", "disk") for is_load in (False, True)}
        """When each queue is free."""
        self._ends: list[tuple[float, int, BlocksMoved]] = []

    @property
    def next_end(self) -> float:
        """When the next transfer ends; infinite if none is in flight."""
        return self._ends[0][0] if self._ends else float("inf")

    def send(self, move: MoveBlocks, now: float, steps_end: float) -> float:
        """Queue a transfer and return when it ends. ``steps_end``: when the steps that were sent before it have run."""
        begin = end = max(now, steps_end) if move.kind is MoveKind.STORE else now
        seconds = self._seconds(move)
        for tier, duration in seconds.items():
            queue = tier, move.is_load
            self._free[queue] = max(begin, self._free[queue]) + duration
            end = max(end, self._free[queue])
        answer = BlocksMoved(move.transfer, [], sum(seconds.values()), disk_seconds=seconds.get("disk", 0.0))
        heapq.heappush(self._ends, (end, move.transfer, answer))
        return end

    def take(self, now: float) -> BlocksMoved | None:
        """Return the next transfer that has ended by ``now``, or None."""
        return heapq.heappop(self._ends)[2] if self.next_end <= now else None

    def _seconds(self, move: MoveBlocks) -> dict[str, float]:
        """Return the duration of the part of each tier."""
        tiers, rates = self._tiers, self._tiers.rates
        num_disk = int((move.page_ids >= tiers.num_host_pages).sum())
        num_host = len(move.page_ids) - num_disk
        seconds = {}
        if num_host:
            seconds["host"] = num_host * tiers.page_bytes / rates.host + rates.host_seconds
        if num_disk:
            rate = rates.disk_read if move.is_load else rates.disk_write
            seconds["disk"] = num_disk * tiers.page_bytes * tiers.num_ranks / rate + rates.disk_seconds
        return seconds
