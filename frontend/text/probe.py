"""Tries a chat template with conversations that have everything in them, and finds what it loses of them."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from quire.frontend.text.chat_template import Message
from quire.frontend.text.control_text import special_pattern, written_end
from quire.frontend.text.message_checks import ROLES, check_messages
from quire.frontend.text.message_form import PRINTED_PART
from quire.frontend.text.parsing.answer_parser import AnswerParser, CallDelta, CallDropped
from quire.frontend.text.parsing.choose_format import AnswerFormat
from quire.frontend.text.text_in import ChatOptions, TextIn
from quire.protocol.errors import InvalidRequest

_MAX_TOKENS = 2**16  # more than the texts have, also if the server's context is short
_PROPERTIES = {"zqkey": {"type": "string"}}
_ABOUT = {"description": "zqabout", "parameters": {"type": "object", "properties": _PROPERTIES}}
_TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "zqtool", **_ABOUT}}]
_SYSTEM, _DEVELOPER, _NEXT = ({"role": role, "content": f"zq{role}"} for role in ("system", "developer", "user"))
_USER = {"role": "user", "content": [{"type": "text", "text": text} for text in ("zqpart1", "zqpart2")]}
ANSWER_TEXT = "zqanswer"
_ANSWER = {"role": "assistant", "content": ANSWER_TEXT, "reasoning_content": "zqthought1"}


def _loop(ids: Sequence[int]) -> list[Message]:
    """Return an answer that calls a tool once for each of ``ids``, and the results, as a client sends them back."""
    functions = {f"call_{i:024x}": {"name": "zqtool", "arguments": f'{{"zqkey": "zqargument{i}"}}'} for i in ids}
    calls = [{"id": name, "type": "function", "function": function} for name, function in functions.items()]
    answer = {"role": "assistant", "content": None, "reasoning_content": "zqthought2", "tool_calls": calls}
    results = zip(functions, ids, strict=True)
    return [answer, *({"role": "tool", "tool_call_id": name, "content": f"zqresult{i}"} for name, i in results)]


_SEVERAL = "several calls in one answer"
_KINDS: dict[str, tuple[list[Message], bool, str]] = {
    "user messages": ([_USER], False, "zqpart1 zqpart2"),
    "system messages": ([_SYSTEM, _NEXT], False, "zqsystem"),
    "developer messages": ([_DEVELOPER, _NEXT], False, "zqdeveloper"),
    "assistant messages": ([_NEXT, _ANSWER, _NEXT], False, ANSWER_TEXT),
    "offered tools": ([_NEXT], True, "zqtool zqabout zqkey"),
    "tool calls": ([_NEXT, *_loop([1])], True, "zqargument1"),
    "tool messages": ([_NEXT, *_loop([1])], True, "zqresult1"),
    _SEVERAL: ([_NEXT, *_loop([1, 2])], True, "zqargument1 zqargument2 zqresult1 zqresult2"),
}
"""What clients send: the smallest conversation with it, whether tools are offered, and what must reach the model."""
# Thoughts are left out by design: the model was trained without earlier ones.
_THOUGHTS = {"zqthought1": "assistant messages", "zqthought2": "tool calls"}


class Probe(NamedTuple):
    """What was found: what clients lose and what the template leaves out by design, one line each.

    ``roles``: those whose messages reach the model. ``reads_calls``: calls as the template writes them are read back.
    ``rendered``: the texts of all conversations.
    """

    losses: list[str]
    notes: Sequence[str] = ()
    roles: Sequence[str] = ()
    reads_calls: bool = False
    rendered: str = ""


def probe(text_in: TextIn, form: AnswerFormat | None) -> Probe:
    """Render a conversation for each kind of text and then one with all kinds, by the path that requests take.

    Raises EngineError if the helper process that renders fails.
    """
    fates: dict[str, tuple[str, str]] = {}
    rendered = ""

    def attempt(messages: list[Message], has_tools: bool, kinds: Sequence[str], beside: str = "") -> None:
        nonlocal rendered
        try:
            text = _render(text_in, messages, has_tools)
        except InvalidRequest as refused:
            why = refused.message.rpartition("these messages: ")[2]
            fates.update(dict.fromkeys(kinds, ("refuses", f"{beside}: {why}")))
            return
        rendered += text
        gone = (kind for kind in kinds if not all(each in text for each in _KINDS[kind][2].split()))
        fates.update(dict.fromkeys(gone, ("leaves out", beside)))

    for kind, (messages, has_tools, _) in _KINDS.items():
        if kind != _SEVERAL or "tool calls" not in fates:
            attempt(messages, has_tools, [kind])
        if "user messages" in fates:
            return Probe([f"the chat template {' user messages'.join(fates[kind])}"])
    roles = [role for role in ROLES if f"{role} messages" not in fates]
    ids = [1] if {"tool calls", _SEVERAL} & fates.keys() else [1, 2]
    if not any(verb == "refuses" for kind, (verb, _) in fates.items() if kind != _SEVERAL):
        kinds = [kind for kind in _KINDS if kind not in fates and (kind != _SEVERAL or len(ids) == 2)]
        attempt(
            [_SYSTEM, _DEVELOPER, _USER, _ANSWER, _NEXT, *_loop(ids)],
            True,
            kinds,
            " in a conversation with everything in it",
        )
    if text_in.image_token_id is not None and not _writes_images(text_in):
        fates["images"] = "leaves out", ""
    grouped: dict[tuple[str, str], list[str]] = {}
    for kind, fate in fates.items():
        grouped.setdefault(fate, []).append(kind)
    losses = [f"the chat template {verb} {', '.join(of)}{why}" for (verb, why), of in grouped.items()]
    writes_calls = "tool calls" not in fates and fates.get("offered tools", ("",))[0] != "refuses"
    reads_calls = writes_calls and form is not None and _reads_back(text_in, form, ids)
    if (form is None or not form.whole.has_calls) and (writes_calls or "offered tools" not in fates):
        how = "answers to requests with tools come as text (--tool-call-parser selects a format)"
        losses.append(f"tool calls of this chat template cannot be read: {how}")
    elif form is not None and writes_calls and not reads_calls:
        losses.append(f"{form.name} does not read tool calls as the chat template writes them")
    thinks = form is not None and form.has_thoughts
    left = [kind for text, kind in _THOUGHTS.items() if thinks and text not in rendered and kind not in fates]
    notes = [f"the chat template leaves out thoughts in earlier {' and '.join(left)}"] if left else []
    return Probe(losses, notes, roles, reads_calls, rendered)


def _render(text_in: TextIn, messages: list[Message], has_tools: bool) -> str:
    options = ChatOptions(tools=_TOOLS if has_tools else None)
    return text_in.render_chat(check_messages(messages, images=[]), options, _MAX_TOKENS)


def _writes_images(text_in: TextIn) -> bool:
    contents = _USER["content"], [{"type": "image", "image": "data:,"}, *_USER["content"]]
    try:
        plain, shown = (_render(text_in, [{**_USER, "content": content}], False) for content in contents)
    except InvalidRequest:
        return False
    return plain != shown and not PRINTED_PART.search(shown)


def _reads_back(text_in: TextIn, form: AnswerFormat, ids: Sequence[int]) -> bool:
    """Return whether the parser reads the calls of an answer as the template writes it."""
    opening = _render(text_in, [_NEXT], True)
    whole = _render(text_in, [_NEXT, *_loop(ids)], True).partition("zqresult")[0]
    before, last, after = whole.removeprefix(opening).rpartition(f"zqargument{ids[-1]}")
    # A special token that is no delimiter ends the answer, and is not in its text.
    ends = special_pattern(end for token, end in text_in.special_tokens.items() if token not in form.special_ids)
    text = before.rpartition("zquser")[2] + last + (after if ends is None else ends.split(after, maxsplit=1)[0])
    prefix = form.prefix(written_end(opening)) if whole.startswith(opening) else ""
    parser = AnswerParser(form.whole, {"zqtool": _PROPERTIES}, prefix)
    events = parser.push(text) + parser.finish()
    deltas = [event for event in events if isinstance(event, CallDelta)]
    arguments = ["".join(delta.arguments for delta in deltas if delta.index == i) for i in range(len(ids))]
    names = [delta.name for delta in deltas if delta.name is not None]
    expected = [{"zqkey": f"zqargument{i}"} for i in ids]
    has_dropped = any(isinstance(event, CallDropped) for event in events)
    return not has_dropped and names == ["zqtool" for _ in ids] and list(map(json.loads, arguments)) == expected
