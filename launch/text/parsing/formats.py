"""The formats of known models, in the words of ``response_template``; a model is recognized by its chat template."""

import re
from collections.abc import Mapping
from typing import Any

CONTENT: dict[str, Any] = {"content": "text", "content_args": {"strip": False}, "repeats": True, "join": ""}
CALL: dict[str, Any] = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}

# Blanks before a call belong to it: they separate it from the content or from the call before it.
_HERMES = {
    "open_pattern": r"\s*<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
# Some of these models leave out the outer tags.
_QWEN3_CODER = {
    "open_pattern": r"\s*(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>(?:\s*</tool_call>)?",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
    "transform": CALL,
}
_LLAMA3_JSON = {
    "open_pattern": r"\s*<\|python_tag\|>\s*|\s*(?=\{\s*\"name\"\s*:)",
    "close_pattern": r"\s*;\s*(?=\{\s*\"name\"\s*:)",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
_MISTRAL_LIST = {
    "open": "[TOOL_CALLS]",
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
    "transform_each": True,
}
_MISTRAL = {
    "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[\]{\s]+)(?:\[CALL_ID\](?P<id>[^\[\]{\s]+))?\[ARGS\]",
    "close_pattern": r"(?=\[TOOL_CALLS\])",
    "repeats": True,
    "content": "json",
    "transform": CALL,
}
_DEEPSEEK_V3 = {
    "open_pattern": r"\s*(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function)?<｜tool▁sep｜>"
    r"(?P<name>[^\n<]+)\n```(?:json)?\n",
    "close_pattern": r"\s*```\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
    "repeats": True,
    "content": "json",
    "transform": CALL,
}
_DEEPSEEK_V31 = {
    "open_pattern": r"\s*(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?P<name>[^\n<]+)<｜tool▁sep｜>",
    "close_pattern": r"<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
    "repeats": True,
    "content": "json",
    "transform": CALL,
}
_GLM = {
    "open_pattern": r"\s*<tool_call>\s*(?P<name>[^\s<{]+)",
    "close": "</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"},
    "transform": CALL,
}
_GEMMA = {
    "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
    "close": "<tool_call|>",
    "repeats": True,
    "content": "json",
    "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
    "transform": CALL,
}
# A call is addressed in its header, before or after the name of its channel.
_HARMONY = {
    "open_pattern": r"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))? to=(?:functions\.)?"
    r"(?P<name>[\w.-]+)[^<]*(?:<\|channel\|>\w+[^<]*)?(?:<\|constrain\|>[^<]*)?<\|message\|>",
    "close": ["<|call|>", "<|end|>", "<|return|>"],
    "repeats": True,
    "content": "json",
    "transform": CALL,
}
_HARMONY_CONTENT = {
    **CONTENT,
    "close_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>[^<]*)?"
    r"<\|message\|>|<\|end\|>|<\|return\|>",
}
_GEMMA_CONTENT = {**CONTENT, "close": ["<turn|>", "<|tool_response>", "<eos>"]}

CALL_FORMATS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {"tool_calls": _DEEPSEEK_V3},
    "deepseek_v31": {"tool_calls": _DEEPSEEK_V31},
    "gemma4": {"tool_calls": _GEMMA, "content": _GEMMA_CONTENT},
    "glm45": {"tool_calls": _GLM},
    "harmony": {"tool_calls": _HARMONY, "content": _HARMONY_CONTENT},
    "hermes": {"tool_calls": _HERMES},
    "llama3_json": {"tool_calls": _LLAMA3_JSON},
    "mistral": {"tool_calls": _MISTRAL},
    "mistral_list": {"tool_calls": _MISTRAL_LIST},
    "qwen3_coder": {"tool_calls": _QWEN3_CODER},
}
"""Fields for ``--tool-call-parser NAME``."""

THOUGHT_FORMATS: Mapping[str, Mapping[str, Any]] = {
    "gemma4": {
        "reasoning_content": {
            "open": "<|channel>thought\n",
            "close": "<channel|>",
            "repeats": True,
            "join": "\n",
        },
        "content": _GEMMA_CONTENT,
    },
    "harmony": {
        "reasoning_content": {
            "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis\s*(?:<\|constrain\|>[^<]*)?<\|message\|>",
            "close": "<|end|>",
            "repeats": True,
            "join": "\n",
        },
        "content": _HARMONY_CONTENT,
    },
}
"""Fields for ``--reasoning-parser NAME``, besides ``markers``: the texts of the thinking markers."""

SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|tool_call>",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=",)),
    ("deepseek_v3", ("<｜tool▁sep｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁sep｜>",)),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral_list", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>",)),
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
