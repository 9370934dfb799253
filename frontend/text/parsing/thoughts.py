"""Which text of an answer is thoughts, so that stop strings act on the rest alone."""

from quire.frontend.text.parsing.scanner import Scanner
from quire.frontend.text.parsing.templates import CALLS, THOUGHTS, Format, Region


class Thoughts:
    """Cuts one answer into pieces, of which stop strings act on the content and the calls."""

    def __init__(self, form: Format, prefix: str = "") -> None:
        """``prefix``: what the chat template wrote of the answer; it may leave thoughts open."""
        self._regions = sorted(form.regions, key=lambda region: region.name)
        opens = [region.opens for region in self._regions if region.opens is not None]
        self._outside = opens if form.rest.closes is None else [*opens, form.rest.closes]
        self._region: Region | None = None
        self._scanner = Scanner(self._outside)
        self.push(prefix)

    def push(self, text: str, *, last: bool = False) -> list[tuple[str, bool]]:
        """Return the pieces that ``text`` completes, each with whether stop strings act on it.

        They do not act on delimiters, except on those of calls. ``last``: ``text`` ends the answer.
        """
        pieces: list[tuple[str, bool]] = []
        self._scanner.push(text)
        while True:
            before, found = self._scanner.next(last=last)
            if before:
                pieces.append((before, self._region is None or self._region.name not in THOUGHTS))
            if found is None:
                return pieces
            left = self._region
            self._region = self._regions[found.which] if left is None and found.which < len(self._regions) else None
            pieces.append((found.text, any(each is not None and each.name == CALLS for each in (left, self._region))))
            closes = None if self._region is None else self._region.closes
            self._scanner.watch(self._outside if self._region is None else [] if closes is None else [closes])
