"""From a model's text, in any pieces, to its thoughts, its content and its tool calls."""

from collections.abc import Iterable, Mapping

import msgspec

from quire.launch.text.parsing.calls import CallText, NoCalls, Properties, call_text
from quire.launch.text.parsing.object_reader import Piece
from quire.launch.text.parsing.scanner import Found, Scanner
from quire.launch.text.parsing.templates import CALLS, THOUGHTS, Format, Region
from quire.launch.text.parsing.values import Malformed


class Content(msgspec.Struct, frozen=True):
    text: str


class Thought(msgspec.Struct, frozen=True):
    text: str


class CallDelta(msgspec.Struct, frozen=True):
    """Text added to the arguments of call ``index``.

    Only the first delta of a call has its ``name``, and the ``id`` that the model wrote before the arguments, if any.
    """

    index: int
    name: str | None
    arguments: str
    id: str | None = None


class CallDropped(msgspec.Struct, frozen=True):
    """Call ``index``, whose deltas were reported, turned out not to be one; its text follows as content."""

    index: int


Event = Content | Thought | CallDelta | CallDropped


class AnswerParser:
    """Parser of one answer. All its events together do not depend on how the text is split.

    No character is lost but delimiters, and blanks around regions that strip them.
    """

    def __init__(
        self,
        form: Format,
        tools: Mapping[str, Properties] | None = None,
        prefix: str = "",
        *,
        has_only_calls: bool = False,
    ) -> None:
        """
        Args:
            prefix: what the chat template wrote of the answer; it may leave a region open.
            has_only_calls: an answer with a call of one of ``tools`` has no content besides: what follows content, or
                calls another tool, is content.
        """
        self._tools = tools or {}
        self._has_only_calls = has_only_calls
        self._rest = form.rest
        self._look_for(form.regions)
        self._scanner = Scanner(self._outside)
        self._region = form.rest
        self._text = _Text(form.rest)
        self._with_text: set[str] = set()
        """Fields that have had text, after which their ``join`` comes."""
        self._calls: CallText | None = None
        self._raw: list[str] = []
        """The text of the region with calls."""
        self._sent: list[int] = []
        """The indices of the calls that this region has reported, by their numbers."""
        self._next_index = 0
        self._id: str | None = None
        """The id of the next call, if the opening of the region has one."""
        self.has_whole_calls = False
        """Whether a region of well-formed calls has ended."""
        if prefix:
            self.push(prefix)
            self._with_text.clear()
            self._next_index = 0

    def _look_for(self, regions: Iterable[Region]) -> None:
        self._regions = sorted(regions, key=lambda region: region.name)
        opens = [region.opens for region in self._regions if region.opens is not None]
        self._outside = opens if self._rest.closes is None else [*opens, self._rest.closes]

    def push(self, text: str) -> list[Event]:
        return self._read(text, last=False)

    def finish(self) -> list[Event]:
        """End the text. A region that is still open ends as if it were closed here."""
        return self._read("", last=True)

    def _read(self, text: str, *, last: bool) -> list[Event]:
        events: list[Event] = []
        self._scanner.push(text)
        while True:
            before, found = self._scanner.next(last=last)
            if before:
                self._take(before, events)
            if found is None:
                break
            self._pass(found, events)
        if last:
            self._leave("", events)
        return events

    def _pass(self, found: Found, events: list[Event]) -> None:
        """Close the current region, and open the one whose opening this is."""
        if self._region is not self._rest:
            self._leave(found.text, events)
            self._enter(self._rest)
            self._scanner.watch(self._outside)
            return
        self._leave("", events)
        if found.which >= len(self._regions):
            self._enter(self._rest)
            self._scanner.watch(self._outside)
            return
        region = self._regions[found.which]
        if region.name == CALLS and self._has_only_calls and self._rest.name in self._with_text:
            self._take(found.text, events)
            self._look_for(each for each in self._regions if each.name != CALLS)
            self._scanner.watch(self._outside)
            return
        self._enter(region)
        if region.name == CALLS:
            self._calls = call_text(region, found.groups, self._tools)
            self._raw, self._sent, self._id = [found.text], [], found.groups.get("id")
        self._scanner.watch([] if region.closes is None else [region.closes])

    def _enter(self, region: Region) -> None:
        self._region = region
        self._text = _Text(region)

    def _take(self, text: str, events: list[Event]) -> None:
        """Add text of the current region."""
        if self._calls is not None:
            self._raw.append(text)
            try:
                self._report(self._calls.push(text), events)
            except Malformed:
                self._calls = NoCalls()
            return
        name = self._region.name
        if not self._text.is_started and name in self._with_text:
            self._say(self._region.join, events)
        self._with_text.add(name)
        self._say(self._text.push(text), events)

    def _leave(self, closing: str, events: list[Event]) -> None:
        calls, self._calls = self._calls, None
        if calls is None:
            return
        try:
            self._report(calls.finish(), events)
            self.has_whole_calls = self.has_whole_calls or bool(self._sent)
        except Malformed:
            events.extend(CallDropped(index) for index in self._sent)
            _add_text(events, Content, "".join((*self._raw, closing)))
        self._raw = []

    def _report(self, pieces: list[Piece], events: list[Event]) -> None:
        for number, name, arguments in pieces:
            if name is not None:
                if self._has_only_calls and name not in self._tools:
                    raise Malformed
                self._sent.append(self._next_index)
                self._next_index += 1
            events.append(CallDelta(self._sent[number], name, arguments, self._id))
            self._id = None

    def _say(self, text: str, events: list[Event]) -> None:
        if text:
            _add_text(events, Thought if self._region.name in THOUGHTS else Content, text)


def _add_text(events: list[Event], kind: type[Content] | type[Thought], text: str) -> None:
    last = events[-1] if events else None
    if isinstance(last, Content | Thought) and type(last) is kind:
        events[-1] = kind(last.text + text)
    else:
        events.append(kind(text))


class _Text:
    """The text of one region, without blanks around it if the region strips them."""

    def __init__(self, region: Region) -> None:
        self._strips = region.strips
        self._held = ""
        self._is_inside = False
        self.is_started = False

    def push(self, text: str) -> str:
        self.is_started = True
        if not self._strips:
            return text
        text = self._held + text
        if not self._is_inside:
            text = text.lstrip()
            self._is_inside = bool(text)
        kept = text.rstrip()
        self._held = text[len(kept) :] if self._is_inside else ""
        return kept
