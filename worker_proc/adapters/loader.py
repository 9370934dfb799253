"""Loads adapters from their folders into slots, in a thread beside the steps."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from quire.protocol.model.adapter import read_adapter
from quire.protocol.model.adapter_config import AdapterError
from quire.protocol.model.model_config import ModelConfig
from quire.protocol.wire.adapter_messages import AdapterLoaded, LoadAdapter
from quire.worker_proc.adapters.packed import PackedAdapter, pack_adapter
from quire.worker_proc.adapters.slots import SlotMemory
from quire.worker_proc.batch.input_batch import StepRefused
from quire.worker_proc.side_work import SideThread


class _Load(NamedTuple):
    """``left``: slots that are emptied first. ``held``: copies in host memory by number, which the thread changes."""

    message: LoadAdapter
    left: Sequence[int]
    held: dict[int, PackedAdapter]


class AdapterLoader:
    """Owns the copies in host memory, and the thread that reads, packs and copies them. A load that fails is answered
    with the reason, and the worker continues.
    """

    def __init__(self, slots: SlotMemory, model: ModelConfig, wake: Callable[[], None]) -> None:
        """``wake``: called in the thread whenever ``take_answers`` has more to return."""
        self._slots, self._model = slots, model
        self._thread = SideThread("adapter loader", self._load, wake)
        self._held: dict[int, PackedAdapter] = {}
        self.close = self._thread.close

    @property
    def handlers(self) -> Mapping[type, Callable[[LoadAdapter], None]]:
        return {LoadAdapter: self.submit}

    def begin_worker_epoch(self) -> None:
        """Drop all adapters, and the loads that the previous scheduler has sent."""
        self._thread.begin_worker_epoch()
        self._held = {}  # a load of the previous one may still change the old one
        self._slots.clear()

    def submit(self, message: LoadAdapter) -> None:
        """Queue a load, and empty its slot and those of the dropped adapters.

        Raises:
            StepRefused: the slot does not exist, or the number is not positive.
        """
        number_of_slots = self._slots.sites.num_slots
        if not 0 <= message.slot < number_of_slots or message.number < 1:
            raise StepRefused(
                f"LoadAdapter of adapter {message.number} into slot {message.slot}: numbers start at 1, and slots are "
                f"0 to {number_of_slots - 1}"
            )
        left = [self._slots.slot_of[each] for each in (*message.dropped, message.number) if each in self._slots.slot_of]
        for slot in (*left, message.slot):
            self._slots.vacate(slot)
        self._thread.submit(_Load(message, left, self._held))

    def take_answers(self) -> list[AdapterLoaded]:
        """Return the answers of the loads that have ended since the last call; steps may use what was loaded."""
        answers = self._thread.take_answers()
        for answer in answers:
            if not answer.problem:
                self._slots.occupy(answer.slot, answer.number)
        return answers

    # ---- the thread

    def _load(self, load: _Load) -> AdapterLoaded:
        began, (message, left, held) = time.perf_counter(), load
        number = message.number
        for each in message.dropped:
            held.pop(each, None)
        was_cached = number in held
        try:
            for slot in left:
                self._slots.fill(slot, None)
            packed = held.get(number) or self._read(message)
            self._slots.fill(message.slot, packed)
        except Exception as error:  # an answer in any case: requests wait for it
            problem = " ".join(str(error).split()) or type(error).__name__
            return AdapterLoaded(number, message.slot, problem, seconds=time.perf_counter() - began)
        held[number] = packed
        size, seconds = len(packed.memory), time.perf_counter() - began
        return AdapterLoaded(number, message.slot, "", size, seconds, was_cached)

    def _read(self, message: LoadAdapter) -> PackedAdapter:
        adapter = read_adapter(Path(message.path), self._model, self._slots.sites.max_rank)
        if adapter.digest != message.digest:
            raise AdapterError(f"{message.path}: its content has changed since it was requested: load it again")
        return pack_adapter(adapter, self._slots.sites)
