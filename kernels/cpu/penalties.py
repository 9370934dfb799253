"""Penalties by the native library: counts that are listed, so that a step costs what a text has of distinct tokens.

``kernels.sampling.penalties`` writes down what is computed, from counts of the whole vocabulary.
"""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.cpu.native import Native

Int32 = npt.NDArray[np.int32]
_CPU = torch.device("cpu")
_FIRST_ROOM = 512


class _Counts(ctypes.Structure):
    """As in penalties.cpp."""

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
    """As in penalties.cpp."""

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
    """Of each slot the tokens that one text has, each with its count as in ``kernels.sampling.penalties``.

    Owns four int32 arrays: ``lengths [num_slots]``; ``tokens`` and ``held [num_slots, room]``, of which the first
    ``lengths[slot]`` of each slot are its list, in no order and none twice; ``places [num_slots, vocab]``, 1 + where a
    token stands in its slot's list, 0 where it does not. ``check`` says so. Not to be called by two threads at a time.
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
        """To ``num_slots`` at least, by doubling: memory follows the most texts that were there at a time."""
        if num_slots > len(self):
            num_slots = max(num_slots, 2 * len(self))
            self._lengths = _enlarged(self._lengths, (num_slots,))
            self._places = _enlarged(self._places, (num_slots, self._places.shape[1]))
            self._make_room(num_slots, self._tokens.shape[1])

    def begin(self, slot: int, prompt: npt.NDArray[Any], answer: npt.NDArray[Any]) -> None:
        """The slot is a new text's. What was there goes at the cost of its list.

        Args:
            prompt, answer: integers; those that the vocabulary does not have are left out.
        """
        self._places[slot, self._tokens[slot, : self._lengths[slot]]] = 0
        self._lengths[slot] = 0
        for tokens, are_of_prompt in ((prompt, True), (answer, False)):
            slots = torch.full((len(tokens),), slot)
            self._count(slots, torch.from_numpy(tokens.astype(np.int64)), are_of_prompt)

    def add(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """One more of ``tokens[i]`` in the answer of ``slots[i]``: int64 ``[num_tokens]`` both; any of them repeatedly.

        Raises:
            ValueError: a tensor does not have the shape, dtype or place above.
        """
        dims = {"num_tokens": len(tokens)}
        check_tensor("tokens", tokens, dims, (torch.int64,), _CPU)
        check_tensor("slots", slots, dims, (torch.int64,), _CPU)
        self._count(slots, tokens, are_of_prompt=False)

    def penalise(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        repetition: torch.Tensor,
        frequency: torch.Tensor,
        presence: torch.Tensor,
        offsets: torch.Tensor,
        drafts: torch.Tensor,
    ) -> None:
        """``kernels.sampling.penalties.apply_penalties`` from these counts; slots and drafts that do not exist are left
        out.

        Raises:
            ValueError: a tensor does not have the shape, dtype or place there, or slots are not int64.
        """
        dims = {"num_positions": None, "vocab": self._places.shape[1]}
        check_tensor("logits", logits, dims, (torch.float32,), _CPU)
        floats = {"repetition": repetition, "frequency": frequency, "presence": presence}
        vectors = {"slots": slots, **floats, "offsets": offsets, "drafts": drafts}
        for name, vector in vectors.items():
            dtype = torch.float32 if name in floats else torch.int64
            check_tensor(name, vector, {"num_positions": len(logits)}, (dtype,), _CPU)
        addresses = (vector.data_ptr() for vector in vectors.values())
        call = _PenaltyCall(self._at, logits.data_ptr(), logits.stride(0), *addresses, len(logits))
        self._penalise(ctypes.addressof(call))

    def dense(self) -> torch.Tensor:
        """The counts as ``kernels.sampling.penalties`` has them: int32 ``[num_slots, vocab]``, a copy."""
        counts = np.zeros_like(self._places)
        for slot, length in enumerate(self._lengths.tolist()):
            counts[slot, self._tokens[slot, :length]] = self._held[slot, :length]
        return torch.from_numpy(counts)

    def check(self) -> None:
        """Raise AssertionError unless lists and places agree."""
        for slot, length in enumerate(self._lengths.tolist()):
            listed, there = self._tokens[slot, :length], np.flatnonzero(self._places[slot])
            assert np.array_equal(np.sort(listed), there), f"slot {slot} lists {listed}, its places are of {there}"
            assert np.array_equal(self._places[slot, listed], np.arange(1, length + 1)), f"places of slot {slot}"
            assert self._held[slot, :length].all(), f"slot {slot} lists a token that it does not have"

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
    """With zeros behind. Memory that nobody has written to takes no room."""
    new = np.zeros(shape, np.int32)
    new[tuple(slice(size) for size in old.shape)] = old
    return new
