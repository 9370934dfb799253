"""A hash table from 64-bit keys to bit masks, in NumPy arrays: all operations work on many keys at once.

Cuckoo hashing with three places per key (Fotakis and others, "Space efficient hash tables with worst case constant
access time", 2003): a look-up reads at most three places, however full the table is, and a removal leaves no mark.
"""

from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
Columns = list[npt.NDArray[Any]]

MAX_BYTES_PER_KEY = 58
"""Bytes of the table per key that are never exceeded, apart from a table of MIN_CAPACITY."""
LEAST_LOAD = 0.28
"""Share of the places that are used at least. More is slower; MAX_BYTES_PER_KEY may need more."""
SPAN = 1.6
"""Most load by least load."""
MIN_CAPACITY = 1024
FEW = 256
"""Changes that are made one by one: an operation on arrays takes as long as some hundred of them."""
MAX_KICKS = 200
"""Rounds of moving keys after which the hash functions change instead. At loads below 0.9 a few are enough."""
_EMPTY = np.uint64(0)
_WORD = np.uint64(0xFFFFFFFF)
_SHIFTS = (np.uint64(32), np.uint64(0), np.uint64(16))
"""Which 32 bits of a mixed key give its three places."""
_HALF = np.uint64(32)
_ALL = 0xFFFFFFFFFFFFFFFF
_FACTOR = 0x9E3779B97F4A7C15
_FACTOR_64 = np.uint64(_FACTOR)
"""Multiplying by it mixes keys (Knuth, volume 3, section 6.4), which need not be as random as hashes are."""


