"""Answers in the form of Ollama's API: one object, or a stream of lines with one object each."""

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from quire.frontend.engine.answers import OutputDelta
from quire.frontend.http.dialects.ollama.body import OllamaRequest
from quire.frontend.http.dialects.parts import Dropped, Part, is_object, joined, read_parts
from quire.frontend.http.routes.chat import format_logprobs
from quire.frontend.http.routes.conversation import AnswerReader
from quire.frontend.http.routes.formatter import Collected, ResponseFormatter, Usage
from quire.frontend.http.routes.tool_calls import new_call_id
from quire.frontend.http.serving.server import Server
from quire.frontend.http.serving.sse import EventStyle
from quire.frontend.text.prompts import Prompt

ENCODER = msgspec.json.Encoder()
LINES = EventStyle(b"%b", None, lambda error: error.plain_body() + b"\n", b"application/x-ndjson")

Fields = dict[str, Any]


class OllamaFormatter(ResponseFormatter):
    """Formats the one answer of a request. A call is sent as a whole, because its arguments are an object."""

    def __init__(
        self, server: Server, request: OllamaRequest, prompt: Prompt, reader: AnswerReader, request_id: str
    ) -> None:
        super().__init__(request_id, [reader])
        self._request, self._reader, self._texts = request, reader, server.token_texts
        self._num_prompt_tokens = len(prompt.token_ids)
        self._calls: list[Part] = []
        """Parts of the calls after the last text: they may go on, or turn out to be none."""
        self._num_calls = 0

    def event(self, index: int, delta: OutputDelta, usage: Usage | None) -> bytes:
        last = delta.finish_reason is not None
        said, logprobs = self._said(delta.text, last=last), self._logprobs(delta)
        # Some clients read no text of the last line.
        lines = [answer_object(self._request, said, logprobs)] if said or logprobs else []
        lines += [answer_object(self._request, {}, self._end(delta, delta.num_output_tokens))] if last else []
        return ENCODER.encode_lines(lines)

    def response(self, answers: Sequence[Collected], usage: Usage) -> bytes:
        (answer,) = answers
        said = self._said("".join(answer.texts), last=True)
        ended = self._end(answer, usage.completion_tokens) | self._logprobs(answer)
        return ENCODER.encode(answer_object(self._request, said, ended))

    def _said(self, text: str, *, last: bool) -> Fields:
        """Return what a text adds to the answer; nothing for a part that is empty."""
        parts: list[Part] = []
        for part in read_parts(self._reader.push(text, last=last)):
            if isinstance(part, Dropped):
                self._calls = [each for each in self._calls if not each.is_of(part)]
            elif part.kind == "call":
                self._calls.append(part)
            else:
                parts += [*self._whole_calls(), part]
        said: Fields = {}
        for part in [*parts, *(self._whole_calls() if last else ())]:
            if part.kind == "call":
                arguments = msgspec.Raw(msgspec.json.format(part.text.encode(), indent=-1))  # on one line
                function = {"index": self._num_calls, "name": part.name, "arguments": arguments}
                said.setdefault("tool_calls", []).append({"id": part.id or new_call_id(), "function": function})
                self._num_calls += 1
            elif part.text:
                name = "thinking" if part.kind == "thought" else "content"
                said[name] = said.get(name, "") + part.text
        return said

    def _whole_calls(self) -> list[Part]:
        """Return the calls that have ended. One that was cut off is text."""
        calls, self._calls = joined(self._calls), []
        return [call if is_object(call.text) else replace(call, kind="text") for call in calls]

    def _logprobs(self, answer: OutputDelta | Collected) -> Fields:
        kept = (answer.logprobs or [])[: -1 if answer.has_end_token else None]
        return {"logprobs": format_logprobs(kept, self._texts).content} if kept else {}

    def _end(self, answer: OutputDelta | Collected, num_output_tokens: int) -> Fields:
        (clock,) = self.clocks
        # Clients divide by the durations: they are not 0.
        waited, went = clock.first_token - clock.admitted, clock.last_token - clock.first_token
        ended = {
            "done": True,
            "done_reason": answer.finish_reason,
            "total_duration": time.monotonic_ns() - self._request.began,
            "load_duration": 0,
            "prompt_eval_count": self._num_prompt_tokens,
            "prompt_eval_duration": max(int(waited * 1e9), 1),
            "eval_count": num_output_tokens,
            "eval_duration": max(int(went * 1e9), 1),
        }
        return ended | ({"timeline": answer.timeline} if answer.timeline else {})


def answer_object(request: OllamaRequest, said: Fields, rest: Fields) -> Fields:
    """Return one object. ``said``: members of the message; ``rest``: those beside it."""
    message: Fields = {"message": {"role": "assistant", "content": "", **said}}
    if not request.is_chat:
        message = {"response": said.pop("content", ""), **said}
    return {"model": request.model, "created_at": datetime.now(UTC), **message, "done": False, **rest}
