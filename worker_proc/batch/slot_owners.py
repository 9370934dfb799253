"""Owner of each block: the check that no two rows of the batch write the same slot.

A row *claims* the blocks from its computed position on, because it will write to them. Blocks before that position are
prefix cache hits: many rows may *read* one, and none may claim it. All KV groups share one pool, so a block has one
owner in all groups. A claim ends when the row is removed. In a group with a sliding window or with chunks it also ends
when the block is left of what the row reads, because the scheduler may free the block while the row runs. In a full
attention group a full block stays claimed, because the row that wrote it still reads it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.protocol.model.kv_layout import NULL_BLOCK_ID, KVGroup
from quire.worker_proc.batch.input_batch import StepRefused

Ints = npt.NDArray[np.integer[Any]]


class SlotOwners:
    """Owns, per block, the row that writes to it and the number of rows that read it. Does work only for changes.

    A row claims blocks under a key, which moves with the row and becomes invalid when the row is removed, so that
    neither a move nor a removal changes the claims. Keys are not reused: a claim under a key of a removed row is void.

    Readers of blocks in groups with a window are not counted: only the scheduler knows which blocks it has freed there.
    """

    def __init__(self, groups: Sequence[KVGroup], num_blocks: int, num_computed: npt.NDArray[np.int32]) -> None:
        """
        Args:
            num_blocks: number of blocks in the pool, including the null block.
            num_computed: the batch's column, int32 ``[max_rows]``; read, never written.
        """
        max_rows = len(num_computed)
        self._num_computed = num_computed
        self._block_size = np.array([g.block_size for g in groups], np.int64)
        # Number of positions that a token sees, or of a chunk; 0 means all.
        self._window = np.array([g.sliding_window for g in groups])
        self._chunk = np.array([g.chunk for g in groups], np.int64)
        # The last claim of each block: its key, group, and index in the row's block table.
        self._owner = np.zeros(num_blocks, np.int64)
        self._group = np.zeros(num_blocks, np.int32)
        self._index = np.zeros(num_blocks, np.int64)
        self._readers = np.zeros(num_blocks, np.int32)
        # A key is a serial number times max_rows, plus a place, which maps to the row that has the key now.
        self._serial = 0
        self._key_of_place = np.full(max_rows, -1, np.int64)
        self._row_of_place = np.full(max_rows, -1, np.int64)
        self._place_of_row = np.full(max_rows, -1, np.int64)
        self._free_places = list(range(max_rows))
        self._reads: dict[int, list[Ints]] = {}  # by place
        self._new_reads: list[tuple[int, Ints]] = []  # of this step: place, blocks

    def add_blocks(self, row: int, group: int, block_ids: Ints) -> None:
        """Add a new row's blocks of one group: it reads those before its computed position and claims the others."""
        if self._place_of_row[row] < 0:
            self._begin(row)
        own = min(int(self._num_computed[row] // self._block_size[group]), len(block_ids))
        read = block_ids[:own]
        if len(read) and not (self._window[group] or self._chunk[group]):
            self._new_reads.append((int(self._place_of_row[row]), read.copy()))
        self.claim(row, group, np.arange(own, len(block_ids)), block_ids[own:])

    def claim(self, rows: int | Ints, group: int, indices: Ints, block_ids: Ints) -> None:
        """Claim blocks, which ``require_free`` has accepted, for the rows that will write to them; skip null blocks.

        Args:
            rows: the row of each block, or one row for all.
            indices: index of each block in its row's block table.
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
        """Count the reads of this step's new rows; later steps may not claim the blocks that they read.

        They are counted at the end of the step because a prefix may be read in the step that writes it, and the diff
        may list the reader before the writer.
        """
        for place, read in self._new_reads:
            np.add.at(self._readers, read, 1)
            self._reads.setdefault(place, []).append(read)
        self._new_reads.clear()

    def require_free(self, block_ids: Ints, leaving: Sequence[int] = ()) -> None:
        """Check that blocks may be claimed.

        Args:
            leaving: rows that the step removes; their claims and reads do not count.

        Raises:
            StepRefused: a block occurs twice, another row has claimed it, or a row has been reading it since an earlier
                step.
        """
        if len(block_ids) > 1 and len(np.unique(block_ids)) < len(block_ids):
            ids, counts = np.unique(block_ids, return_counts=True)
            raise StepRefused(f"slot overlap: the step assigns block {ids[counts > 1][0]} twice")
        leaving_places = self._place_of_row[list(leaving)]
        taken = self._readers[block_ids] > self._num_reads(leaving_places, block_ids)
        places = self._owner[block_ids] % len(self._key_of_place)
        live = np.flatnonzero(self._owner[block_ids] == self._key_of_place[places])
        if len(leaving_places):
            live = live[~np.isin(places[live], leaving_places)]
        if len(live):
            held = block_ids[live]
            end = (self._index[held] + 1) * self._block_size[self._group[held]]
            taken[live] |= end > self._first_read(self._row_of_place[places[live]], self._group[held])
        if taken.any():
            raise StepRefused(f"slot overlap: block {block_ids[taken][0]} to write is in use by another row")

    def require_copies(self, copies: Sequence[tuple[int, int]], leaving: Sequence[int] = ()) -> None:
        """Check that blocks may be copied.

        Args:
            copies: source and target of each.
            leaving: rows that the step removes; their reads do not count.

        Raises:
            StepRefused: a block is out of range, a target occurs twice or is a source, or a row reads it.
        """
        pairs = np.array(copies, np.int64).reshape(-1, 2)
        last, targets = len(self._owner) - 1, pairs[:, 1]
        if not len(pairs):
            return
        if pairs.min() <= NULL_BLOCK_ID or pairs.max() > last:
            raise StepRefused(f"blocks to copy must be between 1 and {last} (got {pairs.min()} to {pairs.max()})")
        if len(np.unique(targets)) < len(targets) or np.isin(targets, pairs[:, 0]).any():
            raise StepRefused("a block to copy to occurs twice, or is copied from")
        is_read = self._readers[targets] > self._num_reads(self._place_of_row[list(leaving)], targets)
        if is_read.any():
            raise StepRefused(f"block {targets[is_read][0]} to copy to is read by a row")

    def _num_reads(self, places: Ints, block_ids: Ints) -> Ints | int:
        """Return for each block the number of its reads by the rows at ``places``."""
        reads = [read for place in places.tolist() for read in self._reads.get(place, ())]
        if not reads:
            return 0
        read = np.sort(np.concatenate(reads))
        return np.searchsorted(read, block_ids, "right") - np.searchsorted(read, block_ids, "left")

    def _first_read(self, rows: Ints, groups: Ints) -> Ints:
        """Return the first position that the next token of each row reads; claims of earlier blocks have ended."""
        position = self._num_computed[rows].astype(np.int64)
        window, chunk = self._window[groups], self._chunk[groups]
        first = np.where(window > 0, np.maximum(position - window + 1, 0), 0)
        return np.where(chunk > 0, position // np.maximum(chunk, 1) * chunk, first)

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
        """Move the claims; the source row has none afterwards."""
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
        """Raise AssertionError unless each row has claimed the blocks that it will write, and reads are counted
        exactly.

        Args:
            block_ids: block ids of each row, from row 0, and group: ``[num_rows][num_groups]`` arrays.
        """
        writers: dict[int, int] = {}
        for row, of_groups in enumerate(block_ids):
            place = self._place_of_row[row]
            assert place >= 0 or not any(map(len, of_groups)), f"row {row} holds blocks without a key"
            for group, ids in enumerate(of_groups):
                begin = self._num_computed[row] // self._block_size[group]
                for block_id in ids[begin:][ids[begin:] != NULL_BLOCK_ID].tolist():
                    assert block_id not in writers, f"rows {writers[block_id]} and {row} write to block {block_id}"
                    writers[block_id] = row
                    assert self._owner[block_id] == self._key_of_place[place], f"row {row} has not claimed {block_id}"
        used = np.flatnonzero(self._key_of_place >= 0)
        assert sorted([*self._free_places, *used]) == list(range(len(self._key_of_place))), "lost or duplicate place"
        assert (self._place_of_row[self._row_of_place[used]] == used).all(), "place and row do not match"
        readers = np.zeros_like(self._readers)
        for reads in self._reads.values():
            for read in reads:
                np.add.at(readers, read, 1)
        assert (readers == self._readers).all(), "wrong reader counts"
