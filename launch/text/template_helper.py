"""A chat template that is rendered in a helper process: it is a program that came with the weights.

Both ends. Nothing of it is executed here, and what it does there, for ever or with all memory, costs one request.
The helper is started as ``python -P -m quire.launch.text.template_helper``.
"""

import threading
from collections.abc import Mapping
from typing import Any

import msgspec

from quire.launch.text.chat_template import CANNOT_RENDER, ChatTemplate, Message, RenderedTooLong, check_template
from quire.protocol.errors import EngineError, InvalidRequest
from quire.protocol.process.helper import Answer, Helper, HelperDied, HelperStartError, serve

CPU_SECONDS = 1.0
WALL_SECONDS = 8.0
"""For the same, where the machine is busy, or something has stopped the helper."""
MAX_BYTES = 512 * 2**20
"""Of address space beyond what the helper begins with."""
MAX_SHORT_BYTES = 64 * 2**10
"""A conversation of no more, without variables of the client's, never waits for a longer one."""


class _Hello(msgspec.Struct, frozen=True):
    source: str
    special_tokens: dict[str, str]
    where: str


class _Question(msgspec.Struct, frozen=True):
    """As ``ChatTemplate.render`` takes it."""

    messages: list[Any]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]
    tools: list[Any] | None
    max_chars: int


class _Rendered(msgspec.Struct, frozen=True):
    """``text``, or why there is none: too long, or ``refusal``."""

    text: str = ""
    too_long: bool = False
    refusal: str = ""
    param: str = ""


class TemplateHelper:
    """A checkpoint's template. Owns two helpers, one of them for what may take long; used by any thread."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], where: str, cpu_seconds: float = CPU_SECONDS
    ) -> None:
        """Raises ConfigError where the template does not parse; ``where`` names the file."""
        check_template(source, where)
        hello = msgspec.json.encode(_Hello(source, dict(special_tokens), where))
        self._short, self._long = (_Lane(hello, cpu_seconds) for _ in range(2))

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
            InvalidRequest: the template refuses these messages, fails on them, or takes too long.
            RenderedTooLong: it writes more than ``max_chars``.
            EngineError: there is no helper now, or the machine is too busy for it.
        """
        question = _Question(
            messages, add_generation_prompt, continue_final_message, dict(variables or {}), tools, max_chars
        )
        try:
            text = msgspec.json.encode(question)
        except (TypeError, ValueError, OverflowError):
            raise InvalidRequest("messages must be JSON values, and valid Unicode text", "messages") from None
        is_short = len(text) <= MAX_SHORT_BYTES and not variables
        rendered = msgspec.json.decode((self._short if is_short else self._long).ask(text), type=_Rendered)
        if rendered.too_long:
            raise RenderedTooLong("the conversation's text is too long")
        if rendered.refusal:
            raise InvalidRequest(rendered.refusal, rendered.param)
        return rendered.text

    def prepare(self) -> None:
        """Start what the first conversation would otherwise wait for."""
        for lane in (self._short, self._long):
            lane.prepare()

    def close(self) -> None:
        for lane in (self._short, self._long):
            lane.close()


class _Lane:
    """One helper; its lock admits one caller at a time."""

    def __init__(self, hello: bytes, cpu_seconds: float) -> None:
        self._helper = Helper("quire.launch.text.template_helper", hello)
        self._cpu_seconds = cpu_seconds
        self._lock = threading.Lock()

    def ask(self, question: bytes) -> bytes:
        with self._lock:
            for _ in range(2):
                try:
                    return self._helper.ask(question, self._cpu_seconds, WALL_SECONDS)
                except HelperStartError:
                    raise EngineError("the chat template's helper does not start") from None
                except HelperDied as died:
                    if died.was_starved:
                        break
                    if not died.was_killed:  # else from outside, and these messages may be innocent
                        raise _refusal(died) from None
        raise EngineError("the chat template's helper was killed, or not let run")

    def prepare(self) -> None:
        with self._lock:
            try:
                self._helper.start()
            except HelperDied:
                return  # the first question reports it

    def close(self) -> None:
        with self._lock:
            self._helper.close()


def _refusal(died: HelperDied) -> InvalidRequest:
    how = "in time" if died.took_too_long else "in bounded memory"
    return InvalidRequest(f"the model's chat template cannot render these messages {how}", "messages")


# ---- the helper's own end


def main() -> None:
    serve(_make, MAX_BYTES)


def _make(hello: bytes) -> tuple[bytes, Answer | None]:
    renderer = _Renderer(msgspec.json.decode(hello, type=_Hello))
    return b"", lambda question: msgspec.json.encode(renderer.render(msgspec.json.decode(question, type=_Question)))


class _Renderer:
    """Compiles the template with its first answer, for that is where the limits hold: constants are folded by it."""

    def __init__(self, hello: _Hello) -> None:
        self._hello = hello
        self._template: ChatTemplate | None = None

    def render(self, question: _Question) -> _Rendered:
        try:
            if self._template is None:
                self._template = ChatTemplate(self._hello.source, self._hello.special_tokens, self._hello.where)
            text = self._template.render(
                question.messages,
                add_generation_prompt=question.add_generation_prompt,
                continue_final_message=question.continue_final_message,
                variables=question.variables,
                tools=question.tools,
                max_chars=question.max_chars,
            )
            text.encode()  # a template can spell a lone surrogate
        except RenderedTooLong:
            return _Rendered(too_long=True)
        except InvalidRequest as refused:
            return _Rendered(refusal=refused.message, param=refused.param or "messages")
        except Exception:
            return _Rendered(refusal=CANNOT_RENDER, param="messages")
        return _Rendered(text)


if __name__ == "__main__":
    main()
