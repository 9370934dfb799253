"""The formats of known models, in the words of ``response_template``; a model is recognized by its chat template."""

import re
from collections.abc import Mapping
from typing import Any

CONTENT: dict[str, Any] = {"content": "text", "content_args": {"strip": False}, "repeats": True, "join": ""}


def _calls(opens: str, closes: str | None, function: Any, content: str = "json", **args: Any) -> dict[str, Any]:
    """Return the field of calls between two patterns. ``function``: where their names and arguments are."""
    field = {"open_pattern": opens, "close_pattern": closes, "repeats": True, "content": content, "content_args": args}
    return {key: value for key, value in field.items() if value} | {"transform": CALL | {"function": function}}


def _tagged(opens: str, end: str, outer: str, tag: str, next_tag: str, tag_end: str, frame: str = "") -> dict[str, Any]:
    """Return the field of calls whose arguments have tags.

    The end of a tag is one only where the next tag or the end of the call follows, otherwise it is text. A tag on a new
    line and the end of the call end a value as well: models leave out ends of tags.

    Args:
        end: what closes a call.
        outer: text after ``end`` with which it is certainly not part of a value (group ``sure``).
        frame: blanks around values.
    """
    closes = rf"{end}(?:(?P<sure>\s*(?:{outer}))|)" if outer else end
    ends = rf"{frame}{tag_end}(?=\s*(?:{next_tag.replace('?P<next>', '?:')}|{end}|\Z))"
    pattern = rf"{tag}{frame}(?P<value>.*?)(?:{ends}|\n(?={next_tag})|\n?\Z)"
    return _calls(opens, closes, BY_NAME, "xml-inline", tag_pattern=pattern)


def _invoked(outer: str, prefix: str = "") -> dict[str, Any]:
    opens = rf'\s*(?:<{outer}>\s*)?<{prefix}invoke name="(?P<name>[^"]+)">'
    follows = rf"</{outer}>|(?=<{prefix}invoke)"
    tag = rf'<{prefix}parameter name="(?P<key>[^"]+)"(?: string="(?P<is_text>true|false)")?>'
    next_tag = rf'<{prefix}parameter name="(?P<next>[^"<]+)"'
    return _tagged(opens, rf"</{prefix}invoke>", follows, tag, next_tag, rf"</{prefix}parameter>")


def _begin(recipient: str) -> str:
    """Return the pattern of the beginning of a header of gpt-oss, in any order of its parts."""
    words = rf"(?: to={recipient}| \w+)*\s*"
    return rf"(?:<\|start\|>assistant(?: to={recipient}\s*)?)?(?:{_KIND}\s*\w+{words})*"


def _header(channel: str, recipient: str) -> str:
    words = rf"(?: to={recipient}| \w+)*\s*"
    return rf"{_begin(recipient)}<\|channel\|>\s*{channel}{words}(?:<\|constrain\|>\s*[\w.-]*{words})*<\|message\|>"


