"""Prompt lookup (Saxena, 2023): the tokens after an earlier match of a text's last tokens, by the library or NumPy.

There is no index: the text is scanned from its end backwards, at some GB per second.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.kernels.cpu.native.library import Native

Int32 = npt.NDArray[np.int32]


def prompt_lookup_reference(
    texts: Int32, lengths: Int32, rows: Sequence[int], min_length: int, max_length: int, num_drafts: int
) -> list[list[int]]:
    """Return the tokens after the latest of the longest earlier runs that equal the last tokens.

    Args:
        texts: ``[max_rows, width]``; the first ``lengths[r]`` tokens of row ``r``, at least one, are its text.
        rows: the rows to search.
        min_length, max_length: shortest and longest run length, at least 1.

    Returns:
        ``num_drafts`` drafts for each of ``rows``, or an empty list. If the text ends before there are enough, the
        tokens after the match repeat, which continues a loop in the text.
    """
    drafts: list[list[int]] = []
    for row in rows:
        text = texts[row, : lengths[row]]
        place = _newest_longest(text, min_length, max_length)
        following = np.arange(num_drafts) % max(len(text) - place, 1)
        drafts.append(text[place + following].tolist() if place else [])
    return drafts


def _newest_longest(text: Int32, min_length: int, max_length: int) -> int:
    """Return the index after the run, or 0 without a match."""
    ends = np.flatnonzero(text[:-1] == text[-1:]) + 1
    place = 0
    for count in range(1, max_length + 1):
        if count > 1:
            ends = ends[ends >= count]
            ends = ends[text[ends - count] == text[len(text) - count]]
        if not len(ends):
            break
        if count >= min_length:
            place = int(ends[-1])
    return place


class NativePromptLookup:
    """Prompt lookup by the native library, over the same texts in each call. Rows and lengths are not checked.

    Owns its result arrays, so that their addresses are looked up once: that takes longer than the search.
    """

    def __init__(self, native: Native, texts: Int32, lengths: Int32, max_drafts: int) -> None:
        """``texts``, ``lengths``: contiguous, as for ``prompt_lookup_reference``; referenced, and read in each call."""
        pointer, long = ctypes.c_void_p, ctypes.c_long
        self._call = native.function(
            "quire_prompt_lookup", pointer, long, pointer, pointer, *[long] * 4, *[pointer] * 2
        )
        self._rows = np.zeros(len(texts), np.int64)
        self._drafts = np.zeros(len(texts) * max_drafts, np.int32)
        self._found = np.zeros(len(texts), np.bool_)
        self._kept = texts, lengths
        arrays = (texts, lengths, self._rows, self._drafts, self._found)
        self._stride = texts.shape[1]
        self._at_texts, self._at_lengths, self._at_rows, self._at_drafts, self._at_found = (
            array.ctypes.data for array in arrays
        )

    def look_up(self, rows: Sequence[int], min_length: int, max_length: int, num_drafts: int) -> list[list[int]]:
        """Return ``num_drafts`` drafts for each of ``rows``, or an empty list."""
        count = len(rows)
        self._rows[:count] = rows
        places = (self._at_texts, self._stride, self._at_lengths, self._at_rows)
        self._call(*places, count, min_length, max_length, num_drafts, self._at_drafts, self._at_found)
        flat: list[int] = self._drafts[: count * num_drafts].tolist()
        return [
            flat[index * num_drafts : (index + 1) * num_drafts] if found else []
            for index, found in enumerate(self._found[:count].tolist())
        ]
