"""Encodes items in a thread beside the steps."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from quire.protocol.process.log import event_logger
from quire.protocol.wire.item_messages import Encode, Encoded, InputItem
from quire.worker_proc.batch.input_batch import StepRefused
from quire.worker_proc.images.rows import RowItems, brief
from quire.worker_proc.models.model import Model
from quire.worker_proc.side_work import SideThread

log = event_logger("worker")

NICENESS = 10
"""Of the thread on a CPU, and of those that compute for it: steps come first."""


class BadTensors(Exception):
    """An item's tensors are not those that its prompt needs: half a sentence whose subject is the item."""


class ItemEncoder:
    """Owns the thread that encodes. Every rank encodes every item by itself. What fails is answered with the reason,
    and the worker continues.
    """

    def __init__(self, items: RowItems, model: Model, wake: Callable[[], None]) -> None:
        """
        Args:
            items: its rows are changed by the loop's thread alone.
            model: the language model, whose device, width and dtype rows have.
            wake: called in the thread whenever ``take_answers`` has more to return.
        """
        self._tower, self._items, self._device = items.tower, items, torch.device(model.build.device)
        self._hidden_size, self._dtype = model.config.hidden_size, model.dtype
        on_gpu = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        niceness = 0 if on_gpu else NICENESS
        self._thread = SideThread("item encoder", self._work, wake, niceness=niceness)
        self.close = self._thread.close

    @property
    def handlers(self) -> Mapping[type, Callable[[Encode], None]]:
        return {Encode: self.submit}

    def begin_worker_epoch(self) -> None:
        """Drop all rows, and what the previous scheduler has sent."""
        self._thread.begin_worker_epoch()
        self._items.rows.clear()

    def submit(self, message: Encode) -> None:
        """Free the rows of the dropped items, and queue an encoding.

        Raises:
            StepRefused: the rows are there, or none are wanted.
        """
        for key in message.dropped:
            self._items.rows.pop(key, None)
        item = message.item
        if item.key in self._items.rows or item.num_rows < 1:
            raise StepRefused(f"Encode of item {brief(item)}: it is there, or has {item.num_rows} rows")
        self._thread.submit(item)

    def take_answers(self) -> list[Encoded]:
        """Return the answers of what has ended since the last call; steps may use its rows."""
        answers = self._thread.take_answers()
        self._items.rows |= {answer.key: rows for answer, rows in answers if rows is not None}
        return [answer for answer, _ in answers]

    # ---- the thread

    def _work(self, item: InputItem) -> tuple[Encoded, torch.Tensor | None]:
        began, rows, problem = time.perf_counter(), None, ""
        beside_steps: AbstractContextManager[object] = nullcontext()
        if self._stream is not None:
            beside_steps = torch.cuda.stream(self._stream)
        try:
            with beside_steps:
                rows = self._encode(item)
                if self._stream is not None:
                    self._stream.synchronize()
        except Exception as error:  # an answer in any case: requests wait for it
            rows, problem = None, _problem(error)
            log.warning("an item was not encoded", item=brief(item), reason=" ".join(str(error).split())[:300])
        return Encoded(item.key, problem, time.perf_counter() - began), rows

    def _encode(self, item: InputItem) -> torch.Tensor:
        """Return the rows on the device."""
        tensors = load_file(item.path)
        if item.kind == "rows":
            rows = self._given(item, tensors.get("rows"))
        elif self._tower is None:
            raise BadTensors("is an image, and this model reads text only")
        else:
            rows = self._tower.encode(tensors)
        if rows.shape[1] != item.num_rows:
            raise BadTensors(f"has {rows.shape[1]} rows, and its prompt has {item.num_rows} positions for them")
        if not rows.isfinite().all():
            raise BadTensors("has rows that are not finite")
        return rows

    def _given(self, item: InputItem, rows: torch.Tensor | None) -> torch.Tensor:
        if rows is None or rows.shape != (item.num_rows, self._hidden_size):
            found = "absent" if rows is None else list(rows.shape)
            raise BadTensors(f"must have the shape [{item.num_rows}, {self._hidden_size}] (got {found})")
        deep = 0 if self._tower is None else self._tower.vision.num_deepstack
        own = rows.to(self._device, self._dtype, copy=True)[None]  # the file is not kept
        return own if not deep else torch.cat((own, own.new_zeros(deep, *rows.shape)))


def _problem(error: Exception) -> str:
    """Return a line for the client, without the texts of exceptions, which may have paths and addresses."""
    match error:
        case BadTensors():
            return f"the item {error}"
        case torch.OutOfMemoryError() | MemoryError():
            return "the item does not fit in the memory of the device"
        case SafetensorError() | OSError():
            return "the item's tensors cannot be read"
        case _:
            return f"the item does not fit the model ({type(error).__name__})"
