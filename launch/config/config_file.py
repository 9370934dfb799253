"""Reads ``--config`` files: a small YAML mapping of plain values, in bounded time and memory."""

import re
from pathlib import Path
from typing import Any

import yaml

from quire.protocol.errors import ConfigError

MAX_BYTES = 2**18
MAX_DEPTH = 16


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the mapping in the file, empty if the file is.

    Raises:
        ConfigError: the file cannot be read, is too large or too deep, is not a mapping, or uses anchors or tags.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)  # not the size in the directory, which a device or a pipe does not have
        if len(raw) > MAX_BYTES:
            raise ConfigError(f"{path}: the file must be at most {MAX_BYTES} bytes long")
        loaded = PlainLoader(raw.decode()).get_single_data()
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict | None):
        raise ConfigError(f"{path}: must be a YAML mapping of keys and values")
    return loaded or {}


class PlainLoader(yaml.SafeLoader):
    """YAML with plain values only, and each key once.

    Anchors and merges describe endless or exponentially large values in a few bytes, and tags give a value another
    type than its text has.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _error("anchors and aliases are not supported", event)
        if event.tag is not None:
            raise _error(f"tags such as {event.tag[:40]!r} are not supported", event)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _error(f"values must be nested at most {MAX_DEPTH} levels deep", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise _error("a key occurs twice in this mapping", node)
        return mapping


def _error(text: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=at.start_mark)


# Without numbers of base 60 (1:2:3), octal numbers (010), dates and merges (<<): all of these are text.
_NUMBERS = {
    "int": (r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F_]+", "-+0123456789"),
    "float": (
        r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.inf)|\.nan",
        "-+.0123456789",
    ),
}
_KEPT = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:null")
PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _KEPT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, (_pattern, _first) in _NUMBERS.items():
    PlainLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), list(_first))
