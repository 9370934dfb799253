"""One answer in the terminal, from an engine of its own or from a running server."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from quire.protocol.request.sampling_params import SamplingParams

OnText = Callable[[str], None]


@dataclass(slots=True)
class TerminalAnswer:
    """``token_ids`` is None for an answer of a server, which sends text only."""

    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {
            "text": self.text,
            **({} if self.token_ids is None else {"token_ids": self.token_ids}),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "cached_tokens": self.cached_tokens,
            },
        }


class TerminalModel(Protocol):
    """Generates answers; ``on_text`` is called with each new part of the text."""

    def chat(self, messages: list[dict[str, Any]], params: SamplingParams, on_text: OnText) -> TerminalAnswer: ...

    def generate(self, prompt: str, params: SamplingParams, on_text: OnText) -> TerminalAnswer: ...
