"""Where an answer thinks, and when its thinking must end: a pure function of the tokens and the two markers.

Worker and scheduler both keep one ``ThinkingState`` per request that needs it, and so agree without a message: the
worker forces the end marker, the scheduler's grammars wait for it.
"""

from collections.abc import Iterable, Sequence


class Marker:
    """One marker of one or more tokens, and how much of it a text has at its end (Knuth, Morris, Pratt, 1977)."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = [int(token) for token in tokens]
        self._borders = [0] * (len(self.tokens) + 1)
        for length in range(2, len(self.tokens) + 1):
            self._borders[length] = self.advance(self._borders[length - 1], self.tokens[length - 1])

    def __len__(self) -> int:
        return len(self.tokens)

    def advance(self, matched: int, token: int) -> int:
        """Tokens of the marker at the end of a text that had ``matched`` of them before ``token``."""
        if matched == len(self.tokens):
            matched = self._borders[matched]
        while matched and self.tokens[matched] != token:
            matched = self._borders[matched]
        return matched + (self.tokens[matched] == token)

    def matched_by(self, text: list[int]) -> int:
        """Tokens of the marker at the end of ``text``; all of them where it stands there."""
        matched = 0
        for token in text[-len(self.tokens) :]:
            matched = self.advance(matched, token)
        return matched

    def next_token(self, matched: int) -> int:
        """What comes after the first ``matched`` tokens; behind a whole marker, what makes it stand there again."""
        return self.tokens[self._borders[matched] if matched == len(self.tokens) else matched]

    def last_in(self, text: list[int]) -> int:
        """Where the last whole marker of ``text`` begins; -1 without one. Runs at C's speed: prompts are long."""
        backwards, wanted = text[::-1], self.tokens[::-1]
        at = -1
        try:
            while True:
                at = backwards.index(wanted[0], at + 1)
                if backwards[at : at + len(wanted)] == wanted:
                    return len(text) - at - len(wanted)
        except ValueError:
            return -1


class ThinkingState:
    """Follows one request's text, token by token. Markers are matched over prompt and answer as one text.

    A prompt leaves a span open when its last start marker begins after its last end marker. In the answer a span opens
    with the last token of a start marker while none is open (in an open one it is a thought like others), and ends with
    the last token of an end marker. Without both markers nothing is ever open.

    Attributes:
        is_open: a span is open now.
        num_tokens: tokens in it behind its start marker, those of a begun end marker too; 0 where none is open.
        num_ended: spans that ended in the answer.
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
        """``token`` is the answer's next one."""
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
        """The token that must come next, where the open span has ``budget`` tokens or more; else None.

        It is the next one of the end marker. Of a marker that the text has begun, only the rest is forced.
        """
        if not self.is_open or self.num_tokens < budget:
            return None
        return self._end.next_token(self._end_matched)

    def copy(self) -> "ThinkingState":
        """Goes its own way from here: for drafts, which may be wrong."""
        other = object.__new__(ThinkingState)
        other._start, other._end = self._start, self._end
        other._start_matched, other._end_matched = self._start_matched, self._end_matched
        other.is_open, other.num_tokens, other.num_ended = self.is_open, self.num_tokens, self.num_ended
        return other
