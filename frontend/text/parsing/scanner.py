"""Finds the next of several delimiters in a stream, and says which text certainly belongs to none."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from quire.frontend.text.parsing.patterns import Pattern, Search, named


class FoundDelimiter(NamedTuple):
    """The delimiter ``which``: its text and its named groups."""

    which: int
    text: str
    groups: dict[str, str]


class Scanner:
    """Watches for the leftmost delimiter; of those that begin at the same place, the longest, then the first listed.

    A delimiter is reported as soon as no later text can change it. The text held back is at most a beginning of one.
    """

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        self._text = ""
        self._base = 0
        """Place of the first character of ``_text``, counted from the beginning of the stream."""
        self.place = 0
        """Place of the first character that is held: the number of those that were taken."""
        self._at = 0
        """Place of the next character to look at."""
        self._is_over = False
        """Whether the end of the text has been looked at."""
        self.watch(patterns)

    def watch(self, patterns: Sequence[Pattern]) -> None:
        """Look for other delimiters in the text that is still held, and in later text."""
        self._searches = [Search(pattern) for pattern in patterns]
        self._hot = _first_of(tuple(pattern.first for pattern in patterns)) if patterns else None
        self._at = self.place

    def push(self, text: str) -> None:
        self._text = self._text[self.place - self._base :] + text
        self._base = self.place
        self._is_over = False

    def unread(self, text: str) -> None:
        """Put back text that was taken last. ``watch`` says what to look for in it."""
        self.place -= len(text)
        if self.place < self._base:
            self._text = text[: self._base - self.place] + self._text
            self._base = self.place

    def take(self, size: int) -> str:
        """Remove and return characters that are held."""
        return self._take(self.place + size)

    def next(self, *, last: bool = False) -> tuple[str, FoundDelimiter | None]:
        """Return the text before the next delimiter, and the delimiter if there is one.

        Without a delimiter, more text must be pushed first; ``last``: there will be none. After one, ``watch`` says
        what to look for behind it.
        """
        which = self._run(last=last)
        if which is None:
            return self._take(self._base + len(self._text) if last else self._pending()), None
        match = self._searches[which].match
        assert match is not None
        groups = named(match.marks, self._text, self._base) if match.marks else {}
        before = self._take(match.start)
        return before, FoundDelimiter(which, self._take(match.end), groups)

    def _take(self, end: int) -> str:
        """Remove and return the text up to ``end``."""
        taken = self._text[self.place - self._base : end - self._base]
        self.place = end
        return taken

    def _run(self, *, last: bool) -> int | None:
        """Look at the text up to the next delimiter, and return which one it is."""
        text, base, searches = self._text, self._base, self._searches
        end = base + len(text)
        if self._hot is None:
            self._at = end
            return None
        idle = not any(search.threads or search.match for search in searches)
        while self._at < end:
            if idle:
                hot = self._hot.search(text, self._at - base)
                if hot is None:
                    self._at = end
                    break
                self._at = base + hot.start()
            char = text[self._at - base]
            idle, matched = True, False
            for search in searches:
                search.step(char, self._at)
                matched = matched or search.match is not None
                idle = idle and not search.threads
            self._at += 1
            if matched:
                idle = False
                best = self._best()
                if best is not None and not self._can_change(best):
                    return best
        if last and not self._is_over:
            self._is_over = True
            for search in searches:
                search.step("", end)
        return self._best() if last else None

    def _pending(self) -> int:
        """Return the leftmost place where a delimiter may begin."""
        starts = [search.threads[0].start for search in self._searches if search.threads]
        starts += [search.match.start for search in self._searches if search.match is not None]
        return min([self._at, *starts])

    def _can_change(self, which: int) -> bool:
        """Whether later text may make a delimiter that begins earlier, or at the same place and is longer."""
        match = self._searches[which].match
        assert match is not None
        return any(search.threads and search.threads[0].start <= match.start for search in self._searches)

    def _best(self) -> int | None:
        found = [
            (search.match.start, -search.match.end, which)
            for which, search in enumerate(self._searches)
            if search.match is not None
        ]
        return min(found)[2] if found else None


@lru_cache(maxsize=256)
def _first_of(sources: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(dict.fromkeys(sources)), re.DOTALL)
