"""Index of texts by hashes of short token runs: finds earlier occurrences of a text's last tokens."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.protocol.wire.arrays import Int32
from quire.worker_proc.batch.positions import Ints

NONE = -1
"""No place, or no token."""

_HASH_BITS = 64
_MAX_SLOT_BITS, _MAX_SHARED_SLOT_BITS = 15, 20
"""Limits of the table sizes. A long text soon touches its whole table: 128 KiB for each run length and row."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

_INDEXED_AT_A_TIME = 1024
"""Tokens of a long text that are indexed at a time, so that temporary arrays stay in the CPU cache."""


class TextIndex:
    """Owns texts (sequences of tokens) and, for each short run of tokens in them, the latest place after this run.

    A *place* is a position in a text, ``text * width + position``. Its run is the tokens before it, and its token is
    the one that followed the run. Runs are found by hash. A table entry is overwritten on a collision, and may refer to
    a replaced text, so matches are verified by comparing tokens: a result may be missing but is never wrong. All
    operations work on arrays of many texts, without a loop over tokens.

    Attributes:
        lengths: int64 ``[num_lengths]``, ascending: the indexed run lengths, in tokens.
        depth: the longest run length.
        tokens: int32 ``[num_texts, width]``.
        num_tokens: int64 ``[num_texts]``.
    """

    def __init__(self, num_texts: int, width: int, lengths: Sequence[int], *, shared: bool, max_places: int) -> None:
        """
        Args:
            width: maximum number of tokens of a text.
            shared: one table for all texts, so that a run is found in any of them; otherwise one table per text.
            max_places: maximum number of places of one run that ``find`` returns.
        """
        self.lengths = np.array(lengths, np.int64)
        self.depth = int(self.lengths[-1])
        self.tokens = np.zeros((num_texts, width), np.int32)
        self.num_tokens = np.zeros(num_texts, np.int64)
        self._width = width
        self._max_places = max_places
        self._shared = shared
        in_a_table, max_bits = (width * num_texts, _MAX_SHARED_SLOT_BITS) if shared else (width, _MAX_SLOT_BITS)
        self._slot_bits = min(in_a_table.bit_length(), max_bits)
        num_tables = 1 if shared else num_texts
        dtype = np.int32 if num_texts * width < 2**31 else np.int64
        # Places plus one, so that untouched zero pages (which cost no memory) mean NONE.
        self._newest = np.zeros(num_tables * len(lengths) << self._slot_bits, dtype)
        # For each run length and place, the previous place with the same hash.
        self._before = np.zeros(len(lengths) * num_texts * width if max_places > 1 else 0, dtype)
        self._age = np.zeros(num_texts, np.int64)
        self._num_resets = 0
        self._reach = np.arange(self.depth)
        first = np.arange(num_tables * len(lengths)).reshape(num_tables, -1)
        self._first_slot = first << self._slot_bits
        self._powers = np.cumprod(np.full(self.depth, _MULTIPLIER, np.uint64))

    def reset(self, text: int) -> None:
        """Replace ``text`` by a new, empty text."""
        self._num_resets += 1
        self._age[text] = self._num_resets
        self.num_tokens[text] = 0

    def extend(self, texts: Ints, lengths: Ints, source: Int32, rows: Ints) -> None:
        """Extend each of ``texts`` to the first ``lengths`` tokens of its row of ``source``, and index the new tokens.

        Each row of ``source`` must begin with the text's present tokens.
        """
        starts = self.num_tokens[texts]
        counts = lengths - starts
        which = np.repeat(np.arange(len(texts)), counts)
        of, positions = texts[which], (lengths - np.cumsum(counts))[which] + np.arange(len(which))
        self.tokens[of, positions] = source[rows[which], positions]
        self.num_tokens[texts] = lengths
        for part in range(0, len(of), _INDEXED_AT_A_TIME):
            self._index(of[part : part + _INDEXED_AT_A_TIME], positions[part : part + _INDEXED_AT_A_TIME])

    def _index(self, texts: Ints, positions: Ints) -> None:
        """Index the runs before some positions, which ascend within each text."""
        all_slots = self._slots(texts, self._runs(texts, positions))
        all_places = np.broadcast_to((texts * self._width + positions)[:, None], all_slots.shape)
        there = positions[:, None] >= self.lengths  # a run cannot begin before its text
        slots, places, which = all_slots[there], all_places[there], np.nonzero(there)[1]
        if len(self._before):
            order = np.argsort(slots, kind="stable")
            slots, places, which = slots[order], places[order], which[order]
            before = self._newest[slots]
            again = np.flatnonzero(slots[1:] == slots[:-1]) + 1
            before[again] = places[again - 1] + 1
            self._before[which * self.tokens.size + places] = before
        self._newest[slots] = places + 1  # of equal slots NumPy keeps the last value

    def ends(self, texts: Ints) -> tuple[Int32, Ints]:
        """Return the last tokens of ``texts``, last one first, int32 ``[len(texts), depth]``, and how many are valid.

        No text may be empty.
        """
        known = self.num_tokens[texts]
        return self._runs(texts, known), np.minimum(known, self.depth)

    def find(self, tables: Ints, ends: Int32, known: Ints) -> tuple[Ints, Ints]:
        """Find the places after the longest run (of ``lengths``) that equals the end of each of ``ends``, latest first.

        Args:
            tables: the text to search for each; ignored if the table is shared.
            ends, known: as ``ends()`` returns them.

        Returns:
            places: ``[len(ends), max_places]``, NONE after the last place.
            matched: of the same shape: number of equal tokens before each place, at most ``depth``.
        """
        newest = self._newest[self._slots(tables, ends)].astype(np.int64) - 1
        matched = self._matched(newest, ends, known)
        fits = matched >= self.lengths
        longest = len(self.lengths) - 1 - fits[:, ::-1].argmax(axis=1)
        best = np.arange(len(ends)), longest
        at = np.where(fits[best], newest[best], NONE)
        if self._max_places == 1:
            return at[:, None], matched[best][:, None]
        places = np.full((len(ends), self._max_places), NONE, np.int64)
        places[:, 0] = at
        chain, age = longest * self.tokens.size, self._ages(at)
        for back in range(1, self._max_places):
            before = np.where(at >= 0, self._before[chain + at].astype(np.int64) - 1, NONE)
            # A replaced text may make the chain a cycle: stop unless places get older.
            older = self._ages(before)
            at = np.where(older < age, before, NONE)
            if (at < 0).all():
                break
            places[:, back], age = at, older
        matched = self._matched(places, ends, known)
        same = matched >= self.lengths[longest][:, None]
        return np.where(same, places, NONE), np.where(same, matched, 0)

    def following(self, places: Ints, count: int, *, repeating: bool) -> Ints:
        """Return the tokens from each place on: ``places.shape + [count]``, NONE after a text's end.

        Args:
            repeating: after a text's end, repeat the tokens from the place on, to draft a loop.
        """
        text, position = np.divmod(np.maximum(places, 0), self._width)
        left = (self.num_tokens[text] - position)[..., None]
        ahead: Ints = np.arange(count) % np.maximum(left, 1) if repeating else np.arange(count)
        is_there = (places[..., None] >= 0) & (ahead < left)
        flat = np.where(is_there, places[..., None] + ahead, 0)
        return np.where(is_there, self.tokens.reshape(-1)[flat], NONE)

    def _ages(self, places: Ints) -> Ints:
        """Return numbers that order places of the same table by the time they were indexed."""
        if not self._shared:
            return places
        return self._age[places // self._width] * self._width + places % self._width

    def _runs(self, texts: Ints, positions: Ints) -> Int32:
        """Return the tokens before each position, nearest first, ``[len(texts), depth]``; arbitrary before a start."""
        runs: Int32 = self.tokens[texts[:, None], np.maximum(positions[:, None] - 1 - self._reach, 0)]
        return runs

    def _slots(self, tables: Ints, runs: Int32) -> Ints:
        """Return the table slots of runs (of ``_runs``), for each length: ``[len(runs), num_lengths]``."""
        sums = np.cumsum(runs.astype(np.uint64) * self._powers, axis=1)[:, self.lengths - 1]
        sums ^= sums >> np.uint64(29)
        hashes = (sums * _MULTIPLIER) >> np.uint64(_HASH_BITS - self._slot_bits)
        return self._first_slot[0 if self._shared else tables] + hashes.view(np.int64)

    def _matched(self, places: Ints, ends: Int32, known: Ints) -> Ints:
        """Return how many tokens before each of ``places`` ``[rows, n]`` equal the row's ``ends``."""
        text, position = np.divmod(places, self._width)
        live = (places >= 0) & (position < self.num_tokens[text])
        limit = np.where(live, np.minimum(position, known[:, None]), 0)
        flat = np.maximum(places[..., None] - 1 - self._reach, 0)
        differs = (self.tokens.reshape(-1)[flat] != ends[:, None, :]) | (self._reach >= limit[..., None])
        matched: npt.NDArray[np.int64] = np.where(differs.any(axis=-1), differs.argmax(axis=-1), self.depth)
        return matched
