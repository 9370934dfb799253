"""The entries of each kind of response: vectors, labels, scores, ranks."""

import base64
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from quire.frontend.http.routes.pooling.response import ENCODE, Entries, PooledHead, PooledUsage
from quire.frontend.http.routes.pooling.run import Rows
from quire.frontend.http.schema.errors import ApiError, ErrorDetail
from quire.frontend.text.pooling.comparisons import Scores, ranking

PART_VALUES = 16_384
"""Values that are written as JSON at once, which takes about a millisecond."""


class VectorEntries(Entries[Rows]):
    """Entries with a vector, or several, in the field of their kind's name.

    ``{"object": "embedding", "index", "embedding"}`` or ``{"object": "pooling", "index", "data"}``.
    """

    def __init__(
        self, answer: PooledHead, kind: str, field: str, encoding_format: str, *, is_list_of_rows: bool
    ) -> None:
        """``is_list_of_rows``: a result is a list of vectors, one for each token."""
        super().__init__(answer)
        self._kind = kind
        self._field = field
        self._is_base64 = encoding_format == "base64"
        self._is_list_of_rows = is_list_of_rows

    def push(self, index: int, outcome: Rows | ApiError) -> Iterator[bytes]:
        entry = {"object": self._kind, "index": index}
        if isinstance(outcome, ApiError):
            yield self._entry(entry | {self._field: None, "error": outcome.detail()})
            return
        begin = self._entry(entry | {self._field: 0}).removesuffix(b"0}")
        if self._is_base64:
            yield b'%b"%b"}' % (begin, base64.b64encode(np.ascontiguousarray(outcome, "<f4").tobytes()))
        elif not self._is_list_of_rows:
            yield b"%b%b}" % (begin, ENCODE(outcome[0].tolist()))
        else:
            yield begin + b"["
            yield from _rows(outcome)
            yield b"]}"


def _rows(rows: Rows) -> Iterator[bytes]:
    """Return the rows as JSON in parts, with commas between them."""
    step = max(PART_VALUES // max(rows.shape[1], 1), 1)
    for begin in range(0, len(rows), step):
        text = ENCODE(rows[begin : begin + step].tolist())[1:-1]
        yield (b"," if begin else b"") + text


class LabelEntries(Entries[Rows]):
    """``{"index", "label", "probs", "num_classes"}``."""

    def __init__(self, answer: PooledHead, labels: Sequence[str]) -> None:
        super().__init__(answer)
        self._labels = labels

    def push(self, index: int, outcome: Rows | ApiError) -> Iterable[bytes]:
        if isinstance(outcome, ApiError):
            return [self._entry({"index": index, "label": None, "probs": None, "error": outcome.detail()})]
        values = outcome[0].tolist()
        label = self._labels[int(outcome[0].argmax())]
        return [self._entry({"index": index, "label": label, "probs": values, "num_classes": len(values)})]


class ScoreEntries(Entries[Rows]):
    """``{"index", "object": "score", "score"}``."""

    def __init__(self, answer: PooledHead, scores: Scores[ApiError]) -> None:
        super().__init__(answer)
        self._scores = scores

    def push(self, index: int, outcome: Rows | ApiError) -> Iterable[bytes]:
        score = self._scores.push(index, outcome)
        if score is None:
            return []
        entry: dict[str, object] = {"index": self._num_written, "object": "score", "score": None}
        if isinstance(score, ApiError):
            return [self._entry(entry | {"error": score.detail()})]
        return [self._entry(entry | {"score": score})]


class RankEntries(Entries[Rows]):
    """``{"id", "model", "results": [...], "usage"}``, the best result first: all results are known before the first.

    A result is ``{"index", "relevance_score"}``, and ``document`` if the client asked for it. Documents that failed are
    at the end, with an error.
    """

    def __init__(
        self, answer: PooledHead, scores: Scores[ApiError], documents: Sequence[str], top_n: int, *, shown: bool
    ) -> None:
        """``top_n``: results that are returned; 0: all. ``shown``: return the documents' texts."""
        super().__init__(answer)
        self._scores = scores
        self._documents = documents
        self._top_n = top_n
        self._shown = shown
        self._found: list[tuple[float, int]] = []
        self._failed: list[tuple[int, ErrorDetail]] = []

    def head(self) -> bytes:
        return ENCODE({"id": self.answer.id, "model": self.answer.model, "results": []}).removesuffix(b"]}")

    def push(self, index: int, outcome: Rows | ApiError) -> Iterable[bytes]:
        score = self._scores.push(index, outcome)
        at = len(self._found) + len(self._failed)
        if isinstance(score, ApiError):
            self._failed.append((at, score.detail()))
        elif score is not None:
            self._found.append((score, at))
        return []

    def tail(self, usage: PooledUsage) -> Iterator[bytes]:
        results = [self._result(at) | {"relevance_score": score} for score, at in ranking(self._found, self._top_n)]
        results += [self._result(at) | {"relevance_score": None, "error": error} for at, error in self._failed]
        for number, result in enumerate(results):
            yield (b"," if number else b"") + ENCODE(result)
        yield b'],"usage":%b}' % ENCODE(usage)

    def _result(self, at: int) -> dict[str, object]:
        return {"index": at} | ({"document": {"text": self._documents[at]}} if self._shown else {})
