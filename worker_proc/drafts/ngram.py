"""Prompt lookup: what followed the same last tokens earlier in the request (Saxena, 2023)."""

from collections.abc import Mapping

import numpy as np

from quire.worker_proc.drafts.row_texts import RowTexts
from quire.worker_proc.drafts.text_index import NONE
from quire.worker_proc.input_batch import InputBatch

MOST_LENGTHS = 8
"""Each length costs time and memory for every token."""


class NgramProposer:
    """Drafts from a request's own prompt and answer alone.

    Looks for the longest run of ``prompt_lookup_max`` to ``prompt_lookup_min`` last tokens that stood there before;
    of several places it takes the newest. Where that is so near to the end that the text ends before there are
    enough drafts, they go on by repeating: a loop is drafted to its full length. Of a range of many lengths only
    ``MOST_LENGTHS`` are looked for, the first and the last among them.
    """

    def __init__(self, batch: InputBatch, lookup_min: int, lookup_max: int) -> None:
        lengths = np.arange(lookup_min, lookup_max + 1)
        if len(lengths) > MOST_LENGTHS:
            lengths = np.unique(np.geomspace(lookup_min, lookup_max, MOST_LENGTHS).round().astype(np.int64))
        self._texts = RowTexts(batch, lengths.tolist(), most=1)
        batch.register(self._texts)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        index, rows = self._texts.index, np.fromiter(wanted, np.int64, len(wanted))
        texts = self._texts.catch_up(rows)
        places, _ = index.find(texts, *index.ends(texts))
        drafts = index.following(places[:, 0], max(wanted.values()), repeating=True).tolist()
        return {row: own[:most] for (row, most), own in zip(wanted.items(), drafts, strict=True) if own[0] != NONE}
