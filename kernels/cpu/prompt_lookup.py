"""What followed the last tokens of a text where they stood before in it: by the native library, or by NumPy.

Prompt lookup (Saxena, 2023) without an index: the text is looked through, newest first, at some GB per second.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.kernels.cpu.native import Native

Int32 = npt.NDArray[np.int32]


def prompt_lookup_reference(
    texts: Int32, lengths: Int32, rows: Sequence[int], least: int, most: int, num_drafts: int
) -> list[list[int]]:
    """What follows the newest of the longest runs that are equal to the last tokens.

    Args:
        texts: ``[max_rows, width]``; of row ``r`` the first ``lengths[r]`` tokens, one at least, are its text.
        rows: those that are looked through.
        least, most: shortest and longest run, from 1.

    Returns:
        Of each of ``rows`` its ``num_drafts`` drafts, or none. Where the text ends before there are enough, what
        followed is repeated: a loop goes on as a loop.
    """
    drafts: list[list[int]] = []
    for row in rows:
        text = texts[row, : lengths[row]]
        place = _newest_longest(text, least, most)
        following = np.arange(num_drafts) % max(len(text) - place, 1)
        drafts.append(text[place + following].tolist() if place else [])
    return drafts


def _newest_longest(text: Int32, least: int, most: int) -> int:
    """The place behind the run; 0: there is none."""
    ends = np.flatnonzero(text[:-1] == text[-1:]) + 1
    place = 0
    for count in range(1, most + 1):
        if count > 1:
            ends = ends[ends >= count]
            ends = ends[text[ends - count] == text[len(text) - count]]
        if not len(ends):
            break
        if count >= least:
            place = int(ends[-1])
    return place


class NativePromptLookup:
    """The same by the native library, over the same texts each time; not checked: rows and lengths that exist.

    Owns the memory that it writes to, so that a call takes no addresses of its own: they cost more than the search.
    """

    def __init__(self, native: Native, texts: Int32, lengths: Int32, most_drafts: int) -> None:
        """``texts``, ``lengths``: contiguous, as for ``prompt_lookup_reference``; kept, and read at each call."""
        pointer, long = ctypes.c_void_p, ctypes.c_long
        self._call = native.function(
            "quire_prompt_lookup", pointer, long, pointer, pointer, *[long] * 4, *[pointer] * 2
        )
        self._rows = np.zeros(len(texts), np.int64)
        self._drafts = np.zeros(len(texts) * most_drafts, np.int32)
        self._found = np.zeros(len(texts), np.bool_)
        self._kept = texts, lengths
        arrays = (texts, lengths, self._rows, self._drafts, self._found)
        self._stride = texts.shape[1]
        self._at_texts, self._at_lengths, self._at_rows, self._at_drafts, self._at_found = (
            array.ctypes.data for array in arrays
        )

    def look_up(self, rows: Sequence[int], least: int, most: int, num_drafts: int) -> list[list[int]]:
        """Of each of ``rows`` its ``num_drafts`` drafts, or none."""
        count = len(rows)
        self._rows[:count] = rows
        places = (self._at_texts, self._stride, self._at_lengths, self._at_rows)
        self._call(*places, count, least, most, num_drafts, self._at_drafts, self._at_found)
        flat: list[int] = self._drafts[: count * num_drafts].tolist()
        return [
            flat[index * num_drafts : (index + 1) * num_drafts] if found else []
            for index, found in enumerate(self._found[:count].tolist())
        ]
