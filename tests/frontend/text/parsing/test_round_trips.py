"""Calls as templates write them, read back: every format, many arguments and splits; and what models write instead."""

import contextlib
import copy
import functools
import json
import random
from typing import Any

import pytest

from quire.frontend.text.chat_template import ChatTemplate, Conversation
from quire.frontend.text.message_checks import check_messages
from quire.frontend.text.parsing.answer_parser import AnswerParser, CallDelta, CallDropped, Content, Thought
from quire.frontend.text.parsing.choose_format import AnswerFormat, choose_format
from quire.frontend.text.parsing.formats import CALL_FORMATS, THOUGHT_FORMATS, recognized
from quire.protocol.errors import InvalidRequest
from tests.support.launch.answer_texts import split

MARKERS = ("<think>", "</think>")
PROPERTIES: dict[str, Any] = {key: {"type": "string"} for key in ("text", "old", "new")}
PROPERTIES |= {"count": {"type": "integer"}, "ratio": {"type": "number"}, "on": {"type": "boolean"}}
PROPERTIES |= {"nothing": {"type": ["integer", "null"]}, "object": {"type": "object"}, "list": {"type": "array"}}
TOOLS: dict[str, dict[str, Any]] = {"find": PROPERTIES, "stop": {}}
BACKSLASHES = r"a\b\n\\ C:\new"
TEXTS = [
    *("x", "", " ", "\t", "\n", "  indented\n    more", "\nleading", "trailing\n", "\n\nboth\n\n", "\r\n", BACKSLASHES),
    *("a\u2028b\u2029c\x85d", "é 文 😀", "\u200b", "it's", '"quoted"', "'", '"', "{", "}", "[", "</", "x" * 100_000),
    *("007", "1e5", "true", "null", "None", '{"a": 1}', "[1, 2]", "a; b", 'x {"name": "stop", "parameters": {}} y'),
    *("</tool_call>", "x </tool_call> y", "</parameter>", "a </parameter> b\n", "</parameter>\n</parameter>", "```"),
    *("see <parameter=other> there", "\n<parameter=other>\n", "</function>", "if </function> then", "</invoke> x"),
    *("</arg_value>", "x </arg_value> y", "<arg_key>q</arg_key>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    *("a\n```\n", "[TOOL_CALLS]stop[ARGS]{}", "<|call|>", "<|end|><|start|>assistant", "<think>", "</think>"),
    *("<|tool_call_end|>", "<tool_call|>", "]</tool_calls>", "<|END_ACTION|>", "<|tool_call:end|>", "</TOOLCALL>"),
]
ARGUMENTS: list[dict[str, Any]] = [
    *({"text": text} for text in TEXTS),
    *({"old": text, "new": "after"} for text in TEXTS[:20]),
    *({}, {"count": 7}, {"count": -3}, {"ratio": 1.5}, {"ratio": 1e-7}, {"on": True}, {"on": False}),
    *({"nothing": None}, {"nothing": 4}, {"object": {}}, {"list": []}, {"list": [1, "é", {"a": "b"}, [None]]}),
    {"object": {"k": True, "z": None, "d": {"e": [1, "two", 3.5, False]}, "a b": 1, "c-d": "</tool_call>"}},
    {"text": "x", "count": 1, "on": True, "object": {"text": "</function>"}, "list": ["'", "]"]},
]
_JSON = "{{ c.arguments | tojson }}"
_CALL = '{{ {"name": c.name, "arguments": c.arguments} | tojson }}'
_ITEMS = "{% for k, v in c.arguments.items() %}"
_TEXT = "{{ v if v is string else v | tojson }}"
_PYTHON = (
    f"[{{{{ c.name }}}}({_ITEMS}{{{{ k }}}}={{% if v is string %}}QUOTED{{% else %}}{{{{ v | tojson if v is mapping"
    " else v | string }}{% endif %}{% if not loop.last %}, {% endif %}{% endfor %})]"
)
_INVOKE = '<P:invoke name="{{ c.name }}">\n' + _ITEMS + '<P:parameter name="{{ k }}"ATTR>' + _TEXT + "</P:parameter>\n"
_INVOKE += "{% endfor %}</P:invoke>"
_PARAMETERS = _ITEMS + "<parameter={{ k }}>FRAME" + _TEXT + "FRAME</parameter>\n{% endfor %}</function>"
_KIND = " string=\"{{ 'true' if v is string else 'false' }}\""
_GEMMA = (
    "{% macro g(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>{% elif v is mapping %}{{ '{' }}{% for k, w in v.items() %}"
    "{{ k }}:{{ g(w) }}{{ ',' if not loop.last }}{% endfor %}}{% elif v is boolean %}{{ v | tojson }}{% elif v is "
    "sequence %}[{% for w in v %}{{ g(w) }}{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ v }}{% endif %}"
    "{% endmacro %}"
)
WRITTEN: dict[str, str] = {
    "apriel": f"<tool_calls>[{_CALL}]</tool_calls>",
    "command_r": '<|START_ACTION|>[\n    {{ {"tool_call_id": "0", "tool_name": c.name, "parameters": c.arguments} | '
    "tojson }}\n]<|END_ACTION|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n"
    + _JSON
    + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>"
    + _JSON
    + "<｜tool▁call▁end｜>",
    "deepseek_v32": f"<｜DSML｜function_calls>\n{_INVOKE}\n</｜DSML｜function_calls>".replace("P:", "｜DSML｜").replace(
        "ATTR", _KIND
    ),
    "functionary_v31": f"<function={{{{ c.name }}}}>{_JSON}</function>",
    "gemma4": "<|tool_call>call:{{ c.name }}{{ g(c.arguments) }}<tool_call|>",
    "gigachat3": f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_CALL}<|message_sep|>",
    "glm45": f"<tool_call>{{{{ c.name }}}}\n{_ITEMS}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_TEXT}</arg_value>\n"
    "{% endfor %}</tool_call>",
    "granite": f"<|tool_call|>[{_CALL}]",
    "harmony": f"<|start|>assistant to=functions.{{{{ c.name }}}}<|channel|>commentary json<|message|>{_JSON}<|call|>",
    "hermes": f"<tool_call>\n{_CALL}\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ c.name }}:0<|tool_call_argument_begin|>"
    + _JSON
    + "<|tool_call_end|><|tool_calls_section_end|>",
    "lfm2": f"<|tool_call_start|>{_PYTHON}<|tool_call_end|>".replace("QUOTED", "'{{ v }}'"),
    "llama3_json": '{{ {"name": c.name, "parameters": c.arguments} | tojson }}<|eot_id|>',
    "minimax_m1": f"<tool_calls>\n{_CALL}\n</tool_calls>",
    "minimax_m2": f"<minimax:tool_call>\n{_INVOKE}\n</minimax:tool_call>".replace("P:", "").replace("ATTR", ""),
    "mistral": f"[TOOL_CALLS]{{{{ c.name }}}}[CALL_ID]abcdefghi[ARGS]{_JSON}</s>",
    "mistral_list": f"[TOOL_CALLS][{_CALL}]</s>",
    "nemotron_nano": f"<TOOLCALL>[{_CALL}]</TOOLCALL>",
    "pythonic": _PYTHON.replace("QUOTED", "{{ v | tojson }}"),
    "qwen3_coder": "<tool_call>\n<function={{ c.name }}>\n"
    + _PARAMETERS.replace("FRAME", "\n")
    + "\n</tool_call><|im_end|>",
    "seed_oss": "<seed:tool_call>\n<function={{ c.name }}>\n"
    + _PARAMETERS.replace("FRAME", "")
    + "\n</seed:tool_call>",
    "solar": "<|tool_calls|><|tool_call:begin|>abc<|tool_call:name|>{{ c.name }}<|tool_call:args|>"
    + _JSON
    + "<|tool_call:end|>",
}
"""How templates write a call ``c``."""
LEFT_OUT = {"lfm2": "\\"}
"""Text that a template writes like something else: its texts in quotes have no escapes."""
Answer = tuple[str, str, list[tuple[str, Any]]]


@functools.cache
def chosen(name: str) -> AnswerFormat:
    thoughts = name if name in THOUGHT_FORMATS else "markers"
    form = choose_format({}, "", None, calls=name, thoughts=thoughts, markers=MARKERS)
    assert form is not None
    return form


def read(form: AnswerFormat, pieces: list[str], *, with_tools: bool = True) -> Answer:
    """Return the thoughts, the content and the calls of an answer."""
    whole = form.for_request(with_tools=with_tools)
    assert whole is not None
    parser = AnswerParser(whole, TOOLS)
    calls: dict[int, list[str]] = {}
    said: dict[type, str] = {Thought: "", Content: ""}
    for event in [*(event for piece in pieces for event in parser.push(piece)), *parser.finish()]:
        match event:
            case CallDelta(index, name, arguments):
                calls.setdefault(index, [name or "", ""])[1] += arguments
            case CallDropped(index):
                del calls[index]
            case _:
                said[type(event)] += event.text
    return said[Thought], said[Content], [(name, json.loads(arguments.encode())) for name, arguments in calls.values()]


def trips(
    form: AnswerFormat, template: ChatTemplate, num_splits: int, leave_out: str = "\0", every: slice = slice(None)
) -> int:
    """Write and read arguments; return the number of reads."""
    count, rng = 0, random.Random(template.source)
    for arguments in ARGUMENTS[every]:
        if any(isinstance(value, str) and leave_out in value for value in arguments.values()):
            continue
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "find", "arguments": json.dumps(arguments)}}
        messages = [{"role": "user", "content": "ZQ"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        tools = [{"name": name, "description": "", "parameters": {"type": "object"}} for name in TOOLS]
        rendered = template.render(
            Conversation(
                messages=check_messages(copy.deepcopy(messages)),
                tools=[{"type": "function", "function": tool} for tool in tools],
                max_chars=10**6,
                add_generation_prompt=False,
            )
        )
        text = rendered[rendered.rindex("ZQ") + 2 :]
        if "find" not in text:
            raise LookupError("the template writes no calls")
        cut = rng.randint(0, len(text))
        splits = [[text], [text[:cut], text[cut:]]]
        if len(text) < 5000:
            splits += (split(text, rng) for _ in range(num_splits))
        for pieces in splits:
            answer = read(form, pieces)
            assert answer[2] == [("find", arguments)], (text[:300], pieces[:300])
            count += 1
    return count


def own(name: str) -> ChatTemplate:
    call = "{% for call in m.tool_calls or [] %}{% set c = call.function %}" + WRITTEN[name] + "{% endfor %}"
    source = _GEMMA + "{% for m in messages %}{{ m.content }}" + call + "{% endfor %}"
    return ChatTemplate(source, {}, name)


def test_every_format_is_written() -> None:
    assert WRITTEN.keys() == CALL_FORMATS.keys() and len(ARGUMENTS) > 80


@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_call_is_read(name: str) -> None:
    every = slice(list(WRITTEN).index(name) % 8, None, 8)
    assert trips(chosen(name), own(name), 0, LEFT_OUT.get(name, "\0"), every) >= 20


@pytest.mark.full
@pytest.mark.parametrize("name", WRITTEN)
def test_all_arguments_are_read(name: str) -> None:
    assert trips(chosen(name), own(name), 0, LEFT_OUT.get(name, "\0")) > 160


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_call_is_read_in_any_pieces(name: str) -> None:
    assert trips(chosen(name), own(name), 20, LEFT_OUT.get(name, "\0")) > 1000


@pytest.mark.slow
def test_calls_of_real_templates_are_read(real_templates: dict[str, str]) -> None:
    num_read = 0
    for name, source in sorted(real_templates.items()):
        if not recognized(source):
            continue
        form = choose_format({}, source, None, markers=MARKERS)
        template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, name)
        with contextlib.suppress(InvalidRequest, LookupError):  # it refuses calls, or does not write them
            assert form is not None
            num_read += trips(form, template, 2, LEFT_OUT.get(recognized(source), "\0"))
    assert num_read > 40 * 4 * 80


HEADER = "<|channel|>analysis<|message|>why\nso<|end|><|start|>assistant"
FINAL, CALL = "<|channel|>final<|message|>Hi", '<|message|>{"count": 1}'
WHY: Answer = ("why\nso", "", [])
CALLED: Answer = ("", "", [("find", {"count": 1})])
BOTH: Answer = ("why\nso", "", [("find", {"count": 1})])
TRANSCRIPTS: list[tuple[str, Answer]] = [
    (FINAL, ("", "Hi", [])),
    ("<|channel|>commentary<|message|>Hi", ("", "Hi", [])),
    (HEADER + FINAL, ("why\nso", "Hi", [])),
    (HEADER.partition("<|end|>")[0], WHY),
    (" to=functions.find<|channel|>analysis" + CALL, CALLED),
    ("<|channel|>analysis to=functions.find" + CALL, CALLED),
    (" to=functions.find<|channel|>analysis <|constrain|>json" + CALL, CALLED),
    ("<|channel|>commentary to=functions.find" + CALL, CALLED),
    (HEADER + " to=functions.find<|channel|>analysis" + CALL, BOTH),
    (HEADER + "<|channel|>commentary to=functions.find <|constrain|>json" + CALL, BOTH),
    (HEADER + '<|channel|>final <|constrain|>json<|message|>{"a": 1}', ("why\nso", '{"a": 1}', [])),
    (HEADER + " to=container.exec<|channel|>commentary<|message|>ls", ("why\nso", "ls", [])),
    (HEADER + "<|channel|>commentary to=python <|constrain|>code<|message|>2 + 2", ("why\nso", "2 + 2", [])),
    ("<|channel|>commentary to=assistant" + HEADER + FINAL, ("why\nso", "Hi", [])),
    (HEADER + "<|channel|>commentary to=assistant<|channel|>final<|message|>Hi", ("why\nso", "Hi", [])),
    (HEADER.replace("<|end|>", "") + FINAL, ("why\nso", "Hi", [])),
    (HEADER.replace("<|end|>", "") + "<|channel|>commentary json to=functions.find" + CALL + "<|call|>", BOTH),
    ("<|constrain|>json<|channel|>commentary to=find" + CALL + "<|call|>", CALLED),
    ("so to=5 and on", ("", "so to=5 and on", [])),
]


@pytest.mark.parametrize("case", range(len(TRANSCRIPTS)))
def test_headers_of_gpt_oss(case: int) -> None:
    text, answer = TRANSCRIPTS[case]
    for pieces in ([text], list(text)):
        assert read(chosen("harmony"), pieces) == answer
        if not answer[2]:
            assert read(chosen("harmony"), pieces, with_tools=False) == answer


ADA = '{"name": "Ada", "age": 36}'
FIND = '{"name": "find", "arguments": {"count": 1}}'
TOOL_CALL = f"<tool_call>\n{FIND}\n</tool_call>"
UNKNOWN = 'a <tool_call>{"name": "fund", "arguments": {"text": "</tool_call>"}}</tool_call> b'
BROKEN = '<tool_call>{"name": "find", "arguments": {"text": "x}}</tool_call>'
FUNCTION = "<tool_call>\n<function=find>\n"
VARIANTS: list[tuple[str, str, Answer]] = [
    ("llama3_json", ADA, ("", ADA, [])),
    ("llama3_json", f"So: {ADA}, and {FIND} done", ("", f"So: {ADA}, and done", CALLED[2])),
    ("llama3_json", '{"name": "find"}', ("", '{"name": "find"}', [])),
    ("llama3_json", '{"type": "function", "name": "find", "parameters": {"count": 1}}', CALLED),
    ("llama3_json", "[find(count=1), stop()]", ("", "", [*CALLED[2], ("stop", {})])),
    ("llama3_json", f"{FIND}\n{FIND}", ("", "", CALLED[2] * 2)),
    ("llama3_json", "see [a](b), [x for x in y] and [len(x)]", ("", "see [a](b), [x for x in y] and [len(x)]", [])),
    (
        "pythonic",
        "[find(object={'a': None, \"b\": (True, r)})]",
        ("", "[find(object={'a': None, \"b\": (True, r)})]", []),
    ),
    (
        "pythonic",
        "[find(object={'a': None, 'b': (True, \"x\\n\",)})]",
        ("", "", [("find", {"object": {"a": None, "b": [True, "x\n"]}})]),
    ),
    *(
        (name, r"[find(text='\ud800')]", ("", "", [("find", {"text": "\ud800"})]))
        for name in ("pythonic", "llama3_json")
    ),
    ("hermes", UNKNOWN, ("", UNKNOWN, [])),
    ("hermes", TOOL_CALL.replace("arguments", "args"), ("", TOOL_CALL.replace("arguments", "args"), [])),
    ("hermes", f"<tool_call>{FIND}\n{FIND}</tool_call>", ("", "", CALLED[2] * 2)),
    ("hermes", BROKEN + "\n" + TOOL_CALL, ("", BROKEN, CALLED[2])),
    ("hermes", BROKEN + TOOL_CALL, ("", BROKEN, CALLED[2])),
    ("hermes", f"<think>why {TOOL_CALL}", ("why", "", CALLED[2])),
    ("hermes", f"<think>why {TOOL_CALL} no</think>Hi", (f"why {TOOL_CALL} no", "Hi", [])),
    ("hermes", "<think>a <tool_call> is", ("a <tool_call> is", "", [])),
    (
        "qwen3_coder",
        f"<think>why\n{FUNCTION}<parameter=count>1</parameter></function></tool_call>",
        ("why", "", CALLED[2]),
    ),
    ("qwen3_coder", f"{FUNCTION}<parameter=count>1</function></tool_call>", CALLED),
    (
        "qwen3_coder",
        f"{FUNCTION}<parameter=old>\na\n<parameter=count>\n1\n</function>\n</tool_call>",
        ("", "", [("find", {"old": "a", "count": 1})]),
    ),
    (
        "qwen3_coder",
        "<function=find><parameter=count>1</parameter></function>\n<function=stop></function>",
        ("", "", [*CALLED[2], ("stop", {})]),
    ),
    ("qwen3_coder", f"{FUNCTION}<parameter=text>half", ("", f"{FUNCTION}<parameter=text>half", [])),
    (
        "qwen3_coder",
        f"{FUNCTION}<parameter=object>{{'k': True}}</parameter></function></tool_call>",
        ("", "", [("find", {"object": {"k": True}})]),
    ),
    (
        "qwen3_coder",
        f'{FUNCTION}<parameter=list>["\\ud800"]</parameter></function></tool_call>',
        ("", "", [("find", {"list": ["\ud800"]})]),
    ),
    ("glm45", "<tool_call>find<arg_key>count</arg_key><arg_value>1</tool_call>", CALLED),
    (
        "glm45",
        "<tool_call>find\n<arg_key>old</arg_key>\n<arg_value>a\n<arg_key>count</arg_key>\n<arg_value>1</arg_value></tool_call>",
        ("", "", [("find", {"old": "a", "count": 1})]),
    ),
    ("mistral", '[TOOL_CALLS]find[ARGS]{"count": 1} and so', ("", " and so", CALLED[2])),
]


@pytest.mark.parametrize("case", range(len(VARIANTS)))
def test_what_models_write_instead(case: int) -> None:
    name, text, answer = VARIANTS[case]
    for pieces in ([text], list(text), *(split(text, random.Random(seed)) for seed in range(4))):
        assert read(chosen(name), pieces) == answer


@pytest.mark.parametrize(
    ("name", "template"),
    [
        *(("functionary_v31", "<function=NAME>{...}</function>"), ("qwen3_coder", "<function=f><parameter=k>")),
        *(("granite", "respond only with <|tool_call|>"), ("pythonic", "in the format of [func_name1(params)]")),
        *(("lfm2", "List of tools: <|tool_list_start|>["), ("", "]<]minimax[>[<tool_call>")),
    ],
)
def test_families_are_recognized(name: str, template: str) -> None:
    assert recognized(template) == name
