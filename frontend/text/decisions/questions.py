"""Questions with a fixed list of allowed answers, as clients write them: predicates, choices and scores."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.protocol.errors import InvalidRequest, printable, wrong_value

MAX_QUESTIONS = 400
MAX_ANSWERS = 255
FIELDS = {"predicate": (), "choice": ("choices",), "score": ("levels",)}

Note = Callable[[str, Collection[str]], None]
"""Gets the path of an unknown field, and the paths of the known ones."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    Attributes:
        kind: predicate, choice or score.
        where: its path in the request, such as ``questions[3]``.
        name: as the client calls it.
        text: what the model reads, with the allowed answers.
        answers: these, as the model is to write them: yes and no, the values of a choice, the numbers of levels.
        values: the value of each answer for the client: true and false, those of a choice, the labels of levels.
    """

    kind: str
    where: str
    name: str | None
    text: str
    answers: tuple[str, ...]
    values: tuple[str | bool, ...]


def read_questions(given: Any, note: Note) -> list[Question]:
    """Return the questions of a request; raise InvalidRequest, with the path of the field, if one is malformed."""
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_QUESTIONS:
        raise _wrong_list("questions", f"a list of 1 to {MAX_QUESTIONS} questions", given)
    return [_question(each, f"questions[{i}]", note) for i, each in enumerate(given)]


def _question(given: Any, where: str, note: Note) -> Question:
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(given, dict) and (not isinstance(kind, str) or kind not in FIELDS):
        raise wrong_value(f"{where}.type", f"one of {', '.join(FIELDS)}", kind)
    fields = _members(given, where, ("type", "name", "instructions", *FIELDS.get(str(kind), ())), note)
    name, asked = _text(fields, "name", where), _instructions(fields.get("instructions"), f"{where}.instructions")
    if kind == "predicate":
        text = f"Is this true? {asked}\n\nAllowed answers:\n- yes\n- no"
        return Question("predicate", where, name, text, ("yes", "no"), (True, False))
    values, notes = _options(fields, str(kind), where, note)
    answers = tuple(map(str, range(len(values)))) if kind == "score" else _written(values)
    shown = (
        [f"{answer}: {value}" for answer, value in zip(answers, values, strict=True)] if kind == "score" else answers
    )
    lines = [f"- {answer} ({more})" if more else f"- {answer}" for answer, more in zip(shown, notes, strict=True)]
    return Question(str(kind), where, name, "\n".join([asked, "", "Allowed answers:", *lines]), answers, values)


def _options(
    fields: Mapping[str, Any], kind: str, where: str, note: Note
) -> tuple[tuple[str | bool, ...], list[str | None]]:
    """Return the values of a choice, or the labels of the levels of a score, and their descriptions."""
    (group,), member = FIELDS[kind], "value" if kind == "choice" else "label"
    given, where = fields.get(group), f"{where}.{group}"
    if not isinstance(given, list) or not 2 <= len(given) <= MAX_ANSWERS:
        raise _wrong_list(where, f"a list of 2 to {MAX_ANSWERS} objects", given)
    found: dict[tuple[type, str | bool], str | None] = {}
    for i, each in enumerate(given):
        place = f"{where}[{i}]"
        option = _members(each, place, (member, "description"), note)
        value = option.get(member)
        if not ((isinstance(value, str) and value.strip()) or (kind == "choice" and isinstance(value, bool))):
            allowed = (
                "a string that is not blank, or true or false" if kind == "choice" else "a string that is not blank"
            )
            raise wrong_value(f"{place}.{member}", allowed, value)
        if (type(value), value) in found:
            raise InvalidRequest(f"{place}.{member} must be unique (got {printable(value)} twice)", f"{place}.{member}")
        found[type(value), value] = _text(option, "description", place)
    return tuple(value for _, value in found), list(found.values())


def _written(values: tuple[str | bool, ...]) -> tuple[str, ...]:
    """Return the values as text: as they are, or as JSON if true is there beside "true", or false beside "false"."""
    plain = tuple(value if isinstance(value, str) else str(value).lower() for value in values)
    return plain if len(set(plain)) == len(plain) else tuple(json_text(value, "questions") for value in values)


def _instructions(given: Any, where: str) -> str:
    """Return the text of instructions: a string, or parts with text or JSON."""
    parts = [{"type": "input_text", "text": given}] if isinstance(given, str) else given
    if not isinstance(parts, list) or not parts:
        raise _wrong_list(where, "a string or a list of parts", given)
    texts: list[str] = []
    for i, part in enumerate(parts):
        match part:
            case {"type": "input_text", "text": str(text)}:
                texts.append(text)
            case {"type": "input_json", "data": dict() | list() as data}:
                texts.append(json_text(data, f"{where}[{i}].data"))
            case _:
                kind = part.get("type") if isinstance(part, dict) else part
                allowed = "input_text with text, or input_json with an object or a list as data"
                raise wrong_value(f"{where}[{i}].type", allowed, kind, "unsupported")
    if not (text := "\n".join(texts).strip()):
        raise InvalidRequest(f"{where} must not be blank", where)
    return text


def json_text(value: Any, where: str) -> str:
    """Return JSON of a request as compact JSON."""
    try:
        return msgspec.json.encode(value).decode()
    except (RecursionError, ValueError):
        raise InvalidRequest(f"{where} is nested too deeply, or not valid Unicode text", where) from None


def _members(given: Any, where: str, known: Collection[str], note: Note) -> dict[str, Any]:
    """Return the members of an object that are not null."""
    if not isinstance(given, dict):
        raise wrong_value(where, "an object", given, "invalid_type")
    for name in given.keys() - known:
        note(f"{where}.{name}", [f"{where}.{each}" for each in known])
    return {name: value for name, value in given.items() if value is not None}


def _text(fields: Mapping[str, Any], name: str, where: str) -> str | None:
    value = fields.get(name)
    if not isinstance(value, str | None):
        raise wrong_value(f"{where}.{name}", "a string", value, "invalid_type")
    return value


def _wrong_list(where: str, allowed: str, given: Any) -> InvalidRequest:
    got = f"{len(given)} entries" if isinstance(given, list) else printable(given)
    return InvalidRequest(f"{where} must be {allowed} (got {got})", where)