class KeyTable:
    """Owns the keys, and for each key a mask in each of its columns.

    Invariants (``check``): each key is at one of its three places, once; a key has a bit in some column; the share of
    used places is at most ``most_load``, and above MIN_CAPACITY at least ``least_load``.
    """

    def __init__(self, dtype: Any, num_columns: int) -> None:
        """``dtype``: that of the masks, an unsigned integer."""
        self.num_keys = 0
        self._salt, self._salt_64 = 0, np.uint64(0)
        self._allocate(MIN_CAPACITY, np.dtype(dtype), num_columns)

    def _allocate(self, capacity: int, dtype: "np.dtype[Any]", num_columns: int) -> None:
        self.dtype, self.num_columns = dtype, num_columns
        self._size, self._capacity = capacity, np.uint64(capacity)
        self._keys: Keys = np.zeros(capacity, np.uint64)
        self._masks: Columns = [np.zeros(capacity, dtype) for _ in range(num_columns)]
        self._key_view = self._keys.data  # single elements are read four times as fast as from an array
        self._mask_views = [masks.data for masks in self._masks]
        row_bytes = 8 + dtype.itemsize * num_columns
        self.least_load = max(LEAST_LOAD, row_bytes / MAX_BYTES_PER_KEY)
        self.most_load = self.least_load * SPAN

    @property
    def num_bytes(self) -> int:
        return self._keys.nbytes + sum(masks.nbytes for masks in self._masks)

    # ---- look-ups

    def _place(self, keys: Keys, which: int) -> Places:
        """Return the place of each key under the hash function ``which``."""
        mixed = (keys ^ self._salt_64) * _FACTOR_64
        mixed ^= mixed >> _HALF
        word = (mixed >> _SHIFTS[which]) & _WORD
        return ((word * self._capacity) >> _HALF).view(np.int64)

    def _find_places(self, keys: Keys) -> Places:
        """Return the place of each key, or -1."""
        places = self._place(keys, 0)
        missing = np.flatnonzero(self._keys.take(places) != keys)
        for which in (1, 2):
            if not len(missing):
                break
            wanted = keys[missing]
            others = self._place(wanted, which)
            places[missing] = others
            missing = missing[self._keys.take(others) != wanted]
        places[missing] = -1
        return places

    def mask(self, key: int) -> int:
        """Return the bits of a key in any column; 0 for an unknown key."""
        key = key or 1
        size, keys = self._size, self._key_view
        mixed = (key ^ self._salt) * _FACTOR & _ALL  # as in _find_place: a call takes as long as a quarter of this
        high = mixed >> 32
        place = high * size >> 32
        if keys[place] != key:
            mixed ^= high
            place = (mixed & 0xFFFFFFFF) * size >> 32
            if keys[place] != key:
                place = (mixed >> 16 & 0xFFFFFFFF) * size >> 32
                if keys[place] != key:
                    return 0
        found = 0
        for masks in self._mask_views:
            found |= masks[place]
        return found

    def _find_place(self, key: int) -> int:
        """Return the place of a key, or -1."""
        for place in self._places_of(key):
            if self._key_view[place] == key:
                return place
        return -1

    def _places_of(self, key: int) -> tuple[int, int, int]:
        """Return all places of a key, as ``_place`` does."""
        mixed = (key ^ self._salt) * _FACTOR & _ALL
        mixed ^= mixed >> 32
        size = self._size
        return (
            (mixed >> 32) * size >> 32,
            (mixed & 0xFFFFFFFF) * size >> 32,
            (mixed >> 16 & 0xFFFFFFFF) * size >> 32,
        )

    def find(self, keys: Keys) -> Columns:
        """Return the masks of keys by column (``[len(keys)]`` each); 0 for an unknown key."""
        places = self._find_places(_nonzero(keys))
        return [np.where(places < 0, self.dtype.type(0), masks[places]) for masks in self._masks]

    def count(self, column: int, bit: int) -> int:
        """Return the number of keys with this bit. O(size)."""
        if column >= self.num_columns or bit >= 8 * self.dtype.itemsize:
            return 0
        return int(np.count_nonzero(self._masks[column] & self._mask(bit)))

    # ---- changes

    def set_bits(self, column: int, bit: int, keys: Keys, values: npt.NDArray[np.bool_]) -> int:
        """Set or clear a bit of each key; of equal keys, the last counts. Return how many more keys have it then."""
        if len(keys) <= FEW:
            added = sum(map(self._set_bit, repeat(column), repeat(1 << bit), keys.tolist(), values.tolist()))
            self._fit()
            return added
        keys = _nonzero(keys)
        places = self._find_places(keys)
        is_new = (places < 0) & values
        if is_new.any():
            self._insert(_distinct(keys[is_new]))
            places = self._find_places(keys)
        known = np.flatnonzero(places >= 0)
        places, values = places[known], values[known]
        masks, mask = self._masks[column], self._mask(bit)
        touched = _distinct(places)
        before = int(np.count_nonzero(masks[touched] & mask))
        masks[places] = (masks[places] & ~mask) | np.where(values, mask, self.dtype.type(0))  # the last of equals stays
        after = int(np.count_nonzero(masks[touched] & mask))
        self._drop_unused(touched)
        self._fit()
        return after - before

    def _set_bit(self, column: int, mask: int, key: int, value: bool) -> int:
        """Set or clear a bit of one key. Return how many more keys have it then: 1, 0 or -1."""
        key = key or 1
        place = self._find_place(key)
        if place < 0:
            if not value:
                return 0
            self._insert_one(key)
            place = self._find_place(key)
        masks = self._mask_views[column]
        before = masks[place]
        if bool(before & mask) == value:
            return 0
        masks[place] = before ^ mask
        if not value and not any(view[place] for view in self._mask_views):
            self._key_view[place] = 0
            self.num_keys -= 1
        return 1 if value else -1

    def clear_bit(self, column: int, bit: int) -> None:
        """Clear a bit of all keys. O(size)."""
        mask = self._mask(bit)
        touched = np.flatnonzero(self._masks[column] & mask)
        self._masks[column][touched] &= ~mask
        self._drop_unused(touched)
        self._fit()

    def widen(self, dtype: Any, num_columns: int) -> None:
        """Change the masks' type or the number of columns."""
        self._rebuild(len(self._keys), np.dtype(dtype), num_columns)

    def _mask(self, bit: int) -> Any:
        return self.dtype.type(1 << bit)

    def _drop_unused(self, places: Places) -> None:
        """Remove the keys at these places, all different, that have no bit left."""
        used = self._masks[0][places] != 0
        for masks in self._masks[1:]:
            used |= masks[places] != 0
        unused = places[~used]
        self._keys[unused] = _EMPTY
        self.num_keys -= len(unused)

    def _insert(self, keys: Keys) -> None:
        """Insert keys, all different and unknown, without any bit."""
        if self.num_keys + len(keys) > self.most_load * self._size:
            self._rebuild(self._capacity_for(self.num_keys + len(keys)), self.dtype, self.num_columns)
        self.num_keys += len(keys)
        rows: Columns = [np.zeros(len(keys), self.dtype) for _ in self._masks]
        left = self._place_all(keys, rows)
        while left is not None:
            self._change_hashes()
            self._rebuild(self._roomy(self._size), self.dtype, self.num_columns)
            left = self._place_all(*left)

    def _insert_one(self, key: int) -> None:
        if self.num_keys + 1 > self.most_load * self._size:
            self._rebuild(self._capacity_for(self.num_keys + 1), self.dtype, self.num_columns)
        self.num_keys += 1
        left = self._place_one(key, [0] * self.num_columns)
        while left is not None:
            self._change_hashes()
            self._rebuild(self._roomy(self._size), self.dtype, self.num_columns)
            left = self._place_one(*left)

    def _place_all(self, keys: Keys, rows: Columns) -> tuple[Keys, Columns] | None:
        """Write keys with their masks to free places, moving others. Return those for which that did not succeed."""
        for kick in range(MAX_KICKS):
            if len(keys) <= FEW:
                break
            for which in range(3):
                places = self._place(keys, which)
                free = np.flatnonzero(self._keys.take(places) == _EMPTY)
                self._keys[places[free]] = keys[free]
                free = free[self._keys.take(places[free]) == keys[free]]  # of several keys for a place, one is written
                keys, rows = self._write(places, free, keys, rows)
            turn = (keys >> np.uint64(kick * 5 % 61)) % np.uint64(3)  # a fixed order would move keys in circles
            places = np.choose(turn.view(np.int64), [self._place(keys, which) for which in range(3)])
            others = self._keys.take(places)
            self._keys[places] = keys
            won = np.flatnonzero(self._keys.take(places) == keys)
            moved = others[won], [masks.take(places[won]) for masks in self._masks]
            keys, rows = self._write(places, won, keys, rows)
            keys = np.concatenate((keys, moved[0]))
            rows = [np.concatenate(both) for both in zip(rows, moved[1], strict=True)]
        left = [
            self._place_one(key, list(row))
            for key, *row in zip(keys.tolist(), *(r.tolist() for r in rows), strict=True)
        ]
        lost = [each for each in left if each is not None]
        if not lost:
            return None
        lost_rows = zip(*(row for _, row in lost), strict=True)
        return np.array([key for key, _ in lost], np.uint64), [np.array(row, self.dtype) for row in lost_rows]

    def _place_one(self, key: int, row: list[int]) -> tuple[int, list[int]] | None:
        """Write a key with its masks to a free place, moving others. Return one that has no place, with its masks."""
        keys, views = self._key_view, self._mask_views
        for kick in range(MAX_KICKS):
            places = self._places_of(key)
            place = next((place for place in places if not keys[place]), -1)
            if place >= 0:
                keys[place] = key
                for view, masks in zip(views, row, strict=True):
                    view[place] = masks
                return None
            place = places[(key >> kick * 5 % 61) % 3]
            key, keys[place] = keys[place], key
            for column, view in enumerate(views):
                row[column], view[place] = view[place], row[column]
        return key, row

    def _write(self, places: Places, written: Places, keys: Keys, rows: Columns) -> tuple[Keys, Columns]:
        """Write the masks of the keys with the indices ``written``, and return the other keys with their masks."""
        for masks, row in zip(self._masks, rows, strict=True):
            masks[places[written]] = row[written]
        rest = np.ones(len(keys), np.bool_)
        rest[written] = False
        return keys[rest], [row[rest] for row in rows]

    # ---- size

    def _capacity_for(self, num_keys: int) -> int:
        """Return the capacity for a load a little above the least, because a table usually grows."""
        return max(MIN_CAPACITY, int(num_keys / (self.least_load * 1.1)))

    def _roomy(self, capacity: int) -> int:
        """Return the capacity, or a larger one at which keys find places easily."""
        return max(capacity, self._capacity_for(self.num_keys))

    def _fit(self) -> None:
        """Shrink the table when too few of its places are used."""
        size = len(self._keys)
        if size > MIN_CAPACITY and self.num_keys < self.least_load * size:
            self._rebuild(
                max(MIN_CAPACITY, int(self.num_keys / (self.least_load * 1.25))), self.dtype, self.num_columns
            )

    def _rebuild(self, capacity: int, dtype: "np.dtype[Any]", num_columns: int) -> None:
        used = np.flatnonzero(self._keys)
        keys, rows = self._keys[used], [masks[used].astype(dtype) for masks in self._masks]
        rows += [np.zeros(len(keys), dtype) for _ in range(num_columns - len(rows))]
        left: tuple[Keys, Columns] | None = (keys, rows)
        while left is not None:
            self._allocate(capacity, dtype, num_columns)
            left = self._place_all(keys, rows)
            if left is not None:
                self._change_hashes()
                capacity = self._roomy(capacity)

    def _change_hashes(self) -> None:
        """Give all keys other places, at the next ``_rebuild``. A larger table would not help keys that were made to
        have equal places, as an engine could report.
        """
        self._salt = (self._salt + _FACTOR) & _ALL
        self._salt_64 = np.uint64(self._salt)

    def check(self) -> None:
        """Assert the invariants. O(size)."""
        used = np.flatnonzero(self._keys)
        keys = self._keys[used]
        assert len(used) == self.num_keys == len(_distinct(keys))
        places = np.stack([self._place(keys, which) for which in range(3)])
        assert (places == used).any(axis=0).all(), "a key is at none of its places"
        has_bit = np.zeros(len(self._keys), np.bool_)
        for masks in self._masks:
            has_bit |= masks != 0
        assert (has_bit == (self._keys != _EMPTY)).all(), "bits without a key, or a key without bits"
        assert self.num_keys <= self.most_load * self._size
        assert len(self._keys) == MIN_CAPACITY or self.num_bytes <= 64 * self.num_keys


def _nonzero(keys: Keys) -> Keys:
    """Return the keys with 1 for 0, which marks a free place."""
    return keys if keys.all() else np.maximum(keys, np.uint64(1))


def _distinct(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the different values, sorted. (``np.unique`` takes ten times as long.)"""
    ordered = np.sort(values)
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))] if len(ordered) else ordered
