"""Whether an output begins with thinking, decided from the same tokens as in the engine."""

from dataclasses import dataclass

from quire.frontend.serve_options import ServeOptions
from quire.frontend.text.parsing.choose_format import AnswerFormat, choose_format
from quire.frontend.text.prompts import Prompt
from quire.frontend.text.text_in import TextIn
from quire.protocol.config import EngineConfig
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.request.thinking import Marker, ThinkingState, without_plain


@dataclass(frozen=True, slots=True)
class Thinking:
    """The model's thinking markers as token ids, and their texts. Empty if it has none."""

    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    end_text: str = ""
    start_text: str = ""

    @classmethod
    def of(cls, config: EngineConfig, text_in: TextIn) -> "Thinking":
        start, end = config.thinking_start_token_ids, config.thinking_end_token_ids
        if not start or not end:
            return cls()
        texts = (text_in.decode(ids, skip_special_tokens=False) for ids in (end, start))
        return cls(tuple(start), tuple(end), *texts)

    @property
    def markers(self) -> tuple[str, str] | None:
        """The texts of the start and end marker."""
        return (self.start_text, self.end_text) if self.start_text and self.end_text else None

    def end_before_answer(self, prompt: Prompt, params: SamplingParams) -> str:
        """Return the text that ends the thinking before a constrained output, or "" if there is no thinking.

        There is thinking if the prompt leaves it open, or has none yet and the request has a thinking budget.
        """
        if not self.end_text:
            return ""
        ids = without_plain(prompt.token_ids, prompt.plain_spans).tolist()
        is_open = ThinkingState(self.start, self.end, ids).is_open
        will_open = params.thinking_token_budget is not None and Marker(self.end).last_in(ids) < 0
        return self.end_text if is_open or will_open else ""


def answer_format(thinking: Thinking, settings: ServeOptions, text_in: TextIn) -> AnswerFormat | None:
    """Return the format of the model's answers, and protect the thinking markers from text of users."""
    text_in.protect(thinking.markers or ())
    return choose_format(
        text_in.special_tokens,
        "" if text_in.template is None else text_in.template.source,
        text_in.response_template,
        calls=settings.tool_call_parser,
        thoughts=settings.reasoning_parser,
        markers=thinking.markers,
    )
