"""Index of the sequences of the batch's rows, extended as they grow."""

from collections.abc import Sequence

import numpy as np

from quire.protocol.wire.arrays import Int32
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.positions import Ints
from quire.worker_proc.drafts.text_index import TextIndex


class RowTexts:
    """Owns a TextIndex with a separate text per row, so that a request finds only its own tokens.

    A RowStore: moving a row swaps text numbers instead of copying texts.
    """

    def __init__(self, batch: InputBatch, lengths: Sequence[int], *, max_places: int) -> None:
        """``lengths``, ``max_places``: as for ``TextIndex``."""
        self._batch = batch
        max_rows, width = batch.tokens.data.shape
        self.index = TextIndex(max_rows, width, lengths, shared=False, max_places=max_places)
        self._num_prompt = np.zeros(max_rows, np.int64)
        self._text_of = np.arange(max_rows)

    def catch_up(self, rows: Ints) -> Ints:
        """Index the new tokens of ``rows``, and return the text number of each."""
        column, texts = self._batch.tokens, self._text_of[rows]
        self._num_prompt[texts] = self._batch.num_prompt[rows]
        self.index.extend(texts, column.length[rows].astype(np.int64), column.data, rows)
        return texts

    def output(self, row: int) -> Int32:
        """Return the row's output tokens that are indexed."""
        text = self._text_of[row]
        return self.index.tokens[text, self._num_prompt[text] : self.index.num_tokens[text]]

    def move_row(self, source: int, target: int) -> None:
        self._text_of[[source, target]] = self._text_of[[target, source]]

    def clear_row(self, row: int) -> None:
        self.index.reset(int(self._text_of[row]))
        self._num_prompt[self._text_of[row]] = 0
