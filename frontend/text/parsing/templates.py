"""Formats as data: transformers' ``response_template``, checked and compiled.

A template names the regions of an answer (``fields``), with the texts or patterns that open and close each, and what is
between them. The field without an opening is where the text goes that is in no other region.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.frontend.text.parsing.patterns import Pattern, PatternError, literal, split_at_group
from quire.protocol.errors import ConfigError, printable

TEMPLATE_KEYS = frozenset(("version", "defaults", "fields", "start_anchor", "start_anchor_pattern"))
FIELD_KEYS = frozenset(
    (
        *("open", "open_pattern", "close", "close_pattern", "content", "content_args"),
        *("repeats", "join", "optional", "transform", "transform_each"),
    )
)
CONTENT_KINDS = ("text", "json", "xml-inline", "kv-lines", "python")
"""transformers' kinds, and ``python``: a list of calls as Python writes them."""
LEADING_BLANKS = re.compile(r"^\\s\*(?![?+*{])")
THOUGHTS = frozenset(("reasoning_content", "reasoning", "thinking"))
CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of one argument in ``xml-inline`` content: ``opens`` has the group ``key``; the value is in between."""

    opens: Pattern
    closes: Pattern


@dataclass(frozen=True, slots=True)
class Region:
    """One field of a template. ``opens`` is None for the field of all other text."""

    name: str
    opens: Pattern | None
    closes: Pattern | None
    content: str = "text"
    args: Mapping[str, Any] | None = None
    tags: Tags | None = None
    join: str = ""
    transform: Any = None
    transform_each: bool = False
    opens_early: Pattern | None = None
    """What opens a call in thoughts that have not ended."""

    @property
    def is_bare(self) -> bool:
        """Whether nothing but its value opens a call."""
        return self.opens is not None and self.opens.may_be_empty

    @property
    def ends_with_value(self) -> bool:
        """Whether a call may end without a closing, where its JSON ends."""
        return self.closes is None or self.closes.may_be_empty

    @property
    def strips(self) -> bool:
        return bool((self.args or {}).get("strip", True))


@dataclass(frozen=True, slots=True)
class Format:
    """A compiled template. ``rest``: where text goes that is in no region."""

    regions: tuple[Region, ...]
    rest: Region

    def without_calls(self) -> "Format":
        """Return the format of an answer to a request without tools: what looks like a call is text."""
        return Format(tuple(region for region in self.regions if region.name != CALLS), self.rest)

    @property
    def has_calls(self) -> bool:
        return any(region.name == CALLS for region in self.regions)


def load_format(template: Any, where: str) -> Format:
    """Check and compile a ``response_template``.

    Raises:
        ConfigError: it is not one, or needs what this parser does not have; names ``where`` it stands.
    """
    if not isinstance(template, dict) or not isinstance(template.get("fields"), dict) or not template["fields"]:
        raise ConfigError(f"{where} must be an object with fields")
    if template.get("version", 1) != 1 or not template.keys() <= TEMPLATE_KEYS:
        unknown = [key for key in template if key not in TEMPLATE_KEYS]
        given = f"version {printable(template.get('version', 1))}, unknown keys {printable(unknown)}"
        allowed = f"version 1 and only the keys {', '.join(sorted(TEMPLATE_KEYS))}"
        raise ConfigError(f"{where} must have {allowed} (got {given})")
    regions = [_region(name, field, f"{where}.fields.{name}") for name, field in template["fields"].items()]
    rest = [region for region in regions if region.opens is None]
    if len(rest) > 1:
        raise ConfigError(f"{where}: only one field may be without open (got {rest[0].name} and {rest[1].name})")
    if any(region.name == CALLS for region in rest):
        raise ConfigError(f"{where}.fields.{CALLS} must have open or open_pattern")
    whole = rest[0] if rest else Region("content", None, None, args={"strip": False})
    return Format(tuple(region for region in regions if region.opens is not None), whole)


def _region(name: str, field: Any, where: str) -> Region:
    if not isinstance(field, dict) or not field.keys() <= FIELD_KEYS:
        raise ConfigError(f"{where} must be an object with only the keys {', '.join(sorted(FIELD_KEYS))}")
    content, args = field.get("content", "text"), field.get("content_args", {})
    known = CONTENT_KINDS if name == CALLS else ("text",)
    if content not in known:
        raise ConfigError(f"{where}.content must be one of {', '.join(known)} (got {content!r})")
    if not isinstance(args, dict):
        raise ConfigError(f"{where}.content_args must be an object (got {printable(args)})")
    opens, closes = _anchor(field, "open", where), _anchor(field, "close", where)
    if closes is not None and closes.may_be_empty and (opens is None or opens.may_be_empty):
        raise ConfigError(f"{where}.close_pattern must not match the empty text")
    join = field.get("join") or ""
    if not isinstance(join, str):
        raise ConfigError(f"{where}.join must be a string (got {printable(join)})")
    return Region(
        name,
        opens,
        closes,
        content,
        args,
        _tags(args, where) if content == "xml-inline" else None,
        join,
        field.get("transform"),
        bool(field.get("transform_each", False)),
        _opens_early(field, opens, where) if name == CALLS else None,
    )


def _opens_early(field: Mapping[str, Any], opens: Pattern | None, where: str) -> Pattern | None:
    if opens is None or opens.may_be_empty or "open" in field:
        return None if opens is None or opens.may_be_empty else opens
    # Blanks are frequent, and before a call in thoughts they are thoughts.
    return _pattern(LEADING_BLANKS.sub("", field["open_pattern"]), f"{where}.open_pattern")


def _anchor(field: Mapping[str, Any], key: str, where: str) -> Pattern | None:
    texts, source = field.get(key), field.get(f"{key}_pattern")
    if texts is not None and source is not None:
        raise ConfigError(f"{where}: only one of {key} and {key}_pattern may be given")
    if source is not None:
        return _pattern(source, f"{where}.{key}_pattern")
    if texts is None:
        return None
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"{where}.{key} must be a text or a list of texts (got {printable(texts)})")
    return literal(*texts)


def _pattern(source: Any, where: str) -> Pattern:
    try:
        if not isinstance(source, str):
            raise PatternError("it is not a text")
        return Pattern(source)
    except PatternError as error:
        raise ConfigError(f"{where} cannot be used: {error}") from None


def _tags(args: Mapping[str, Any], where: str) -> Tags:
    where = f"{where}.content_args.tag_pattern"
    source = args.get("tag_pattern")
    _pattern(source, where)
    try:
        split = split_at_group(str(source), "value")
    except PatternError as error:
        raise ConfigError(f"{where} cannot be used: {error}") from None
    if split is None or "?P<key>" not in str(source):
        raise ConfigError(f"{where} must have the groups (?P<key>...) and (?P<value>.*?)")
    return Tags(*split)
