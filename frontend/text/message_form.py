"""The form of messages that one chat template demands, found by trial renderings.

A template refuses some forms and silently leaves out the text of others, so only a rendering can tell. Templates of
models that read images take parts in some messages and strings in others.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from quire.frontend.text.control_text import mark_special
from quire.protocol.errors import InvalidRequest

Messages = list[dict[str, Any]]
Trial = Callable[[Messages, Mapping[str, Any]], str | None]
"""Renders messages with template variables; None if the template refuses them or fails."""

INSTRUCTIONS = ("system", "developer")
_TOOL = {"name": "quire", "description": "", "parameters": {"type": "object", "properties": {}}}
_VARIABLES = {"tools": [{"type": "function", "function": _TOOL}], "add_generation_prompt": True}
_TURNS = """[{"role": "user", "content": "-"}, {"role": "assistant", "content": null, "tool_calls": [{"id": "ID",
"type": "function", "function": {"name": "quire", "arguments": {"quire_key": "quire value"}}}]},
{"role": "tool", "tool_call_id": "ID", "name": "quire", "content": "-"}]"""
_MISWRITTEN = re.compile(r"""{'quire_key|\\"quire_key""")
"""An object as Python prints it, or JSON in a string."""
_TEXT = "quire-text"
_TEXT_PART, _IMAGE_PART = {"type": "text", "text": _TEXT}, {"type": "image"}
PRINTED_PART = re.compile(r"""['"]type['"]: ?['"](text|image)""")
"""A part as Python prints it, or as JSON."""


class MessageForm:
    """What one template can write. Trials are made when the first conversation needs them."""

    def __init__(self, source: str, trial: Trial) -> None:
        self._try_as_is = trial
        self._knows_parts = re.search("""["']image""", source) is not None
        self._roles_of_parts: dict[str, tuple[bool, bool]] = {}
        # A template that writes the name of any role knows no developer: the model was not trained with that name.
        knows_developer = re.search("""["']developer["']""", source)
        self._ways: tuple[Callable[[Messages], Messages], ...]
        self._ways = (list, _as_system, _in_front) if knows_developer else (_as_system, _in_front)

    def fit(self, messages: Messages, values: Mapping[str, Any]) -> Messages:
        """Return the messages in the form that the template demands. ``values``: the request's template variables."""
        if any(message.get("tool_calls") for message in messages):
            messages = [_with_calls(message, *self._calls) for message in messages]
        roles = [message.get("role") for message in messages]
        # One system message before other turns needs no trial.
        if any(role in INSTRUCTIONS for role in roles[1:]) or roles in (["system"], ["developer", *roles[1:]]):
            messages = self._place_instructions(messages, values)
        return self._in_parts(messages) if self._knows_parts else messages

    def _trial(self, messages: Messages, values: Mapping[str, Any]) -> str | None:
        return self._try_as_is(self._in_parts(messages) if self._knows_parts else messages, values)

    def _in_parts(self, messages: Messages) -> Messages:
        """Return the messages with text as parts for roles that demand them, and images where the template takes them:
        those of a tool's results are moved to a user's message behind these, if need be."""
        made: Messages = []
        moved: list[dict[str, str]] = []
        for message in messages:
            role, content = message.get("role", ""), message.get("content")
            wants_parts, takes_images = self._parts_of(role)
            if moved and role != "tool":
                made.append({"role": "user", "content": moved})
                moved = []
            if role == "tool" and isinstance(content, list) and not takes_images:
                texts = [part["text"] for part in content if part["type"] == "text"]
                moved = [*moved, *[_IMAGE_PART] * (len(content) - len(texts))]
                content = "\n".join(texts)
            if wants_parts and isinstance(content, str):
                content = [{"type": "text", "text": content}]
            made.append(message if content is message.get("content") else {**message, "content": content})
        return [*made, {"role": "user", "content": moved}] if moved else made

    def _parts_of(self, role: str) -> tuple[bool, bool]:
        """Return whether the text of a role's messages must be parts, and whether these may be images."""
        if role not in self._roles_of_parts:
            self._roles_of_parts[role] = False, True  # the trials have the content as it is

            def text_of(content: Any) -> str | None:
                user, call, result = json.loads(_TURNS.replace("ID", "quire0000"))
                tried = {"role": role, "content": content}
                turns = [user, tried] if role == "assistant" else [tried, *[user] * (role in INSTRUCTIONS)]
                if role == "tool":
                    turns = [_with_calls(turn, *self._calls) for turn in (user, call, result | tried)]
                return self._trial(turns, _VARIABLES)

            texts = [*map(text_of, (_TEXT, [_TEXT_PART], [_IMAGE_PART, _TEXT_PART]))]
            plain, parts, both = (text and _TEXT in text and not PRINTED_PART.search(text) for text in texts)
            self._roles_of_parts[role] = bool(parts and not plain), bool(both and texts[1] != texts[2])
        return self._roles_of_parts[role]

    @cached_property
    def _calls(self) -> tuple[bool, bool, bool]:
        """The arguments of ``_with_calls``.

        Null content and arguments as an object are the first choice, as in transformers. Some templates fail on one of
        them, write the word None, write the call only beside null, or add the arguments to a string.
        """

        def trial(no_null: bool, as_text: bool, call_id: str = "quire0000") -> str | None:
            turns = json.loads(_TURNS.replace("ID", call_id))
            return self._trial([_with_calls(turn, no_null, as_text, False) for turn in turns], _VARIABLES)

        def rightness(form: tuple[bool, bool]) -> tuple[bool, ...]:
            text = trial(*form)
            if text is None:
                return ()
            return "quire value" in text, not _MISWRITTEN.search(text), not re.search("None|null", text)

        form = max(((False, False), (True, False), (False, True), (True, True)), key=rightness)
        return *form, bool(trial(*form)) and trial(*form, "call_quire0000") is None

    def _place_instructions(self, messages: Messages, values: Mapping[str, Any]) -> Messages:
        """Return the messages with all of their instructions where the template writes them.

        The trial has the roles of this conversation, because a template may take a system message in some places only.
        """
        texts = {i: f"quire-{i}-instructions" for i, each in enumerate(messages) if each["role"] in INSTRUCTIONS}
        shape = [{**each, "content": texts.get(i, each.get("content") and "-")} for i, each in enumerate(messages)]
        # If each way is refused, the refusal of the last is about system messages, not unknown roles.
        best, most = self._ways[-1], -1
        for arrange in self._ways:
            rendered = self._trial(arrange(shape), values)
            num_written = -1 if rendered is None else sum(text in rendered for text in texts.values())
            if num_written > most:
                best, most = arrange, num_written
            if most == len(texts):
                break
        if most == 0 and len(texts) == len(messages):
            what = "a message other than system messages: this model's chat template leaves them out"
            raise InvalidRequest(f"messages must hold {what}", "messages")
        return best(messages)


def _with_calls(message: dict[str, Any], no_null: bool, as_text: bool, nine: bool) -> dict[str, Any]:
    """Return a message with null content as "", arguments as text, or ids of nine letters and digits."""
    made = dict(message)
    if nine and "tool_call_id" in made:
        made["tool_call_id"] = _nine(made["tool_call_id"])
    if made.get("tool_calls"):
        made["content"] = "" if no_null and made.get("content") is None else made.get("content")
        made["tool_calls"] = [{**call, "function": dict(call["function"])} for call in made["tool_calls"]]
        for call in made["tool_calls"]:
            arguments = call["function"].get("arguments")
            if as_text and not isinstance(arguments, str):
                call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
            if nine and "id" in call:
                call["id"] = _nine(call["id"])
    return made


def _nine(call_id: str) -> str:
    """Return an id that depends on the given one only, so that a call and its result agree in each turn."""
    plain: str = mark_special(call_id, None)
    is_nine = re.fullmatch("[A-Za-z0-9]{9}", plain)
    return plain if is_nine else hashlib.blake2b(plain.encode(), digest_size=5).hexdigest()[:9]


def _as_system(messages: Messages) -> Messages:
    return [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]


def _in_front(messages: Messages) -> Messages:
    texts = [each["content"] for each in messages if each["role"] in INSTRUCTIONS and each["content"]]
    rest = [each for each in messages if each["role"] not in INSTRUCTIONS]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest] if texts else rest
