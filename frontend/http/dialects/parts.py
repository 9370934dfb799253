"""An answer's text as parts: thoughts, text and tool calls, which each API writes in its own form."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, assert_never

import msgspec

from quire.frontend.text.parsing.answer_parser import CallDelta, CallDropped, Content, Event, Thought

Kind = Literal["thought", "text", "call"]


@dataclass(frozen=True, slots=True)
class Part:
    """What one event adds to a part of the answer.

    Attributes:
        text: added text; the arguments of a call.
        name: the function's name, in the first delta of a call only.
        index: the number of the call.
        id: of the call, if the model has written one.
    """

    kind: Kind
    text: str
    name: str = ""
    index: int = 0
    id: str = ""

    def continues(self, other: "Part | None") -> bool:
        """Whether this delta belongs to the same part of the answer as ``other``."""
        return other is not None and (other.kind, other.index) == (self.kind, self.index)

    def is_of(self, call: "Dropped") -> bool:
        return self.kind == "call" and self.index == call.index


@dataclass(frozen=True, slots=True)
class Dropped:
    """Call ``index`` turned out not to be one; its text follows as text."""

    index: int


def read_parts(events: Iterable[Event]) -> list[Part | Dropped]:
    """Return what some text adds to the answer, from its events.

    A call that began in this text and turns out not to be one is left out.
    """
    found: list[Part | Dropped] = []
    for part in map(_part, events):
        if isinstance(part, Dropped):
            begun = any(isinstance(each, Part) and each.is_of(part) and each.name for each in found)
            found = [each for each in found if not (isinstance(each, Part) and each.is_of(part))]
            if begun:
                continue
        found.append(part)
    return found


def whole_parts(events: Iterable[Event]) -> list[Part]:
    """Return the parts of a whole answer, from its events."""
    return joined(part for part in read_parts(events) if isinstance(part, Part))  # no call can start before it


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return parts of an answer with the texts of all that they consist of."""
    whole: list[tuple[Part, list[str]]] = []
    for part in parts:
        if whole and part.continues(whole[-1][0]):
            whole[-1][1].append(part.text)
        else:
            whole.append((part, [part.text]))
    return [replace(part, text="".join(texts)) for part, texts in whole]


def is_object(text: str) -> bool:
    """Return whether the text is a JSON object, as the arguments of a whole call are."""
    try:
        found: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return isinstance(found, dict)


def _part(event: Event) -> Part | Dropped:
    match event:
        case Content():
            return Part("text", event.text)
        case Thought():
            return Part("thought", event.text)
        case CallDelta():
            return Part("call", event.arguments, event.name or "", event.index, event.id or "")
        case CallDropped():
            return Dropped(event.index)
        case _:
            assert_never(event)
