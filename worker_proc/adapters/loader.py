"""Loads adapters from their folders into slots, in a thread beside the steps."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread

import torch

from quire.protocol.model.adapter import read_adapter
from quire.protocol.model.adapter_config import AdapterError
from quire.protocol.model.model_config import ModelConfig
from quire.protocol.wire.adapter_messages import AdapterLoaded, LoadAdapter
from quire.worker_proc.adapters.packed import PackedAdapter, pack_adapter
from quire.worker_proc.adapters.slots import SlotMemory
from quire.worker_proc.batch.input_batch import StepRefused
from quire.worker_proc.side_work import Answers

CLOSE_SECONDS = 5.0
"""Wait for the load that is running when the worker ends."""


class AdapterLoader:
    """Owns the copies in host memory, and the thread that reads, packs and copies them, which starts with the first
    load. A load that fails is answered with the reason, and the worker continues.
    """

    def __init__(self, slots: SlotMemory, model: ModelConfig, wake: Callable[[], None]) -> None:
        """
        Args:
            wake: called in the thread whenever ``take_answers`` has more to return.
        """
        self._slots, self._model = slots, model
        self._queue: SimpleQueue[tuple[int, LoadAdapter, Sequence[int]] | None] = SimpleQueue()
        self._thread: Thread | None = None
        # The lock guards everything below.
        self._lock = Lock()
        self._epoch = 0
        self._held: dict[int, PackedAdapter] = {}
        self._answers = Answers[AdapterLoaded](wake)

    @property
    def handlers(self) -> Mapping[type, Callable[[LoadAdapter], None]]:
        return {LoadAdapter: self.submit}

    def begin_worker_epoch(self) -> None:
        """Drop all adapters, and the loads that the previous scheduler has sent."""
        with self._lock:
            self._epoch += 1
            self._held = {}
            self._answers.clear()
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
        if self._thread is None:
            self._thread = Thread(target=self._run, name="adapter loader", daemon=True)
            self._thread.start()
        self._queue.put((self._epoch, message, left))

    def take_answers(self) -> list[AdapterLoaded]:
        """Return the answers of the loads that have ended since the last call; steps may use what was loaded."""
        answers = self._answers.take()
        for answer in answers:
            if not answer.problem:
                self._slots.occupy(answer.slot, answer.number)
        return answers

    def close(self) -> None:
        self.begin_worker_epoch()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    # ---- the thread

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            epoch, message, left = job
            if epoch != self._epoch:
                continue
            with torch.inference_mode():
                answer = self._load(epoch, message, left)
            with self._lock:
                if epoch == self._epoch:
                    self._answers.add(answer)

    def _load(self, epoch: int, message: LoadAdapter, left: Sequence[int]) -> AdapterLoaded:
        began, number = time.perf_counter(), message.number
        with self._lock:
            for each in message.dropped:
                self._held.pop(each, None)
            held = self._held.get(number)
        try:
            for slot in left:
                self._slots.fill(slot, None)
            packed = self._read(message) if held is None else held
            self._slots.fill(message.slot, packed)
        except Exception as error:  # an answer in any case: requests wait for it
            problem = " ".join(str(error).split()) or type(error).__name__
            return AdapterLoaded(number, message.slot, problem, seconds=time.perf_counter() - began)
        with self._lock:
            if epoch == self._epoch:
                self._held[number] = packed
        size, seconds = len(packed.memory), time.perf_counter() - began
        return AdapterLoaded(number, message.slot, "", size, seconds, held is not None)

    def _read(self, message: LoadAdapter) -> PackedAdapter:
        adapter = read_adapter(Path(message.path), self._model, self._slots.sites.max_rank)
        if adapter.digest != message.digest:
            raise AdapterError(f"{message.path}: its content has changed since it was requested: load it again")
        return pack_adapter(adapter, self._slots.sites)
