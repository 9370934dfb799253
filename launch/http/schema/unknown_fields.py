"""Fields of request bodies that have no meaning here: unknown ones are ignored or refused, unsupported ones refused."""

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

from quire.launch.http.schema.errors import shorten
from quire.protocol.errors import InvalidRequest, did_you_mean, printable
from quire.protocol.process.log import event_logger

log = event_logger("http")

Policy = Literal["ignore", "refuse"]

MAX_NAME = 64
MAX_NAMES = 16
"""Names in the response header of one request."""
MAX_LOGGED = 256
"""Names in the log of one process: a client can invent any number of names."""

_STRUCTURED = "use structured_outputs or response_format"
_TOOLS = "use tools and tool_choice"
UNSUPPORTED = {
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "suffix": "write the whole prompt, with the model's own markers for filling in",
    "audio": "this server writes text only",
    "web_search_options": "search in the client, and send the results in messages",
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "json_schema": _STRUCTURED,
    "regex": _STRUCTURED,
    "ebnf": _STRUCTURED,
    "grammar": _STRUCTURED,
    "structural_tag": _STRUCTURED,
    "chat_template": "start the server with --chat-template",
    "documents": "write them into messages",
    **dict.fromkeys(("prompt_embeds", "inputs_embeds", "input_embeds"), "this server reads text and token ids only"),
    **dict.fromkeys(("multi_modal_data", "mm_features"), "this server reads text only"),
    **dict.fromkeys(
        ("lora", "lora_name", "lora_path", "lora_request", "lora_modules", "adapter"), "name the adapter as model"
    ),
}
"""Fields that change the meaning of a request and are not supported, with what to do instead."""


class UnknownFields:
    """The policy of one server, and the names that are in its log already. Thread-safe."""

    def __init__(self, policy: Policy = "ignore") -> None:
        self.refused = policy == "refuse"
        self._logged: set[str] = set()

    def warn(self, name: str, near: str) -> None:
        """Log a name once. ``near``: the closest known name in words, or ""."""
        if name in self._logged or len(self._logged) >= MAX_LOGGED:
            return
        self._logged.add(name)
        log.warning(f"unknown request field ignored{near}", field=name)
        if len(self._logged) == MAX_LOGGED:
            log.warning("further unknown request fields are not logged", names=MAX_LOGGED)


class Ignored:
    """The unknown fields of one request."""

    def __init__(self, fields: UnknownFields) -> None:
        self._fields = fields
        self.names: list[str] = []

    def add(self, path: str, known: Collection[str]) -> None:
        """Note an unknown field; raise InvalidRequest if the server refuses them. ``known``: the known paths."""
        if self._fields.refused:
            raise unknown_field(path, known)
        # The same field of several tools is one name. The header allows printable ASCII, and separates with commas.
        name = re.sub(r"[^\w.-]", "?", re.sub(r"\[\d+\]", "", path[: 2 * MAX_NAME]), flags=re.ASCII)[:MAX_NAME] or "?"
        if name in self.names or len(self.names) >= MAX_NAMES:
            return
        self.names.append(name)
        self._fields.warn(name, _near(name, known))


def unknown_field(path: str, known: Collection[str]) -> InvalidRequest:
    name = path[:MAX_NAME]
    return InvalidRequest(f"unknown field {shorten(path)}{_near(name, known)}", name, "unknown_parameter")


def _near(name: str, known: Collection[str]) -> str:
    return did_you_mean(name, [each for each in known if each not in UNSUPPORTED])


def check_supported(raw: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a field of a body that would change its meaning and is not supported.

    Values that ask for nothing (null, false, an empty text or list) are allowed.
    """
    for name in UNSUPPORTED.keys() & raw.keys():
        if raw[name] and not (name == "function_call" and raw[name] in ("none", "auto")):
            raise InvalidRequest(f"{name} is not supported: {UNSUPPORTED[name]}", name, "unsupported")
    if raw.get("modalities") and raw["modalities"] != ["text"]:
        given = printable(raw["modalities"])
        text = f'modalities must be ["text"] (got {given}): this server writes text only'
        raise InvalidRequest(text, "modalities", "unsupported")
