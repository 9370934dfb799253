"""A checkpoint's chat template, rendered as transformers would, in a sandbox.

The template is a program that came with the weights, so it runs in Jinja's immutable sandbox, with a cap on what it
may print; and in a process of its own (``template_helper.py``), which bounds its time and memory. Text of a user that
happens to spell a special token is marked before rendering, so that it can be told from the tokens that the template
itself writes.
"""

import json
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Protocol

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.protocol.errors import ConfigError, InvalidRequest, QuireError

Message = dict[str, Any]

MAX_SOURCE_CHARS = 2**20
CANNOT_RENDER = "the model's chat template cannot render these messages"
# Private-use characters around special-token spellings in user text; see mark_special.
MARK_START, MARK_END = "\ue0f0", "\ue0f1"
_FINAL_MESSAGE_TAG = "\ue0f2CONTINUE\ue0f3"
RESERVED_VARIABLES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template")
)


class TemplateRefusal(jinja2.TemplateError):
    """The template itself said no, by ``raise_exception(text)``."""


class RenderedTooLong(QuireError):
    """A conversation's text is longer than the caller allows."""


class Template(Protocol):
    """Where conversations are rendered: see ``ChatTemplate.render``."""

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        max_chars: int,
    ) -> str: ...

    def prepare(self) -> None:
        """A conversation is to be expected."""

    def close(self) -> None:
        """None is."""


def check_template(source: str, where: str) -> None:
    """Raise ConfigError where the template cannot be used, without executing any of it; ``where`` names the file."""
    if len(source) > MAX_SOURCE_CHARS:
        raise ConfigError(f"{where}: the chat template has more than {MAX_SOURCE_CHARS} characters")
    environment = _environment()
    try:
        tree = environment.parse(source)
        known = all(node.name in environment.filters for node in tree.find_all(jinja2.nodes.Filter)) and all(
            node.name in environment.tests for node in tree.find_all(jinja2.nodes.Test)
        )
    except (jinja2.TemplateError, RecursionError):
        known = False
    if not known:
        raise ConfigError(f"{where}: the chat template is not valid Jinja")


class ChatTemplate:
    """A checkpoint's template, compiled, in this process: it may run for ever."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        """``special_tokens`` are variables such as ``bos_token``.

        Raises:
            ConfigError: the template does not parse; ``where`` names the file.
        """
        self._variables = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError):
            raise ConfigError(f"{where}: the chat template is not valid Jinja") from None

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        max_chars: int,
    ) -> str:
        """The conversation as one text.

        Raises:
            InvalidRequest: the template refuses these messages, or fails on them.
            RenderedTooLong: it writes more than ``max_chars``.
        """
        if continue_final_message:
            content = messages[-1].get("content")
            if not isinstance(content, str):
                raise InvalidRequest("continue_final_message needs a last message with text", "messages")
            messages = [*messages[:-1], {**messages[-1], "content": f"{content}{_FINAL_MESSAGE_TAG} "}]
        values = {
            **self._variables,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(values, max_chars)
        return _cut_at_tag(text) if continue_final_message else text

    def prepare(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _run(self, values: Mapping[str, Any], max_chars: int) -> str:
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(values):
                pieces.append(piece)
                size += len(piece)
                if size > max_chars:
                    raise RenderedTooLong("the conversation's text is too long")
            return "".join(pieces)
        except RenderedTooLong:
            raise
        except TemplateRefusal as refusal:
            reason = " ".join(str(refusal).split())[:300]
            raise InvalidRequest(f"the model's chat template refuses these messages: {reason}", "messages") from None
        except Exception:
            # Whatever a template can raise (type errors, sandbox violations, overflow) is its own affair: the
            # client learns that these messages do not fit it, not what went on inside.
            raise InvalidRequest(CANNOT_RENDER, "messages") from None


def special_pattern(special_tokens: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern of every special token's spelling, the longest first, or None when there are none."""
    spellings = sorted((token for token in special_tokens if token), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, spellings))) if spellings else None


def mark_special(value: Any, pattern: re.Pattern[str]) -> Any:
    """``value`` with each special token spelt inside its strings put between marks; forged marks are dropped.

    Keys too: a template writes those of tools' parameters and of earlier calls.
    """
    if isinstance(value, str):
        if MARK_START in value or MARK_END in value:
            value = value.replace(MARK_START, "").replace(MARK_END, "")
        return pattern.sub(f"{MARK_START}\\g<0>{MARK_END}", value)
    if isinstance(value, list):
        return [mark_special(item, pattern) for item in value]
    if isinstance(value, dict):
        return {mark_special(key, pattern): mark_special(item, pattern) for key, item in value.items()}
    return value


def _cut_at_tag(text: str) -> str:
    """What comes before the tag. A template that trimmed the blank behind it trims the message's own too."""
    place = text.rfind(_FINAL_MESSAGE_TAG)
    if place < 0:
        raise InvalidRequest("this model's chat template cannot continue a final message", "continue_final_message")
    kept = text.startswith(f"{_FINAL_MESSAGE_TAG} ", place)
    return text[:place] if kept else text[:place].rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``: marks the assistant's words for training; here the body alone counts."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
