"""The items of each row, and what they put in place of the embeddings of a step's tokens."""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.wire.item_messages import InputItem
from quire.protocol.wire.worker_messages import NewRequestData, SchedulerOutput
from quire.worker_proc.batch.diff_check import After
from quire.worker_proc.batch.image_positions import given_end, merged_grid, rope_positions
from quire.worker_proc.batch.input_batch import InputBatch, StepRefused
from quire.worker_proc.batch.step_inputs import StepInputs
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.images.tower import VisionTower
from quire.worker_proc.models.model import Inputs


class RowItems:
    """Owns the column of the rows' items. It is there without images too, and then refuses every item.

    Attributes:
        is_enabled: whether requests may have items. Otherwise steps need not ask.
        rows: ``[1 + num_deepstack, num_rows, hidden_size]`` of each item that steps may use, by its key; changed in
            place.
        tower: what makes rows of images; None: there are given rows alone.
    """

    def __init__(self, config: EngineConfig, batch: InputBatch, transfer: Transfer) -> None:
        self._batch, self._transfer = batch, transfer
        self.is_enabled, self._whole_kinds = bool(config.item_kinds), config.whole_kinds
        vision = config.model.vision
        self._in_space = vision is not None and bool(vision.mrope_section)
        if self.is_enabled:
            self._items = batch.column(np.object_, lambda new: new.items, None)
        # A step with last keys runs other compiled kernels, which in deterministic mode must not depend on the batch.
        self._always_last_keys = config.deterministic and bool(self._whole_kinds)
        self.rows: dict[bytes, torch.Tensor] = {}
        self.tower: VisionTower | None = None

    def require(self, step: SchedulerOutput, after: After) -> None:
        """Check the items of new requests, and that the rows of those that the step needs are there.

        Raises:
            StepRefused: they are not.
        """
        for new in step.new_requests:
            if new.items:
                self._require_items(new)
        if not self.is_enabled:
            return
        ends = after.column(self._batch.given_end, lambda new: given_end(new.items))
        for row in np.flatnonzero((after.lengths > 0) & (after.computed < ends)).tolist():
            items = self._items[row] if row < after.num_held else step.new_requests[row - after.num_held].items
            begin = int(after.computed[row])
            for _ in self._pieces(after.handle(row), items, begin, begin + int(after.lengths[row])):
                pass

    def _require_items(self, new: NewRequestData) -> None:
        where = f"handle {new.handle}"
        if not self.is_enabled:
            raise StepRefused(f"{where} has items, and this engine takes none")
        end = 0
        for item in new.items:
            if problem := item.problem(end, new.num_prompt_tokens):
                raise StepRefused(f"{where}: {problem}")
            end = item.end
            if item.grid and self._in_space:
                try:
                    merged_grid(item)
                except ValueError as error:
                    raise StepRefused(f"{where}: {error}") from None

    def put_into(self, model_inputs: Inputs, inputs: StepInputs) -> tuple[Inputs, npt.NDArray[np.int32] | None]:
        """Return the inputs of the model with what items decide, and ``StepBatch.last_keys``.

        Tensors have their content after ``Transfer.send``.

        Raises:
            StepRefused: the rows of an item are not there.
        """
        firsts = inputs.seq_lens - inputs.query_lens
        begun = np.flatnonzero(firsts < self._batch.given_end[inputs.rows]).tolist()
        if self._in_space:
            model_inputs = msgspec.structs.replace(model_inputs, positions=self._rope_positions(inputs, begun))
        last_keys = None
        if self._always_last_keys or (begun and self._whole_kinds):
            last_keys = inputs.positions.astype(np.int32)
        places, pieces, starts = [], [], inputs.query_start_loc
        for at in begun:
            row, first = int(inputs.rows[at]), int(firsts[at])
            handle = int(self._batch.handles[row])
            for item, end, begin, rows in self._pieces(handle, self._items[row], first, int(inputs.seq_lens[at])):
                own = int(starts[at]) + begin - first
                places.append(np.arange(own, own + rows.shape[1]))
                pieces.append(rows)
                if last_keys is not None and item.kind in self._whole_kinds:
                    last_keys[places[-1]] = end - 1
        if not pieces:
            return model_inputs, last_keys
        (indices,) = self._transfer(np.concatenate(places))
        rows, *deep = torch.cat(pieces, 1).unbind()
        given = indices, rows
        return msgspec.structs.replace(model_inputs, given_embeddings=given, added_rows=tuple(deep)), last_keys

    def _pieces(
        self, handle: int, items: Sequence[InputItem], begin: int, end: int
    ) -> Iterator[tuple[InputItem, int, int, torch.Tensor]]:
        """Yield each part of an item between two positions of a request.

        Returns:
            The item, the end of the range that the part is of, the part's first position, and its rows.
        """
        for item in items:
            done = 0
            for first, count in item.ranges:
                low, high = max(first, begin), min(first + count, end)
                if low < high:
                    rows = self.rows.get(item.key)
                    if rows is None:
                        raise StepRefused(f"handle {handle} needs the rows of item {brief(item)}, which are absent")
                    if high < first + count and item.kind in self._whole_kinds:
                        raise StepRefused(f"handle {handle} must compute item {brief(item)} up to {first + count}")
                    yield item, first + count, low, rows[:, done + low - first : done + high - first]
                done += count

    def _rope_positions(self, inputs: StepInputs, begun: Sequence[int]) -> torch.Tensor:
        """Return rotary positions: int64 ``[num_tokens]``, or ``[3, num_tokens]`` if a row is not behind its images."""
        plain = inputs.positions + self._batch.rope_offset[inputs.token_rows]
        if not begun:
            return self._transfer(plain)[0]
        found = np.tile(plain, (3, 1))
        for at in begun:
            first, start = int(inputs.seq_lens[at] - inputs.query_lens[at]), int(inputs.query_start_loc[at])
            part = rope_positions(self._items[inputs.rows[at]])[:, first : int(inputs.seq_lens[at])]
            found[:, start : start + part.shape[1]] = part
        return self._transfer(found)[0]


def brief(item: InputItem) -> str:
    """Return the beginning of an item's key, for messages."""
    return item.key.hex()[:16]
