"""Penalties by the native library, from lists of counts: a step's cost follows the number of distinct tokens of a text.

``kernels.sampling.penalties`` defines the operation, from counts of the whole vocabulary.
"""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.penalty_rows import PenaltyRows
from quire.kernels.cpu.native.library import Native

Int32 = npt.NDArray[np.int32]
_CPU = torch.device("cpu")
_FIRST_ROOM = 512


class _Counts(ctypes.Structure):
    """``Counts`` of penalties.cpp."""

    _fields_ = (
        ("lengths", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("held", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("num_slots", ctypes.c_long),
        ("room", ctypes.c_long),
        ("vocab", ctypes.c_long),
    )


class _PenaltyCall(ctypes.Structure):
    """``PenaltyCall`` of penalties.cpp."""

    _fields_ = (
        ("counts", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("logits_stride", ctypes.c_long),
        ("slots", ctypes.c_void_p),
        ("repetition", ctypes.c_void_p),
        ("frequency", ctypes.c_void_p),
        ("presence", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("drafts", ctypes.c_void_p),
        ("num_positions", ctypes.c_long),
    )


class ListedCounts:
    """Lists of the distinct tokens of one text per slot, with their counts as in ``kernels.sampling.penalties``.

    Owns four int32 arrays: ``lengths [num_slots]``; ``tokens`` and ``held [num_slots, room]``, whose first
    ``lengths[slot]`` elements are the slot's list of tokens and counts, unordered and without duplicates;
    ``places [num_slots, vocab]``: 1 + a token's index in the slot's list, or 0. ``check`` verifies them. Not
    thread-safe.
    """

    def __init__(self, native: Native, vocab: int) -> None:
        pointer = ctypes.c_void_p
        self._add = native.function("quire_count_tokens", pointer, pointer, pointer, ctypes.c_long, ctypes.c_int)
        self._penalise = native.function("quire_penalties", pointer)
        self._lengths = np.zeros(0, np.int32)
        self._tokens = self._held = np.zeros((0, min(vocab, _FIRST_ROOM)), np.int32)
        self._places = np.zeros((0, vocab), np.int32)
        self._struct = _Counts()
        self._locate()

    def __len__(self) -> int:
        return len(self._lengths)

    def grow(self, num_slots: int) -> None:
        """Grow to at least ``num_slots``, by doubling: memory follows the highest number of simultaneous texts."""
        if num_slots > len(self):
            num_slots = max(num_slots, 2 * len(self))
            self._lengths = _enlarged(self._lengths, (num_slots,))
            self._places = _enlarged(self._places, (num_slots, self._places.shape[1]))
            self._make_room(num_slots, self._tokens.shape[1])

    def set_text(self, slot: int, prompt: npt.NDArray[Any], output: npt.NDArray[Any]) -> None:
        """Replace the slot's content by a new text. The time to clear it follows the old list's length.

        Args:
            prompt, output: tokens; those outside the vocabulary are ignored.
        """
        self._places[slot, self._tokens[slot, : self._lengths[slot]]] = 0
        self._lengths[slot] = 0
        for tokens, are_of_prompt in ((prompt, True), (output, False)):
            slots = torch.full((len(tokens),), slot)
            self._count(slots, torch.from_numpy(tokens.astype(np.int64)), are_of_prompt)

    def add(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count ``tokens[i]`` once more in the output of ``slots[i]``; both int64 ``[num_tokens]``, duplicates allowed.

        Raises:
            ValueError: a tensor does not have this shape or dtype, or is not on the CPU.
        """
        dims = {"num_tokens": len(tokens)}
        check_tensor("tokens", tokens, dims, (torch.int64,), _CPU)
        check_tensor("slots", slots, dims, (torch.int64,), _CPU)
        self._count(slots, tokens, are_of_prompt=False)

    def penalise(self, logits: torch.Tensor, rows: PenaltyRows) -> None:
        """As ``kernels.sampling.penalties.apply_penalties``, from these counts; ignores slots and drafts out of range.

        Raises:
            ValueError: a tensor does not have that shape or dtype, or is not on the CPU, or slots are not int64.
        """
        dims = {"num_positions": None, "vocab": self._places.shape[1]}
        check_tensor("logits", logits, dims, (torch.float32,), _CPU)
        rows.check(len(logits), _CPU, (torch.int64,))
        addresses = (tensor.data_ptr() for tensor in rows)
        call = _PenaltyCall(self._at, logits.data_ptr(), logits.stride(0), *addresses, len(logits))
        self._penalise(ctypes.addressof(call))

    def dense(self) -> torch.Tensor:
        """Return a copy of the counts in the form of ``kernels.sampling.penalties``: int32 ``[num_slots, vocab]``."""
        counts = np.zeros_like(self._places)
        for slot, length in enumerate(self._lengths.tolist()):
            counts[slot, self._tokens[slot, :length]] = self._held[slot, :length]
        return torch.from_numpy(counts)

    def check(self) -> None:
        """Raise AssertionError unless lists and places agree."""
        for slot, length in enumerate(self._lengths.tolist()):
            listed, there = self._tokens[slot, :length], np.flatnonzero(self._places[slot])
            assert np.array_equal(np.sort(listed), there), f"slot {slot}: tokens {listed} listed, places of {there} set"
            assert np.array_equal(self._places[slot, listed], np.arange(1, length + 1)), f"slot {slot}: wrong places"
            assert self._held[slot, :length].all(), f"slot {slot}: listed token with count 0"

    def _count(self, slots: torch.Tensor, tokens: torch.Tensor, are_of_prompt: bool) -> None:
        if not len(tokens):
            return
        num_slots, room = self._tokens.shape
        longest = int(self._lengths.max())
        if longest + len(tokens) > room:
            needed, vocab = longest + len(torch.unique(tokens)), self._places.shape[1]
            if min(needed, vocab) > room:
                self._make_room(num_slots, min(max(needed, 2 * room), vocab))
        self._add(self._at, slots.data_ptr(), tokens.data_ptr(), len(tokens), are_of_prompt)

    def _make_room(self, num_slots: int, room: int) -> None:
        self._tokens = _enlarged(self._tokens, (num_slots, room))
        self._held = _enlarged(self._held, (num_slots, room))
        self._locate()

    def _locate(self) -> None:
        arrays = (self._lengths, self._tokens, self._held, self._places)
        addresses = (array.ctypes.data for array in arrays)
        self._struct = _Counts(*addresses, *self._tokens.shape, self._places.shape[1])
        self._at = ctypes.addressof(self._struct)


def _enlarged(old: Int32, shape: tuple[int, ...]) -> Int32:
    """Copy to a larger array, padded with zeros; untouched zero pages take no memory."""
    new = np.zeros(shape, np.int32)
    new[tuple(slice(size) for size in old.shape)] = old
    return new
