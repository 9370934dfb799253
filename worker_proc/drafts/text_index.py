"""Where the last tokens of a text stood before: hashes of short runs, kept up to date as tokens come."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.protocol.wire.arrays import Int32
from quire.worker_proc.batch.positions import Ints

NONE = -1
"""A place that is none."""

_HASH_BITS = 64
_MOST_SLOT_BITS, _MOST_SHARED_SLOT_BITS = 15, 20
"""A table of one text's runs is touched all over soon: 128 KiB for each length and row that has a long text."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

_AT_ONCE = 1024
"""Tokens of a long text that are learnt in one go: what lies between stays in the cache."""


class TextIndex:
    """Owns texts and, for each run of a few tokens in them, the newest place behind such a run.

    A *place* is a position in a text, ``text * width + position``; the run behind which it stands are the tokens
    right before it, and the token at it is what followed them. Runs are found by hash. A table forgets on a
    collision, and what it still knows of a text that is gone is told by comparing the tokens themselves, so that an
    answer may be missing but never wrong. All work is over arrays: of many texts at once, without a loop over tokens.

    Attributes:
        lengths: int64 ``[num_lengths]``, ascending: tokens of the runs that are looked for.
        depth: the longest.
        tokens: int32 ``[num_texts, width]``.
        num_tokens: int64 ``[num_texts]``.
    """

    def __init__(self, num_texts: int, width: int, lengths: Sequence[int], *, shared: bool, most: int) -> None:
        """
        Args:
            width: tokens that a text may have.
            shared: one table for all texts, so that a run is found in any of them; else each text is by itself.
            most: places of one run that ``find`` follows back.
        """
        self.lengths = np.array(lengths, np.int64)
        self.depth = int(self.lengths[-1])
        self.tokens = np.zeros((num_texts, width), np.int32)
        self.num_tokens = np.zeros(num_texts, np.int64)
        self._width = width
        self._most = most
        self._shared = shared
        in_a_table, most_bits = (width * num_texts, _MOST_SHARED_SLOT_BITS) if shared else (width, _MOST_SLOT_BITS)
        self._slot_bits = min(in_a_table.bit_length(), most_bits)
        num_tables = 1 if shared else num_texts
        dtype = np.int32 if num_texts * width < 2**31 else np.int64
        # A place and one, so that memory that was never written (and costs nothing) says: none.
        self._newest = np.zeros(num_tables * len(lengths) << self._slot_bits, dtype)
        # Per length and place, the place before it with the same hash.
        self._before = np.zeros(len(lengths) * num_texts * width if most > 1 else 0, dtype)
        self._age = np.zeros(num_texts, np.int64)
        self._num_begun = 0
        self._reach = np.arange(self.depth)
        first = np.arange(num_tables * len(lengths)).reshape(num_tables, -1)
        self._first_slot = first << self._slot_bits
        self._powers = np.cumprod(np.full(self.depth, _MULTIPLIER, np.uint64))

    def begin(self, text: int) -> None:
        """``text`` is a new one now, and empty."""
        self._num_begun += 1
        self._age[text] = self._num_begun
        self.num_tokens[text] = 0

    def extend(self, texts: Ints, lengths: Ints, source: Int32, rows: Ints) -> None:
        """Let each of ``texts`` be the first ``lengths`` tokens of its row of ``source``, which begins as it does.

        Learns what the new tokens follow.
        """
        starts = self.num_tokens[texts]
        counts = lengths - starts
        which = np.repeat(np.arange(len(texts)), counts)
        of, positions = texts[which], (lengths - np.cumsum(counts))[which] + np.arange(len(which))
        self.tokens[of, positions] = source[rows[which], positions]
        self.num_tokens[texts] = lengths
        for part in range(0, len(of), _AT_ONCE):
            self._learn(of[part : part + _AT_ONCE], positions[part : part + _AT_ONCE])

    def _learn(self, texts: Ints, positions: Ints) -> None:
        """The runs before some positions, which ascend in each text."""
        all_slots = self._slots(texts, self._runs(texts, positions))
        all_places = np.broadcast_to((texts * self._width + positions)[:, None], all_slots.shape)
        there = positions[:, None] >= self.lengths  # a run that begins before its text is none
        slots, places, which = all_slots[there], all_places[there], np.nonzero(there)[1]
        if len(self._before):
            order = np.argsort(slots, kind="stable")
            slots, places, which = slots[order], places[order], which[order]
            before = self._newest[slots]
            again = np.flatnonzero(slots[1:] == slots[:-1]) + 1
            before[again] = places[again - 1] + 1
            self._before[which * self.tokens.size + places] = before
        self._newest[slots] = places + 1  # of equal slots the last one stays

    def ends(self, texts: Ints) -> tuple[Int32, Ints]:
        """The last tokens of ``texts``, the very last first: int32 ``[len(texts), depth]``; and how many mean anything.

        No text is empty.
        """
        known = self.num_tokens[texts]
        return self._runs(texts, known), np.minimum(known, self.depth)

    def find(self, tables: Ints, ends: Int32, known: Ints) -> tuple[Ints, Ints]:
        """Places behind the longest run (of ``lengths``) that ends as ``ends`` do, the newest first.

        Args:
            tables: where to look for each: a text; any, where the table is shared.
            ends, known: as ``ends()`` gives them.

        Returns:
            places: ``[len(ends), most]``, NONE where there are no more.
            matched: of the same shape: how many tokens before each place agree, at most ``depth``.
        """
        newest = self._newest[self._slots(tables, ends)].astype(np.int64) - 1
        matched = self._matched(newest, ends, known)
        fits = matched >= self.lengths
        longest = len(self.lengths) - 1 - fits[:, ::-1].argmax(axis=1)
        best = np.arange(len(ends)), longest
        at = np.where(fits[best], newest[best], NONE)
        if self._most == 1:
            return at[:, None], matched[best][:, None]
        places = np.full((len(ends), self._most), NONE, np.int64)
        places[:, 0] = at
        chain, age = longest * self.tokens.size, self._ages(at)
        for back in range(1, self._most):
            before = np.where(at >= 0, self._before[chain + at].astype(np.int64) - 1, NONE)
            # A text that took the place of another may close a ring: places only ever get older.
            older = self._ages(before)
            at = np.where(older < age, before, NONE)
            if (at < 0).all():
                break
            places[:, back], age = at, older
        matched = self._matched(places, ends, known)
        same = matched >= self.lengths[longest][:, None]
        return np.where(same, places, NONE), np.where(same, matched, 0)

    def following(self, places: Ints, count: int, *, repeating: bool) -> Ints:
        """The tokens from each place on: ``places.shape + [count]``, NONE behind a text's end.

        Args:
            repeating: behind a text's end it goes on as from the place on: drafts follow themselves in a loop.
        """
        text, position = np.divmod(np.maximum(places, 0), self._width)
        left = (self.num_tokens[text] - position)[..., None]
        ahead: Ints = np.arange(count) % np.maximum(left, 1) if repeating else np.arange(count)
        is_there = (places[..., None] >= 0) & (ahead < left)
        flat = np.where(is_there, places[..., None] + ahead, 0)
        return np.where(is_there, self.tokens.reshape(-1)[flat], NONE)

    def _ages(self, places: Ints) -> Ints:
        """Grow with the time at which a place was learnt; of places in the same table."""
        if not self._shared:
            return places
        return self._age[places // self._width] * self._width + places % self._width

    def _runs(self, texts: Ints, positions: Ints) -> Int32:
        """Tokens before each position, the nearest first: ``[len(texts), depth]``; anything before a text's start."""
        runs: Int32 = self.tokens[texts[:, None], np.maximum(positions[:, None] - 1 - self._reach, 0)]
        return runs

    def _slots(self, tables: Ints, runs: Int32) -> Ints:
        """Where runs (as of ``_runs``) of each length are looked up: ``[len(runs), num_lengths]``."""
        sums = np.cumsum(runs.astype(np.uint64) * self._powers, axis=1)[:, self.lengths - 1]
        sums ^= sums >> np.uint64(29)
        hashes = (sums * _MULTIPLIER) >> np.uint64(_HASH_BITS - self._slot_bits)
        return self._first_slot[0 if self._shared else tables] + hashes.view(np.int64)

    def _matched(self, places: Ints, ends: Int32, known: Ints) -> Ints:
        """Of places ``[rows, n]``: how many tokens before each are those of the row's ``ends``."""
        text, position = np.divmod(places, self._width)
        live = (places >= 0) & (position < self.num_tokens[text])
        most = np.where(live, np.minimum(position, known[:, None]), 0)
        flat = np.maximum(places[..., None] - 1 - self._reach, 0)
        differs = (self.tokens.reshape(-1)[flat] != ends[:, None, :]) | (self._reach >= most[..., None])
        matched: npt.NDArray[np.int64] = np.where(differs.any(axis=-1), differs.argmax(axis=-1), self.depth)
        return matched
