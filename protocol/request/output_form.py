"""The form of an output: fixed texts, JSON and free text, in sequence and by choice.

It has only what the grammars of all libraries can express: each backend translates it. Forms are built by this program,
never by a client.
"""

from collections.abc import Iterator, Sequence
from typing import Union

import msgspec


class Text(msgspec.Struct, frozen=True, tag="text"):
    """This text, which is not empty."""

    text: str


class Special(msgspec.Struct, frozen=True, tag="special"):
    """One special token."""

    token_id: int


class Json(msgspec.Struct, frozen=True, tag="json"):
    """JSON that matches a schema, which is given as text."""

    schema: str


class FreeText(msgspec.Struct, frozen=True, tag="free"):
    """Any text without special tokens, up to and including the first ``end``."""

    end: Text | Special


class InOrder(msgspec.Struct, frozen=True, tag="in_order"):
    """All parts, of which there is at least one, one after the other."""

    parts: "Sequence[Form]"


class OneOf(msgspec.Struct, frozen=True, tag="one_of"):
    """One of the parts, of which there is at least one."""

    parts: "Sequence[Form]"


class Repeat(msgspec.Struct, frozen=True, tag="repeat"):
    """The part, any number of times (also none); at most once if ``is_once``."""

    part: "Form"
    is_once: bool = False


Form = Union[Text, Special, Json, FreeText, InOrder, OneOf, Repeat]  # noqa: UP007 - the classes name it


def schemas_in(form: Form) -> Iterator[str]:
    """Yield the schemas of all JSON in a form."""
    match form:
        case Json(schema):
            yield schema
        case InOrder(parts) | OneOf(parts):
            for part in parts:
                yield from schemas_in(part)
        case Repeat(part):
            yield from schemas_in(part)
