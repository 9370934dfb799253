"""Fields that every API for conversations passes to chat unchanged, and errors of chat in the words of another API."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.frontend.http.schema.bodies import SAMPLING_FIELDS
from quire.frontend.http.schema.sampling_fields import ALIASES
from quire.protocol.errors import InvalidRequest

# These APIs have one answer, and their own fields for the others.
_OTHERS = (
    *("cache_salt", "priority", "chat_template_kwargs", "extra_args", "logit_bias", "repetition_detection"),
    *("job_id", "is_last_step", "nvext", "kv_hints", "vllm_xargs", "structured_outputs", *ALIASES),
)
_REFUSED = ("n", "stop", "prompt_logprobs", "use_beam_search")
PASSED_FIELDS = (*(name for name in SAMPLING_FIELDS if name not in _REFUSED), *_OTHERS)
"""Sampling parameters and fields of this server that keep their names."""


def passed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body that chat reads as they are."""
    return {name: raw[name] for name in PASSED_FIELDS if raw.get(name) is not None}


def set_thinking(chat: dict[str, Any], *, thinks: bool) -> None:
    """Add the variables of chat templates that turn thinking on or off. Those of the client come first."""
    kwargs = chat.get("chat_template_kwargs") or {}
    if isinstance(kwargs, dict):
        chat["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks, **kwargs}


def renamed(
    error: InvalidRequest, names: Mapping[str, str], tools: Sequence[str], parameters: str = "parameters"
) -> InvalidRequest:
    """Return an error of chat for a client of another API.

    Args:
        names: that API's fields by their names in chat, as regular expressions.
        tools: the paths of the tools in that API's body, in the order of chat.
        parameters: that API's name of a tool's schema.
    """

    def tool(match: re.Match[str]) -> str:
        is_path = int(match[1]) < len(tools)  # or else a value of the client
        return tools[int(match[1])] + (f".{parameters}" if match[2] else "") if is_path else match[0]

    pattern = r"tools\[(\d+)\]\.function(\.parameters)?"
    message, param = (re.sub(pattern, tool, text) for text in (error.message, error.param or ""))
    for ours, theirs in names.items():
        pattern = rf"(?<![\w.]){ours}(?!\w)"
        message, param = re.sub(pattern, theirs, message), re.sub(pattern, theirs, param)
    return InvalidRequest(message, param or None, error.code)
