"""The adapters on the device, and those that the tokens of a step use."""

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.lora.lora import NO_SLOT
from quire.protocol.model.adapter_config import AdapterError
from quire.worker_proc.adapters.packed import PackedAdapter
from quire.worker_proc.adapters.rows import RowAdapters
from quire.worker_proc.adapters.sites import AdapterSites
from quire.worker_proc.device.transfer import Transfer


class SlotMemory:
    """Owns the memory of the slots, and which adapter is in each.

    On a CPU a slot has pointers to the adapter's copy in host memory. On a GPU it has memory of its own: for an adapter
    of the highest rank that changes every projection but those of experts, or for what takes as much.

    Attributes:
        slot_of: as of the rows.
    """

    def __init__(self, sites: AdapterSites, transfer: Transfer, rows: RowAdapters) -> None:
        self.sites = sites
        self._transfer, self._rows = transfer, rows
        self.slot_of = rows.slot_of
        self._memory: torch.Tensor | None = None
        if sites.device.type == "cuda":
            shape = (sites.num_slots, sites.slot_bytes)
            self._memory = torch.empty(shape, dtype=torch.uint8, device=sites.device)
            self._stream = torch.cuda.Stream(sites.device)  # type: ignore[no-untyped-call]
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def fill(self, slot: int, adapter: PackedAdapter | None) -> None:
        """Put an adapter, or none, into a slot that no step uses; returns when it is on the device.

        The loader's thread calls it, beside steps that use other slots.

        Raises:
            AdapterError: the adapter is larger than a slot.
        """
        if self._memory is None:
            self.sites.set_slot(slot, {} if adapter is None else adapter.parts(adapter.memory))
            return
        own = self._memory[slot]
        if adapter is not None and len(adapter.memory) > len(own):
            raise AdapterError(
                f"the adapter has {len(adapter.memory)} bytes, a slot of the device {len(own)}: raise --max-lora-rank"
            )
        with torch.cuda.device(self.sites.device), torch.cuda.stream(self._stream):
            if adapter is not None:
                own[: len(adapter.memory)].copy_(adapter.memory, non_blocking=True)
            self.sites.set_slot(slot, {} if adapter is None else adapter.parts(own))
            self._copied.record(self._stream)
        self._copied.synchronize()

    def occupy(self, slot: int, number: int) -> None:
        """Let steps use an adapter, which fills the slot."""
        self.vacate(slot)
        self.slot_of[number] = slot

    def vacate(self, slot: int) -> None:
        """Refuse steps that use the adapter in this slot, if there is one."""
        for number in [number for number, own in self.slot_of.items() if own == slot]:
            del self.slot_of[number]

    def clear(self) -> None:
        """Refuse steps that use any adapter."""
        self.slot_of.clear()

    def begin_step(self, rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int32] | int) -> None:
        """Set the slots of a step's tokens, ``counts`` tokens of each of ``rows``, with the step's one copy.

        Raises:
            StepRefused: the adapter of a row is in no slot. ``DiffCheck`` finds that first, unless a load has taken the
                slot since the row's last change.
        """
        numbers = self._rows.numbers[rows]
        if not numbers.any():
            self.sites.begin_step(None)
            return
        # In Python only once per adapter: steady steps have many rows and few adapters.
        used, index = np.unique(numbers, return_inverse=True)
        found = {0: NO_SLOT, **self.slot_of}
        for number in used.tolist():
            self._rows.require_slot(int(rows[numbers == number][0]))
        slots = np.array([found[number] for number in used.tolist()], np.int32)[index]
        self.sites.begin_step(slots)
        of_tokens, sorted_rows = np.repeat(slots, counts), self.sites.rows
        if not np.array_equal(of_tokens, sorted_rows.slots):
            (sent,) = self._transfer(sorted_rows.sort(of_tokens))
            self._transfer.then(lambda: sorted_rows.store(of_tokens, sent))
