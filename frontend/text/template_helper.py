"""Renders a chat template in a helper process, because the template is a program from the checkpoint.

This module has both ends. The caller executes nothing of the template; an endless loop or exhausted memory in the
helper costs one request. The helper is started as ``python -P -m quire.frontend.text.template_helper``.
"""

import threading
from collections.abc import Mapping

import msgspec

from quire.frontend.text.chat_template import CANNOT_RENDER, ChatTemplate, Conversation, RenderedTooLong, check_template
from quire.protocol.errors import EngineError, InvalidRequest
from quire.protocol.process.helper import Answer, Helper, HelperDied, HelperStartError, serve

CPU_SECONDS = 1.0
WALL_SECONDS = 8.0
"""Wall-clock limit of one rendering, for a busy machine or a stopped helper."""
MAX_BYTES = 512 * 2**20
"""Limit of the helper's address space, in addition to what it has at start."""
MAX_SHORT_BYTES = 64 * 2**10
"""A conversation up to this size never waits for a longer one."""


class _Hello(msgspec.Struct, frozen=True):
    source: str
    special_tokens: dict[str, str]
    where: str


class _Rendered(msgspec.Struct, frozen=True):
    """The rendered ``text``; or ``too_long``; or ``refusal``, an error about the field ``param``."""

    text: str = ""
    too_long: bool = False
    refusal: str = ""
    param: str = ""


class TemplateHelper:
    """A checkpoint's template. Owns three helpers: for short conversations, for short ones with variables of the
    client, which may make the template loop, and for long ones. Thread-safe."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], where: str, cpu_seconds: float = CPU_SECONDS
    ) -> None:
        """Raise ConfigError if the template does not parse. ``where`` names its file."""
        check_template(source, where)
        self.source, self.where = source, where
        hello = msgspec.json.encode(_Hello(source, dict(special_tokens), where))
        self._helpers = self._short, self._varied, self._long = [_LockedHelper(hello, cpu_seconds) for _ in range(3)]

    def render(self, conversation: Conversation) -> str:
        """Return the conversation as one text.

        Raises:
            InvalidRequest: the template refuses these messages, fails on them, or exceeds its time or memory limit.
            RenderedTooLong: the text exceeds ``max_chars``.
            EngineError: the helper does not start, was killed from outside, or the machine is too busy.
        """
        try:
            text = msgspec.json.encode(conversation)
        except (TypeError, ValueError, OverflowError):
            raise InvalidRequest("messages must be JSON values, and valid Unicode text", "messages") from None
        short = self._varied if conversation.variables else self._short
        helper = short if len(text) <= MAX_SHORT_BYTES else self._long
        rendered = msgspec.json.decode(helper.ask(text), type=_Rendered)
        if rendered.too_long:
            raise RenderedTooLong("the conversation's text is too long")
        if rendered.refusal:
            raise InvalidRequest(rendered.refusal, rendered.param)
        return rendered.text

    def prepare(self) -> None:
        """Start the helpers, so that the first conversation does not wait for one."""
        for helper in self._helpers:
            helper.prepare()

    def close(self) -> None:
        for helper in self._helpers:
            helper.close()


class _LockedHelper:
    """One helper and the lock that lets one caller use it at a time."""

    def __init__(self, hello: bytes, cpu_seconds: float) -> None:
        self._helper = Helper("quire.frontend.text.template_helper", hello)
        self._cpu_seconds = cpu_seconds
        self._lock = threading.Lock()

    def ask(self, question: bytes) -> bytes:
        with self._lock:
            try:
                return self._helper.ask_twice(question, self._cpu_seconds, WALL_SECONDS)
            except HelperDied as died:  # not kept: a frame that holds its own exception is a cycle, and keeps the text
                raise _refusal(died) from None

    def prepare(self) -> None:
        with self._lock:
            try:
                self._helper.start()
            except HelperDied:
                return  # the first rendering reports the error

    def close(self) -> None:
        with self._lock:
            self._helper.close()


def _refusal(died: HelperDied) -> EngineError | InvalidRequest:
    if isinstance(died, HelperStartError):
        return EngineError("the chat template's helper process failed to start")
    if died.was_starved or died.was_killed:
        return EngineError("the chat template's helper process was killed or did not get CPU time")
    how = "in time" if died.took_too_long else "in bounded memory"
    return InvalidRequest(f"the model's chat template cannot render these messages {how}", "messages")


# ---- inside the helper process


def main() -> None:
    serve(_make, MAX_BYTES)


def _make(hello: bytes) -> tuple[bytes, Answer | None]:
    renderer = _Renderer(msgspec.json.decode(hello, type=_Hello))
    return b"", lambda text: msgspec.json.encode(renderer.render(msgspec.json.decode(text, type=Conversation)))


class _Renderer:
    """Compiles the template at its first rendering: constant folding executes parts of it, so the limits must hold."""

    def __init__(self, hello: _Hello) -> None:
        self._hello = hello
        self._template: ChatTemplate | None = None

    def render(self, conversation: Conversation) -> _Rendered:
        try:
            if self._template is None:
                self._template = ChatTemplate(self._hello.source, self._hello.special_tokens, self._hello.where)
            text = self._template.render(conversation)
            text.encode()  # raises for a lone surrogate, which a template can write
        except RenderedTooLong:
            return _Rendered(too_long=True)
        except InvalidRequest as refused:
            return _Rendered(refusal=refused.message, param=refused.param or "messages")
        except Exception:
            return _Rendered(refusal=CANNOT_RENDER, param="messages")
        return _Rendered(text)


if __name__ == "__main__":
    main()
