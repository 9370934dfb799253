"""From a model's text, in any pieces, to its thoughts, its content and its tool calls."""

from collections.abc import Iterable, Mapping

import msgspec

from quire.frontend.text.parsing.calls import CallText, HeldBlanks, Properties, call_text
from quire.frontend.text.parsing.object_reader import CallPart
from quire.frontend.text.parsing.scanner import FoundDelimiter, Scanner
from quire.frontend.text.parsing.templates import CALLS, THOUGHTS, Format, Region
from quire.frontend.text.parsing.values import Malformed


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
            tools: the properties of each tool that may be called, by name; None for any tool.
            prefix: what the chat template wrote of the answer; it may leave a region open.
            has_only_calls: an answer with a call of one of ``tools`` has no content besides: what follows content, or
                calls another tool, is content.
        """
        self._form = form
        self._tools = tools
        self._has_only_calls = has_only_calls
        self._rest = form.rest
        self._look_for(form.regions)
        self._scanner = Scanner(self._outside)
        self._enter(form.rest)
        self._with_text: set[str] = set()
        """Fields that have had text, after which their ``join`` comes."""
        self._calls: CallText | None = None
        self._raw: list[str] = []
        """The text of the region with calls."""
        self._is_refused = False
        """Whether the region is known to be no call."""
        self._has_skipped = False
        """Whether the region has had a closing in the text of an argument."""
        self._reread_to = 0
        """Place up to which the text is read again, where each closing counts."""
        self._withheld: list[str] | None = None
        """The text of thoughts behind the opening of a call, which ends them unless their own end follows."""
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
        self._early = [region.opens_early for region in self._regions if region.opens_early is not None]

    def finish(self) -> list[Event]:
        """End the text. A region that is still open ends as if it were closed here."""
        return self.push("", last=True)

    def push(self, text: str, *, last: bool = False) -> list[Event]:
        """Return what ``text`` adds. ``last``: it ends the answer."""
        events: list[Event] = []
        self._scanner.push(text)
        while True:
            before, found = self._scanner.next(last=last)
            if before:
                self._take(before, events)
            calls = self._calls
            if calls is not None and (calls.rest is not None or (last and found is None)):
                self._scanner.unread((calls.rest or "") + ("" if found is None else found.text))
                self._leave("", events)
                self._enter(self._rest)
            elif found is None:
                break
            else:
                self._pass(found, events)
        if last and self._withheld is not None:
            self._end_thoughts(self._withheld, events)
        return events

    def _pass(self, found: FoundDelimiter, events: list[Event]) -> None:
        """Close the current region, and open the one whose opening this is."""
        if self._region is self._rest:
            self._open(found, events)
        elif self._calls is not None:
            counts = self._scanner.place <= self._reread_to or self._calls.ends(is_sure="sure" in found.groups)
            if counts:
                self._leave(found.text, events)
                self._enter(self._rest)
            else:
                self._has_skipped = True
                self._take(found.text or self._scanner.take(1), events)
                self._watch()
        elif found.which:  # a call in thoughts
            self._withheld = [found.text]
            self._scanner.watch(self._closings[:1])
        else:
            withheld, self._withheld = self._withheld, None
            if withheld is not None:
                self._take("".join(withheld), events)
            self._enter(self._rest)

    def _open(self, found: FoundDelimiter, events: list[Event]) -> None:
        region = self._rest if found.which >= len(self._regions) else self._regions[found.which]
        if region.name == CALLS and self._has_only_calls and self._rest.name in self._with_text:
            self._take(found.text, events)
            self._look_for(each for each in self._regions if each.name != CALLS)
            self._watch()
            return
        if region.name == CALLS and self._is_header_of_text(found):
            region = self._rest
        if region.name == CALLS:
            self._calls = call_text(region, found.groups, self._tools or {})
            self._raw, self._sent, self._id = [found.text], [], found.groups.get("id")
            self._is_refused = self._has_skipped = False
        self._enter(region)

    def _is_header_of_text(self, found: FoundDelimiter) -> bool:
        """Return whether what opens a call of an unknown tool may open text as well."""
        closes, name = self._rest.closes, found.groups.get("name")
        if closes is None or self._tools is None or name is None or name in self._tools:
            return False
        scanner = Scanner([closes])
        scanner.push(found.text)
        before, header = scanner.next(last=True)
        return header is not None and before + header.text == found.text

    def _enter(self, region: Region) -> None:
        self._region = region
        self._text = _Text(region)
        self._closings = [] if region.closes is None else [region.closes]
        if region.name in THOUGHTS and region.closes is not None and not region.closes.may_be_empty:
            self._closings += self._early
        self._watch()

    def _watch(self) -> None:
        self._scanner.watch(self._outside if self._region is self._rest else self._closings)

    def _take(self, text: str, events: list[Event]) -> None:
        """Add text of the current region."""
        if self._withheld is not None:
            self._withheld.append(text)
            return
        if self._calls is not None:
            pieces = self._calls.push(text)
            self._raw.append(text.removesuffix(self._calls.rest or ""))
            try:
                self._report(pieces, events)
            except Malformed:
                self._is_refused = True
            return
        name = self._region.name
        if not self._text.is_started and name in self._with_text:
            self._say(self._region.join, events)
        self._with_text.add(name)
        self._say(self._text.push(text), events)

    def _leave(self, closing: str, events: list[Event]) -> None:
        calls, self._calls = self._calls, None
        assert calls is not None
        try:
            self._report(calls.finish(is_closed=bool(closing)), events)
            self.has_whole_calls = self.has_whole_calls or bool(self._sent)
        except Malformed:
            events.extend(CallDropped(index) for index in self._sent)
            raw = "".join((*self._raw, closing))
            if self._has_skipped:
                self._reread_to = self._scanner.place
                self._scanner.unread(raw)
            else:
                _add_text(events, Content, raw)
        self._raw = []

    def _report(self, pieces: list[CallPart], events: list[Event]) -> None:
        if self._is_refused:
            raise Malformed
        for number, name, arguments in pieces:
            if name is not None:
                if self._tools is not None and name not in self._tools:
                    raise Malformed
                self._sent.append(self._next_index)
                self._next_index += 1
            events.append(CallDelta(self._sent[number], name, arguments, self._id))
            self._id = None

    def _end_thoughts(self, withheld: list[str], events: list[Event]) -> None:
        """Read what began as a call in thoughts that did not end: it ends them if it is one."""
        text = "".join(withheld)
        reader = AnswerParser(self._form, self._tools)
        reader._next_index = self._next_index
        reader._early = []  # each reader in a reader would read the rest again
        found = reader.push(text) + reader.finish()
        if reader.has_whole_calls:
            events += found
            self.has_whole_calls = True
        else:
            self._withheld = None
            self._take(text, events)

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
        self._blanks = HeldBlanks()
        self._is_inside = False
        self.is_started = False

    def push(self, text: str) -> str:
        self.is_started = True
        if not self._strips:
            return text
        if not self._is_inside:
            text = text.lstrip()
            self._is_inside = bool(text)
        return self._blanks.push(text)