CALL: dict[str, Any] = {"type": "function"}
BY_NAME = {"name": "{name}", "arguments": "{content}"}
_KIND = r"(?:<\|channel\|>|<\|constrain\|>)"
_TO = r" to=(?:functions\.)?(?P<name>[\w.-]+)(?: \w+)?\s*" + rf"(?:{_KIND}\s*[\w.-]*(?: \w+)*\s*)*<\|message\|>"
_HARMONY_CONTENT = {**CONTENT, "close_pattern": _header(r"\w+", r"[\w.-]+") + r"|<\|end\|>|<\|return\|>|<\|call\|>"}
_GEMMA_CONTENT = {**CONTENT, "close": ["<turn|>", "<|tool_response>", "<eos>"]}
_DEEPSEEK = r"\s*(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"
_DEEPSEEK_END = r"<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?"
_KIMI = r"\s*(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
_KIMI_ID = r"(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
_SOLAR = r"\s*(?:<\|tool_calls\|>\s*)?<\|tool_call:begin\|>(?P<id>[^<]*)"
_MISTRAL = r"\[TOOL_CALLS\](?P<name>[^\[\]{\s]+)(?:\[CALL_ID\](?P<id>[^\[\]{\s]+))?\[ARGS\]"
_PARAMETER = (r"<parameter=(?P<key>[^>\n]+)>", r"<parameter=(?P<next>[^<>\n]+)>", "</parameter>")
_GLM_KEY = (r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>", "<arg_key>(?P<next>[^<]*)</arg_key>", "</arg_value>")
_FUNCTION = r"<function=(?P<name>[^>\n]+)>"
# Blanks before a call belong to it: they separate it from the content or from the call before it.
_WHOLE: Mapping[str, tuple[str, str | None]] = {
    "apriel": (r"\s*<tool_calls>", "</tool_calls>"),
    "gigachat3": (r"\s*(?:<\|message_sep\|>\s*function call<\|role_sep\|>|<\|function_call\|>)", None),
    "granite": (r"\s*<\|tool_call\|>", None),
    "hermes": (r"\s*<tool_call>", "</tool_call>"),
    "minimax_m1": (r"\s*<tool_calls>", "</tool_calls>"),
    "nemotron_nano": (r"\s*<TOOLCALL>", "</TOOLCALL>"),
}
"""What opens and closes calls whose JSON has their names."""
_NAMED: Mapping[str, tuple[str, str]] = {
    "deepseek_v3": (
        _DEEPSEEK + r"(?:function)?<｜tool▁sep｜>(?P<name>[^\n<]+)\n```(?:json)?\n",
        r"\s*```\s*" + _DEEPSEEK_END,
    ),
    "deepseek_v31": (_DEEPSEEK + r"(?P<name>[^\n<]+)<｜tool▁sep｜>", _DEEPSEEK_END),
    "functionary_v31": (r"\s*" + _FUNCTION, "</function>"),
    "harmony": (_begin("assistant") + _TO, r"<\|call\|>|<\|end\|>|<\|return\|>|(?=<\|start\|>)"),
    "kimi_k2": (_KIMI + _KIMI_ID, r"<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?"),
    "mistral": (_MISTRAL, r"(?=\[TOOL_CALLS\])"),
    "solar": (_SOLAR + r"<\|tool_call:name\|>(?P<name>[^<]+)<\|tool_call:args\|>", r"<\|tool_call:end\|>"),
}
"""What opens and closes calls whose openings have their names."""
# A list of calls in Python begins with a name.
_JSON_OR_PYTHON = (
    r"\s*(?:<\|python_tag\|>\s*|(?:;\s*)?(?=\{\s*\"(?:name\"\s*:|type\"\s*:\s*\"function\")|\[\s*[A-Za-z_][\w.]*\())"
)
_OTHER: Mapping[str, dict[str, Any]] = {
    "command_r": _calls(
        r"\s*<\|START_ACTION\|>", r"<\|END_ACTION\|>", {"name": "{tool_name}", "arguments": "{parameters}"}
    )
    | {"transform_each": True},
    "deepseek_v32": _invoked("｜DSML｜(?:function_calls|tool_calls)", "｜DSML｜"),
    "gemma4": _calls(
        r"<\|tool_call>call:(?P<name>\w+)",
        r"<tool_call\|>",
        BY_NAME,
        unquoted_keys=True,
        string_delims=[['<|"|>', '<|"|>']],
    ),
    "glm45": _tagged(r"\s*<tool_call>\s*(?P<name>[^\s<{]+)", "</tool_call>", "", *_GLM_KEY),
    "lfm2": _calls(r"\s*<\|tool_call_start\|>", r"<\|tool_call_end\|>", "{content}", "python"),
    "llama3_json": _calls(_JSON_OR_PYTHON, None, "{content}", "python"),
    "minimax_m2": _invoked("minimax:tool_call"),
    "mistral_list": _calls(r"\[TOOL_CALLS\]", None, {"name": "{name}", "arguments": "{arguments}"})
    | {"transform_each": True},
    "pythonic": _calls(_JSON_OR_PYTHON, None, "{content}", "python"),
    # Some of these models leave out the outer tags.
    "qwen3_coder": _tagged(
        rf"\s*(?:<tool_call>\s*)?{_FUNCTION}", "</function>", "</tool_call>|(?=<function=)", *_PARAMETER, r"\n?"
    ),
    "seed_oss": _tagged(rf"\s*<seed:tool_call>\s*{_FUNCTION}", "</function>", "</seed:tool_call>", *_PARAMETER),
}
_FIELDS = {
    **{name: _calls(*texts, "{content}") for name, texts in _WHOLE.items()},
    **{name: _calls(*texts, BY_NAME) for name, texts in _NAMED.items()},
    **_OTHER,
}
_CONTENTS = {"gemma4": {"content": _GEMMA_CONTENT}, "harmony": {"content": _HARMONY_CONTENT}}
CALL_FORMATS: Mapping[str, Mapping[str, Any]] = {
    name: {"tool_calls": _FIELDS[name], **_CONTENTS.get(name, {})} for name in sorted(_FIELDS)
}
"""Fields for ``--tool-call-parser NAME``."""

THOUGHT_FORMATS: Mapping[str, Mapping[str, Any]] = {
    "gemma4": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>", "repeats": True, "join": "\n"},
        "content": _GEMMA_CONTENT,
    },
    "harmony": {
        "reasoning_content": {
            "open_pattern": _header("analysis", "assistant"),
            "close_pattern": r"<\|end\|>|(?=<\|start\|>|<\|channel\|>)",
            "repeats": True,
            "join": "\n",
        },
        "content": _HARMONY_CONTENT,
    },
}
"""Fields for ``--reasoning-parser NAME``, besides ``markers``: the texts of the thinking markers."""

SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("", ("]<]minimax[>[",)),  # MiniMax M3: its arguments have tags of their own names
    ("harmony", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|tool_call>",)),
    ("glm45", ("<arg_key>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("deepseek_v32", ("｜DSML｜", "invoke name=")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("qwen3_coder", ("<function=", "<tool_call>")),
    ("functionary_v31", ("<function=",)),
    ("deepseek_v3", ("<｜tool▁sep｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁sep｜>",)),
    ("kimi_k2", ("<|tool_call_argument_begin|>",)),
    ("solar", ("<|tool_call:args|>",)),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral_list", ("[TOOL_CALLS]",)),
    ("command_r", ("<|START_ACTION|>", "tool_name")),
    ("gigachat3", ("<|role_sep|>", "<|message_sep|>", "function call")),
    ("apriel", ("<tool_calls>[",)),
    ("minimax_m1", ("<tool_calls>",)),
    ("nemotron_nano", ("<TOOLCALL>",)),
    ("hermes", ("<tool_call>",)),
    ("granite", ("<|tool_call|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("List of tools: ",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ("<|eom_id|>",)),
    ("llama3_json", ("<|eot_id|>", '"parameters"')),
)
"""The first format all of whose texts are in the chat template is the model's."""


def recognized(chat_template: str) -> str:
    """Return the name of the format that the chat template writes calls in, or "" if none is known."""
    return next((name for name, signs in SIGNS if all(sign in chat_template for sign in signs)), "")


def between_markers(start: str, end: str) -> dict[str, Any]:
    """Return the field of thoughts between two markers. Blanks after the end belong to neither thoughts nor content."""
    return {
        "open": start,
        "close_pattern": rf"{re.escape(end)}\s*",
        "repeats": True,
        "join": "\n",
    }


def template(calls: str, thoughts: str, markers: tuple[str, str] | None = None) -> dict[str, Any]:
    """Return the template for two formats by name, each of which may be "" for none.

    ``markers``: start and end of thoughts, for those formats that do not have any of their own.
    """
    fields: dict[str, Any] = {"content": CONTENT}
    if thoughts == "markers" and markers is not None:
        fields["reasoning_content"] = between_markers(*markers)
    elif thoughts in THOUGHT_FORMATS:
        fields |= THOUGHT_FORMATS[thoughts]
    if calls:
        fields |= CALL_FORMATS[calls]
    return {"fields": fields, "start_anchor_pattern": r"\Z"}
