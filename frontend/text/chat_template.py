"""Renders a checkpoint's chat template as transformers does, in a sandbox.

The template is a program from the checkpoint. It runs in Jinja's immutable sandbox with a limit on its output, and in a
helper process (``template_helper.py``) that limits its time and memory.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.frontend.text.control_text import ESCAPED_MARK
from quire.frontend.text.message_form import MessageForm, Messages
from quire.protocol.errors import MAX_SHOWN, ConfigError, InvalidRequest, QuireError, printable
from quire.protocol.process.log import first_line

Message = dict[str, Any]

MAX_SOURCE_CHARS = 2**20
CANNOT_RENDER = "the model's chat template cannot render these messages"
_FINAL_MESSAGE_TAG = "\ue0f2CONTINUE\ue0f3"
RESERVED_VARIABLES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template")
)


class TemplateRefusal(jinja2.TemplateError):
    """The template called ``raise_exception(text)``."""


class RenderedTooLong(QuireError):
    """The text of a conversation exceeds ``max_chars``."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What a template renders.

    Attributes:
        continue_final_message: end the text with the last message, which the model continues.
        variables: further variables of the template.
        max_chars: limit on the text.
    """

    messages: list[Message]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None
    max_chars: int


def check_template(source: str, where: str) -> None:
    """Raise ConfigError if the template is unusable, without executing it. ``where`` names its file."""
    if len(source) > MAX_SOURCE_CHARS:
        limit = f"at most {MAX_SOURCE_CHARS} characters (got {len(source)})"
        raise ConfigError(f"{where}: the chat template must have {limit}")
    environment = _environment()
    try:
        tree = environment.parse(source)
        for kind, known in ((jinja2.nodes.Filter, environment.filters), (jinja2.nodes.Test, environment.tests)):
            for node in tree.find_all(kind):
                if node.name not in known:
                    text = f"No {kind.__name__.lower()} named {printable(node.name)}"
                    raise jinja2.TemplateSyntaxError(text, node.lineno)
    except (jinja2.TemplateError, RecursionError) as error:
        raise _invalid(where, error) from None


def _invalid(where: str, error: Exception) -> ConfigError:
    """Return the error for a template that cannot be compiled, with line and reason if they are known."""
    text = f"{where}: the chat template is not valid Jinja"
    if isinstance(error, jinja2.TemplateSyntaxError):
        text += f": line {error.lineno}: {first_line(error.message or '')[:MAX_SHOWN]}"
    return ConfigError(text)


class ChatTemplate:
    """A checkpoint's template, compiled and rendered in this process. Rendering may never end."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        """``special_tokens`` are variables such as ``bos_token``.

        Raises:
            ConfigError: the template does not parse; ``where`` names the file.
        """
        self.source, self.where = source, where
        self._variables = dict(special_tokens)
        self._form = MessageForm(source, self._try)
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise _invalid(where, error) from None

    def render(self, conversation: Conversation) -> str:
        """Return the conversation as one text.

        Raises:
            InvalidRequest: the template refuses these messages or fails on them.
            RenderedTooLong: the text exceeds ``max_chars``.
        """
        values = {
            **self._variables,
            **conversation.variables,
            "tools": conversation.tools,
            "documents": None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        messages = self._form.fit(conversation.messages, values)
        if conversation.continue_final_message:
            messages = [*messages[:-1], _with_tag(messages[-1])]
        text = self._run({**values, "messages": messages}, conversation.max_chars)
        return _cut_at_tag(text) if conversation.continue_final_message else text

    def prepare(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _try(self, messages: Messages, values: Mapping[str, Any]) -> str | None:
        try:
            return self._run({**self._variables, "documents": None, **values, "messages": messages}, MAX_SOURCE_CHARS)
        except (InvalidRequest, RenderedTooLong):
            return None

    def _run(self, values: Mapping[str, Any], max_chars: int) -> str:
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(values):
                pieces.append(piece)
                size += len(piece)
                if size > max_chars:
                    raise RenderedTooLong("the conversation's text is too long")
            return ESCAPED_MARK.sub(lambda found: chr(int(found[1], 16)), "".join(pieces))
        except RenderedTooLong:
            raise
        except TemplateRefusal as refusal:
            reason = " ".join(str(refusal).split())[:300]
            raise InvalidRequest(f"the model's chat template refuses these messages: {reason}", "messages") from None
        except Exception:
            # A template can raise any error (type error, sandbox violation, overflow). Its text is not sent to the
            # client, which could not use it.
            raise InvalidRequest(CANNOT_RENDER, "messages") from None


def _with_tag(message: Message) -> Message:
    """Return the final message with the tag at the end of its text, which may be parts."""
    content = message.get("content")
    if isinstance(content, list) and content and content[-1].get("type") == "text":
        last = {**content[-1], "text": f"{content[-1]['text']}{_FINAL_MESSAGE_TAG} "}
        return {**message, "content": [*content[:-1], last]}
    if not isinstance(content, str):
        raise InvalidRequest("continue_final_message needs a last message with text", "messages")
    return {**message, "content": f"{content}{_FINAL_MESSAGE_TAG} "}


def _cut_at_tag(text: str) -> str:
    """Return a rendered conversation up to the end of its final message, so that the model continues that message.

    ``render`` appended ``_FINAL_MESSAGE_TAG`` and a space to the message before it rendered the conversation. If the
    space after the tag is missing in ``text``, the template trims messages, so this function
    also trims the white space at the end of the message.
    """
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
    """``{% generation %}``, which marks the assistant's text for training; only its body is rendered."""

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
    # Jinja's own filter escapes HTML, which is not in the training data of models.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
