"""Who may write to each block: the proof that no two rows of the batch write the same slot.

A row *claims* the blocks at and behind its computed position, for there it will write. Blocks before it are hits of
the prefix cache: many rows may *read* one, and none may claim it. All KV groups share one pool, so a block has one
owner whatever the group. A claim ends with its row, or when the row is past it: a group that reads back only so far
gives up blocks behind its window while the row runs. A full block of any other group is never given up: who is past
writing it still reads it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.protocol.model.kv_layout import NULL_BLOCK_ID, KVGroup
from quire.worker_proc.batch.input_batch import StepRefused

Ints = npt.NDArray[np.integer[Any]]


class SlotOwners:
    """Owns, per block, the row that writes to it and how many rows read it. Works only on change.

    A row claims under a key, which it takes along when it moves and gives back when it ends, so that neither touches
    its claims. No key is used twice: what an ended row left in the columns says nothing.

    It does not know who reads blocks of groups that give up blocks: only the scheduler knows which those are.
    """

    def __init__(self, groups: Sequence[KVGroup], num_blocks: int, num_computed: npt.NDArray[np.int32]) -> None:
        """
        Args:
            num_blocks: of the pool, the null block included.
            num_computed: the batch's column, int32 ``[max_rows]``; read, never written.
        """
        max_rows = len(num_computed)
        self._num_computed = num_computed
        self._block_size = np.array([g.block_size for g in groups], np.int64)
        # How far back a token reads; 0: everything.
        self._window = np.array([g.sliding_window for g in groups])
        self._owner = np.zeros(num_blocks, np.int64)  # the key of the last claim
        self._group = np.zeros(num_blocks, np.int32)  # and the group and the index in its row's table
        self._index = np.zeros(num_blocks, np.int64)
        self._readers = np.zeros(num_blocks, np.int32)
        # A key is a serial number times max_rows, plus a place: the place tells the row that holds it now.
        self._serial = 0
        self._key_of_place = np.full(max_rows, -1, np.int64)
        self._row_of_place = np.full(max_rows, -1, np.int64)
        self._place_of_row = np.full(max_rows, -1, np.int64)
        self._free_places = list(range(max_rows))
        self._reads: dict[int, list[Ints]] = {}  # by place
        self._new_reads: list[tuple[int, Ints]] = []  # of this step: place, blocks

    def add_blocks(self, row: int, group: int, block_ids: Ints) -> None:
        """A new row's blocks of one group: it reads those before its computed position and claims the others."""
        if self._place_of_row[row] < 0:
            self._begin(row)
        own = min(int(self._num_computed[row] // self._block_size[group]), len(block_ids))
        read = block_ids[:own]
        if len(read) and not self._window[group]:
            self._new_reads.append((int(self._place_of_row[row]), read.copy()))
        self.claim(row, group, np.arange(own, len(block_ids)), block_ids[own:])

    def claim(self, rows: int | Ints, group: int, indices: Ints, block_ids: Ints) -> None:
        """Rows will write to blocks, which ``require_free`` has let pass, at ``indices`` of their tables; null blocks
        are passed over.

        Args:
            rows: of each block, or one for all.
        """
        of_block: Ints = np.broadcast_to(np.asarray(rows, np.int64), block_ids.shape)
        if not block_ids.all():
            real = block_ids != NULL_BLOCK_ID
            of_block, indices, block_ids = of_block[real], indices[real], block_ids[real]
        if not len(block_ids):
            return
        places = self._place_of_row[of_block]
        if places.min() < 0:
            for row in np.unique(of_block[places < 0]).tolist():
                self._begin(row)
            places = self._place_of_row[of_block]
        self._owner[block_ids] = self._key_of_place[places]
        self._group[block_ids] = group
        self._index[block_ids] = indices

    def end_step(self) -> None:
        """From now on nobody may claim what this step's new rows read.

        Not before: a prefix is read in the very step that writes it, and the diff may name the reader first.
        """
        for place, read in self._new_reads:
            np.add.at(self._readers, read, 1)
            self._reads.setdefault(place, []).append(read)
        self._new_reads.clear()

    def require_free(self, block_ids: Ints, leaving: Sequence[int] = ()) -> None:
        """Before blocks are claimed. ``leaving``: rows whose claims and reads end before.

        Raises:
            StepRefused: a block comes twice, or some row writes it elsewhere, or reads it since an earlier step.
        """
        if len(block_ids) > 1 and len(np.unique(block_ids)) < len(block_ids):
            raise StepRefused("slot overlap: a block is given twice")
        gone = self._place_of_row[list(leaving)]
        taken = self._readers[block_ids] > self._num_reads(gone, block_ids)
        places = self._owner[block_ids] % len(self._key_of_place)
        live = np.flatnonzero(self._owner[block_ids] == self._key_of_place[places])
        if len(gone):
            live = live[~np.isin(places[live], gone)]
        if len(live):
            held = block_ids[live]
            end = (self._index[held] + 1) * self._block_size[self._group[held]]
            taken[live] |= end > self._first_read(self._row_of_place[places[live]], self._group[held])
        if taken.any():
            raise StepRefused(f"slot overlap: block {block_ids[taken][0]} is in use, and a row is to write to it")

    def _num_reads(self, places: Ints, block_ids: Ints) -> Ints | int:
        """How many of the readers of each block are these."""
        reads = [read for place in places.tolist() for read in self._reads.get(place, ())]
        if not reads:
            return 0
        read = np.sort(np.concatenate(reads))
        return np.searchsorted(read, block_ids, "right") - np.searchsorted(read, block_ids, "left")

    def _first_read(self, rows: Ints, groups: Ints) -> Ints:
        """The first position that the next token of each row reads: blocks wholly before it are given up."""
        position = self._num_computed[rows].astype(np.int64)
        window = self._window[groups]
        return np.where(window > 0, np.maximum(position - window + 1, 0), 0)

    def _begin(self, row: int) -> None:
        self._serial += 1
        place = self._free_places.pop()
        self._key_of_place[place] = self._serial * len(self._key_of_place) + place
        self._row_of_place[place] = row
        self._place_of_row[row] = place

    # ---- rows

    def clear_row(self, row: int) -> None:
        place = int(self._place_of_row[row])
        if place < 0:
            return
        for read in self._reads.pop(place, ()):
            np.subtract.at(self._readers, read, 1)
        if self._new_reads:
            self._new_reads = [(other, read) for other, read in self._new_reads if other != place]
        self._key_of_place[place] = self._row_of_place[place] = self._place_of_row[row] = -1
        self._free_places.append(place)

    def move_row(self, source: int, target: int) -> None:
        """The claims go along: the source, which the batch clears next, has none any more."""
        if source == target:
            return
        self.clear_row(target)
        place = int(self._place_of_row[source])
        self._place_of_row[source] = -1
        self._place_of_row[target] = place
        if place >= 0:
            self._row_of_place[place] = target

    # ---- invariants

    def check(self, block_ids: Sequence[Sequence[Ints]]) -> None:
        """Raise AssertionError unless every block that a row will write to is its own, and readers are counted.

        Args:
            block_ids: what each row, from 0 on, holds of each group: ``[num_rows][num_groups]`` arrays.
        """
        writers: dict[int, int] = {}
        for row, of_groups in enumerate(block_ids):
            place = self._place_of_row[row]
            assert place >= 0 or not any(map(len, of_groups)), f"row {row} holds blocks and no key"
            for group, ids in enumerate(of_groups):
                begin = self._num_computed[row] // self._block_size[group]
                for block_id in ids[begin:][ids[begin:] != NULL_BLOCK_ID].tolist():
                    assert block_id not in writers, f"rows {writers[block_id]} and {row} write to block {block_id}"
                    writers[block_id] = row
                    assert self._owner[block_id] == self._key_of_place[place], f"row {row} has not claimed {block_id}"
        used = np.flatnonzero(self._key_of_place >= 0)
        assert sorted([*self._free_places, *used]) == list(range(len(self._key_of_place))), "a place is lost"
        assert (self._place_of_row[self._row_of_place[used]] == used).all(), "a key's row does not have it"
        readers = np.zeros_like(self._readers)
        for reads in self._reads.values():
            for read in reads:
                np.add.at(readers, read, 1)
        assert (readers == self._readers).all(), "readers are counted wrongly"
