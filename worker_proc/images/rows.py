"""The items of each row, and what they put in place of the embeddings of a step's tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.wire.item_messages import RowItem
from quire.protocol.wire.worker_messages import NewRequestData, SchedulerOutput
from quire.worker_proc.batch.diff_check import After
from quire.worker_proc.batch.image_positions import given_end, merged_grid, rope_positions
from quire.worker_proc.batch.input_batch import InputBatch, StepRefused
from quire.worker_proc.batch.step_inputs import StepInputs
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.images.tower import VisionTower


@dataclass(frozen=True, slots=True)
class ItemStep:
    """Fields of ``Inputs`` and ``StepBatch`` that the items of a step's rows decide."""

    positions: torch.Tensor
    given_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
    added_rows: tuple[torch.Tensor, ...] = ()
    last_keys: npt.NDArray[np.int32] | None = None


class RowItems:
    """Owns the column of the rows' items. It is there without images too, and then refuses every item.

    Attributes:
        rows: ``[1 + num_deepstack, num_rows, hidden_size]`` of each item that steps may use, by its number; changed in
            place.
        tower: what makes rows of images; None: there are given rows alone.
    """

    def __init__(self, config: EngineConfig, batch: InputBatch, transfer: Transfer) -> None:
        self._batch, self._transfer = batch, transfer
        self._kinds = config.item_kinds
        vision = config.model.vision
        self._in_space = vision is not None and bool(vision.mrope_section)
        self._items = batch.column(np.object_, lambda new: new.items, None)
        self._positions = batch.column(np.object_, self._positions_of, None)
        self._is_causal = vision is None or vision.is_causal
        # A step with last keys runs other compiled kernels, which in deterministic mode must not depend on the batch.
        self._always_last_keys = config.deterministic and not self._is_causal
        self._images: set[int] = set()
        self.rows: dict[int, torch.Tensor] = {}
        self.tower: VisionTower | None = None

    def keep(self, number: int, rows: torch.Tensor, *, is_image: bool) -> None:
        """Let steps use the rows of an item."""
        self.rows[number] = rows
        if is_image:
            self._images.add(number)

    def drop(self, number: int) -> None:
        self.rows.pop(number, None)
        self._images.discard(number)

    def _positions_of(self, new: NewRequestData) -> Any:
        return rope_positions(new.items) if self._in_space and new.items else None

    def require(self, step: SchedulerOutput, after: After) -> None:
        """Check the items of new requests, and that the rows of those that the step needs are there.

        Raises:
            StepRefused: they are not.
        """
        for new in step.new_requests:
            if new.items:
                self._require_items(new)
        if not self._kinds:
            return
        ends = after.column(self._batch.given_end, lambda new: given_end(new.items))
        for row in np.flatnonzero((after.lengths > 0) & (after.computed < ends)).tolist():
            items = self._items[row] if row < after.num_held else step.new_requests[row - after.num_held].items
            begin = int(after.computed[row])
            for _ in self._pieces(after.handle(row), items, begin, begin + int(after.lengths[row])):
                pass

    def _require_items(self, new: NewRequestData) -> None:
        where = f"handle {new.handle}"
        if not self._kinds:
            raise StepRefused(f"{where} has items, and this engine takes none")
        end = 0
        for item in new.items:
            for begin, count in item.ranges:
                if begin < end or count < 1:
                    raise StepRefused(f"{where}: ranges of items must ascend (got {begin}, {count} after {end})")
                end = begin + count
            if not item.ranges or item.number < 0 or end > new.num_prompt_tokens:
                raise StepRefused(f"{where}: item {item.number} ends at {end} of {new.num_prompt_tokens} prompt tokens")
            if item.grid and self._in_space:
                try:
                    merged_grid(item)
                except ValueError as error:
                    raise StepRefused(f"{where}: {error}") from None

    def of_step(self, inputs: StepInputs, positions: torch.Tensor) -> ItemStep:
        """Return what items decide of the inputs. Tensors have their content after ``Transfer.send``.

        Args:
            positions: the step's positions on the device.

        Raises:
            StepRefused: the rows of an item are not there.
        """
        if not self._kinds:
            return ItemStep(positions)
        firsts = inputs.seq_lens - inputs.query_lens
        begun = np.flatnonzero(firsts < self._batch.given_end[inputs.rows]).tolist()
        if self._in_space:
            positions = self._rope_positions(inputs, begun)
        last_keys = None
        if self._always_last_keys or (begun and not self._is_causal):
            last_keys = inputs.positions.astype(np.int32)
        places, pieces, starts = [], [], inputs.query_start_loc
        for at in begun:
            row, first = int(inputs.rows[at]), int(firsts[at])
            handle = int(self._batch.handles[row])
            for item, end, begin, rows in self._pieces(handle, self._items[row], first, int(inputs.seq_lens[at])):
                own = int(starts[at]) + begin - first
                places.append(np.arange(own, own + rows.shape[1]))
                pieces.append(rows)
                if last_keys is not None and item in self._images:
                    last_keys[places[-1]] = end - 1
        if not pieces:
            return ItemStep(positions, last_keys=last_keys)
        (indices,) = self._transfer(np.concatenate(places))
        rows, *deep = torch.cat(pieces, 1).unbind()
        return ItemStep(positions, (indices, rows), tuple(deep), last_keys)

    def _pieces(
        self, handle: int, items: Sequence[RowItem], begin: int, end: int
    ) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        """Yield each part of an item between two positions of a request.

        Returns:
            The item's number, the end of the range that the part is of, the part's first position, and its rows.
        """
        for item in items:
            done = 0
            for first, count in item.ranges:
                low, high = max(first, begin), min(first + count, end)
                if low < high:
                    rows = self.rows.get(item.number)
                    if rows is None or rows.shape[1] != sum(each for _, each in item.ranges):
                        found = "absent" if rows is None else f"{rows.shape[1]}"
                        raise StepRefused(f"handle {handle} needs the rows of item {item.number}, which are {found}")
                    if high < first + count and not self._is_causal and item.number in self._images:
                        raise StepRefused(f"handle {handle} must compute item {item.number} up to {first + count}")
                    yield item.number, first + count, low, rows[:, done + low - first : done + high - first]
                done += count

    def _rope_positions(self, inputs: StepInputs, begun: Sequence[int]) -> torch.Tensor:
        """Return rotary positions: int64 ``[num_tokens]``, or ``[3, num_tokens]`` if a row is not behind its images."""
        plain = inputs.positions + self._batch.rope_offset[inputs.token_rows]
        own = {at: self._positions[inputs.rows[at]] for at in begun}
        if not own:
            return self._transfer(plain)[0]
        found = np.tile(plain, (3, 1))
        for at, positions in own.items():
            first, start = int(inputs.seq_lens[at] - inputs.query_lens[at]), int(inputs.query_start_loc[at])
            part = positions[:, first : int(inputs.seq_lens[at])]
            found[:, start : start + part.shape[1]] = part
        return self._transfer(found)[0]
