"""Messages in the form that a template demands. Each small template makes a demand of real ones, named beside it."""

import json
from typing import Any

import pytest

from quire.frontend.text.chat_template import ChatTemplate, Conversation
from quire.frontend.text.message_checks import check_messages
from quire.protocol.errors import InvalidRequest

LOOP = "{% for m in messages %}"
REFUSE = "{{ raise_exception('no') }}"
GENERIC = LOOP + "<{{ m.role }}>{{ m.content }}{% endfor %}"
KNOWN = LOOP + "{% if m.role in ('system', 'user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
FIRST = (
    "{{ messages[0].content }}"
    + LOOP
    + "{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
LAST = "{{ (messages | selectattr('role', 'equalto', 'system') | list)[-1].content }}" + FIRST.partition("}}")[2]
ONE = LOOP + "{% if not loop.first and m.role == 'system' or m.role == 'developer' %}" + REFUSE + "{% endif %}"
ONE += "<{{ m.role }}>{{ m.content }}{% endfor %}"
HARMONY = (
    LOOP + "{% if m.role in ['developer', 'system'] and loop.first or m.role == 'user' %}<{{ m.role }}>{{ m.content }}"
)
HARMONY += "{% endif %}{% endfor %}"
NO_SYSTEM = (
    LOOP + "{% if m.role not in ('user', 'assistant') %}{{ raise_exception(m.role ~ '?') }}{% endif %}{% endfor %}"
)

S, D, U, A = (("system", "S"), ("developer", "D"), ("user", "U"), ("assistant", "A"))
ROLES: list[tuple[str, list[tuple[str, str]], str]] = [
    (GENERIC, [S, D, U], "<system>S<system>D<user>U"),
    (GENERIC, [S, U, A, D, S, U], "<system>S<user>U<assistant>A<system>D<system>S<user>U"),
    (KNOWN, [D, U], "<system>D<user>U"),  # Qwen 2.5, Qwen 3, Granite 4
    (KNOWN, [U, A, D], "<user>U<assistant>A<system>D"),
    (KNOWN, [S], "<system>S"),
    (KNOWN, [D], "<system>D"),
    (ONE, [S, D, U, A, S, U], "<system>S\n\nD\n\nS<user>U<assistant>A<user>U"),  # Mistral, Qwen 3.5
    (ONE, [U, S], "<system>S<user>U"),
    (FIRST, [S, D, U], "S\n\nD<user>U"),  # SmolLM 3, MiniMax M1
    (LAST, [S, S, U], "S\n\nS<user>U"),  # DeepSeek R1
    (HARMONY, [D, U], "<developer>D<user>U"),
    (HARMONY, [S, D, U], "<system>S\n\nD<user>U"),
]


def rendered(source: str, messages: list[Any], **more: Any) -> str:
    conversation = Conversation(messages=check_messages(messages), max_chars=10_000, **more)
    return ChatTemplate(source, {}, "test").render(conversation)


@pytest.mark.parametrize(("source", "given", "text"), ROLES)
def test_no_instruction_vanishes(source: str, given: list[tuple[str, str]], text: str) -> None:
    assert rendered(source, [{"role": role, "content": content} for role, content in given]) == text


def test_what_a_template_refuses_or_leaves_out_altogether() -> None:
    with pytest.raises(InvalidRequest, match=r"refuses these messages: system\?"):
        rendered(NO_SYSTEM, [{"role": "developer", "content": "x"}, {"role": "user", "content": "x"}])
    only_users = LOOP + "{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="a message other than system messages: this model's chat template leaves"):
        rendered(only_users, [{"role": "system", "content": "x"}])


LONG = "call_0123456789abcdef01234567"
CALL = {"id": LONG, "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
TURNS += [{"role": "tool", "tool_call_id": LONG, "content": "r"}]
EACH = LOOP + "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
END = "{% endfor %}{{ m.content or '' }}{% endfor %}"
AS_JSON = "{{ f.name }}{{ f.arguments | tojson }}"
CALLS = {
    "null content": (EACH + "{{ m.content is none }}" + AS_JSON + END, 'qTruef{"a": "é"}r'),
    "calls only beside null, arguments as text": (
        EACH + "{% if m.content is none %}{{ f.name + f.arguments }}{% endif %}" + END,
        'qf{"a": "é"}r',
    ),  # R1-Distill-Llama, functionary
    "no null": (
        LOOP + "{{ m.content | trim + '' }}" + EACH[len(LOOP) :] + AS_JSON + "{% endfor %}{% endfor %}",
        'qf{"a": "é"}r',
    ),
    "no split of null": (
        LOOP + "{{ m.content.split('x')[-1] }}" + EACH[len(LOOP) :] + AS_JSON + "{% endfor %}{% endfor %}",
        'qf{"a": "é"}r',
    ),
    "the word None": (
        LOOP + "{{ m.content }}" + EACH[len(LOOP) :] + AS_JSON + "{% endfor %}{% endfor %}",
        'qf{"a": "é"}r',
    ),
    "an object as Python prints it": (EACH + "{{ f.name }}{{ f.arguments }}" + END, 'qf{"a": "é"}r'),
    "an object": (
        EACH + "{{ f.name }}{% for k, v in f.arguments.items() %}{{ k }}={{ v }}{% endfor %}" + END,
        "qfa=ér",
    ),
    "the name of a result": (LOOP + "{{ m.role }}{{ m.name }};{% endfor %}", "user;assistant;toolf;"),
}


@pytest.mark.parametrize("demand", CALLS)
def test_calls_are_written_as_the_template_can(demand: str) -> None:
    source, text = CALLS[demand]
    assert rendered(source, TURNS) == text


def test_ids_of_other_servers_become_nine_letters_where_a_template_demands_them() -> None:
    """Mistral Nemo and Mistral Small 3.2. A call and its result agree, in every turn."""
    ids = LOOP + "{{ m.tool_call_id }}{% for c in m.tool_calls or [] %}{{ c.id }} {% endfor %}{% endfor %}"
    demand = LOOP + "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}" + REFUSE + "{% endif %}"
    strict = demand + "{% endfor %}{% endfor %}" + ids
    of_call, of_result = rendered(strict, TURNS).split()
    assert of_call == of_result and len(of_call) == 9 and of_call.isalnum()
    assert rendered(strict, [*TURNS, *TURNS]).split()[0] == of_call
    assert rendered(ids, TURNS) == f"{LONG} {LONG}"
    short = json.loads(json.dumps(TURNS).replace(LONG, "Ab3dEf6hI"))
    assert rendered(strict, short) == "Ab3dEf6hI Ab3dEf6hI"


IN_PARTS = (
    "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% elif c.type == 'image' %}#{% endif %}{% endfor %}"
)
ANY = "{% if m.content is string %}{{ m.content }}{% else %}" + IN_PARTS + "{% endif %}"
AS_TEXT = "{{ m.content }}"
IMAGE = {"type": "image_url", "image_url": "data:,"}
SHOWN = {"role": "user", "content": [IMAGE, {"type": "text", "text": "U"}]}
RESULT = {"role": "tool", "tool_call_id": LONG, "content": [{"type": "text", "text": "r"}, IMAGE]}
PARTS: list[tuple[str, str, list[dict[str, Any]], str]] = [
    (IN_PARTS, IN_PARTS, [{"role": "system", "content": "S"}, SHOWN], "<system>S<user>#U"),  # SmolVLM, LLaVA
    (IN_PARTS, IN_PARTS, [{"role": "developer", "content": "S"}, {"role": "user", "content": "U"}], "<system>S<user>U"),
    (ANY, AS_TEXT, [SHOWN, {"role": "assistant", "content": "A"}, SHOWN], "<user>#U<assistant>A<user>#U"),  # Pixtral
    (ANY, ANY, [SHOWN, TURNS[1], RESULT, SHOWN], "<user>#U<assistant>f<tool>r#<user>#U"),  # Qwen3-VL
    (ANY, AS_TEXT, [SHOWN, TURNS[1], RESULT, RESULT], "<user>#U<assistant>f<tool>r<tool>r<user>##"),
    (ANY, AS_TEXT, [SHOWN, TURNS[1], RESULT, SHOWN], "<user>#U<assistant>f<tool>r<user>#<user>#U"),
]


@pytest.mark.parametrize(("user", "others", "messages", "text"), PARTS)
def test_texts_are_parts_and_images_are_where_the_template_takes_them(
    user: str, others: str, messages: list[dict[str, Any]], text: str
) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    source = "{{ tools | tojson if tools else '' }}" + LOOP + "<{{ m.role }}>" + calls
    source += "{% if m.role == 'user' %}" + user + "{% elif m.content %}" + others
    conversation = Conversation(messages=check_messages(messages, images=[]), max_chars=10_000)
    assert ChatTemplate(source + "{% endif %}{% endfor %}", {}, "test").render(conversation) == text


def test_the_final_message_is_continued_in_parts() -> None:
    source = LOOP + "<{{ m.role }}>" + IN_PARTS + "</>{% endfor %}"
    messages = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]
    assert rendered(source, messages, continue_final_message=True) == "<user>U</><assistant>A"
