"""From a parsed chat request to its prompt, and to the readers of its answers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from quire.launch.http.routes.tool_calls import RequiredCalls
from quire.launch.http.schema.schema import ChatRequest
from quire.launch.http.serving.server import Server
from quire.launch.text.parsing.answer_parser import AnswerParser, Content, Event
from quire.launch.text.parsing.templates import Format
from quire.launch.text.prompts import Prompt, encode_messages


class AnswerReader(Protocol):
    """Reads the text of one answer as thoughts, content and calls."""

    def push(self, text: str, *, last: bool) -> list[Event]:
        """Return what ``text`` adds. ``last``: it ends the answer."""
        ...


class PlainAnswer:
    """Reader of an answer that is content only."""

    def push(self, text: str, *, last: bool) -> list[Event]:
        return [Content(text)] if text else []


class FreeAnswer:
    """Reader of an answer in which the model chooses what to write."""

    def __init__(self, form: Format, tools: Mapping[str, Mapping[str, Any]], prefix: str) -> None:
        self._parser = AnswerParser(form, tools, prefix)

    def push(self, text: str, *, last: bool) -> list[Event]:
        events = self._parser.push(text)
        return [*events, *self._parser.finish()] if last else events


async def encode_conversation(
    server: Server, request: ChatRequest, size: int
) -> tuple[Prompt, Callable[[], AnswerReader]]:
    """Render and tokenize the messages. Return the prompt, and what makes the reader of each answer to it.

    ``size``: bytes of the body.
    """
    messages, options = request.messages, request.options
    prompt = await server.conversations.run(
        size, options, lambda: encode_messages(messages, options, server.text_in, server.engine)
    )
    use, thinking, answers = request.tool_use, server.settings.thinking, server.settings.answer_format
    if use is not None:
        end = thinking.end_before_answer(prompt.token_ids, request.params)
        # The marker is searched for in the text, and may be a special token.
        prompt = replace(prompt, shown=frozenset(thinking.end)) if end else prompt
        return prompt, lambda: RequiredCalls(use, end)
    form = None if answers is None else answers.for_request(with_tools=bool(options.tools))
    if answers is None or form is None:
        return prompt, PlainAnswer
    tools = {tool["function"]["name"]: _properties(tool["function"]) for tool in options.tools or ()}
    prefix = answers.prefix(prompt.end)
    return replace(prompt, shown=answers.special_ids), lambda: FreeAnswer(form, tools, prefix)


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = (function.get("parameters") or {}).get("properties")
    return properties if isinstance(properties, dict) else {}
