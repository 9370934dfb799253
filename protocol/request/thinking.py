"""Tracks thinking spans and their token budget: a pure function of the tokens and the two markers.

Worker and scheduler each keep a ``ThinkingState`` per request that needs one, and agree without a message: the worker
forces the end marker, and the scheduler applies grammars only after it.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

_NO_TOKEN = -1


class Marker:
    """A marker of one or more tokens, matched incrementally at the end of a text (Knuth, Morris, Pratt, 1977)."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = [int(token) for token in tokens]
        self._borders = [0] * (len(self.tokens) + 1)
        for length in range(2, len(self.tokens) + 1):
            self._borders[length] = self.advance(self._borders[length - 1], self.tokens[length - 1])

    def __len__(self) -> int:
        return len(self.tokens)

    def advance(self, matched: int, token: int) -> int:
        """Return the number of marker tokens matched after ``token``, given ``matched`` before it."""
        if matched == len(self.tokens):
            matched = self._borders[matched]
        while matched and self.tokens[matched] != token:
            matched = self._borders[matched]
        return matched + (self.tokens[matched] == token)

    def matched_by(self, text: list[int]) -> int:
        """Return the number of marker tokens at the end of ``text``; the marker's length if all are there."""
        matched = 0
        for token in text[-len(self.tokens) :]:
            matched = self.advance(matched, token)
        return matched

    def next_token(self, matched: int) -> int:
        """Return the marker token that follows ``matched`` tokens; after a whole marker, the token that continues to a
        second one.
        """
        return self.tokens[self._borders[matched] if matched == len(self.tokens) else matched]

    def last_in(self, text: list[int]) -> int:
        """Return the start of the last whole marker in ``text``, or -1. Uses list search, because prompts are long."""
        backwards, wanted = text[::-1], self.tokens[::-1]
        at = -1
        try:
            while True:
                at = backwards.index(wanted[0], at + 1)
                if backwards[at : at + len(wanted)] == wanted:
                    return len(text) - at - len(wanted)
        except ValueError:
            return -1


def without_plain(prompt: npt.ArrayLike, spans: Iterable[Sequence[int]]) -> npt.NDArray[np.int32]:
    """Return the prompt for a search for markers: without the tokens of ``SamplingParams.plain_spans``.

    A vocabulary may have one spelling only of a marker, so that its tokens do not show that it is text of a user.
    """
    searched = np.array(prompt, np.int32)
    for begin, end in spans:
        searched[max(begin, 0) : max(end, 0)] = _NO_TOKEN
    return searched


class ThinkingState:
    """Follows one request's text token by token, with markers matched over prompt and output as one text.

    A prompt leaves a span open if its last start marker begins after its last end marker. In the output, a span opens
    with the last token of a start marker while none is open (inside a span, a start marker is ordinary text), and ends
    with the last token of an end marker. Without both markers configured, no span ever opens.

    Attributes:
        is_open: whether a span is open.
        num_tokens: tokens in the open span after its start marker, including those of a partial end marker; 0 if none
            is open.
        num_ended: number of spans that ended in the output.
    """

    __slots__ = ("_end", "_end_matched", "_start", "_start_matched", "is_open", "num_ended", "num_tokens")

    def __init__(self, start: Sequence[int], end: Sequence[int], prompt: Sequence[int]) -> None:
        both = len(start) > 0 and len(end) > 0
        self._start = Marker(start) if both else None
        self._end = Marker(end)
        self._start_matched = 0
        self._end_matched = 0
        self.is_open = False
        self.num_tokens = 0
        self.num_ended = 0
        if self._start is not None:
            self._read_prompt(self._start, list(prompt))

    def _read_prompt(self, start: Marker, prompt: list[int]) -> None:
        self._start_matched = start.matched_by(prompt)
        self._end_matched = self._end.matched_by(prompt)
        opened = start.last_in(prompt)
        self.is_open = opened > self._end.last_in(prompt)
        if self.is_open:
            self.num_tokens = len(prompt) - opened - len(start)

    def advance(self, token: int) -> None:
        """Process the next token of the output."""
        start = self._start
        if start is None:
            return
        self._start_matched = start.advance(self._start_matched, token)
        self._end_matched = self._end.advance(self._end_matched, token)
        if not self.is_open:
            self.is_open = self._start_matched == len(start)
        elif self._end_matched == len(self._end):
            self.is_open = False
            self.num_tokens = 0
            self.num_ended += 1
        else:
            self.num_tokens += 1

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.advance(token)

    def forced_token(self, budget: int) -> int | None:
        """Return the next token of the end marker if the open span has at least ``budget`` tokens, or None.

        If the text ends with a partial end marker, only the rest of it is forced.
        """
        if not self.is_open or self.num_tokens < budget:
            return None
        return self._end.next_token(self._end_matched)

    def copy(self) -> "ThinkingState":
        """Return an independent copy, which can follow drafts that may be rejected."""
        other = object.__new__(ThinkingState)
        other._start, other._end = self._start, self._end
        other._start_matched, other._end_matched = self._start_matched, self._end_matched
        other.is_open, other.num_tokens, other.num_ended = self.is_open, self.num_tokens, self.num_ended
        return other
