"""One output and its grammar: which tokens the grammar has read, after a thinking part that it does not constrain."""

from dataclasses import dataclass

from quire.protocol.config import EngineConfig
from quire.protocol.request.thinking import Marker, ThinkingState
from quire.scheduler_proc.structured.backend import GrammarPosition


@dataclass(slots=True)
class GrammarReader:
    """Reads an output token by token.

    The grammar holds from the first token after the thinking part: at once, unless the prompt leaves thinking open, or
    a first thought is expected. Then it holds to the end, also for thinking markers.

    Attributes:
        thinking: state of the thinking part; None once the grammar holds.
        awaits_thought: whether a first thought is expected and has not ended.
        num_matched: tokens that the matcher has accepted through this object.
    """

    matcher: GrammarPosition
    thinking: ThinkingState | None
    awaits_thought: bool
    num_matched: int = 0

    @property
    def is_unconstrained(self) -> bool:
        """Whether the grammar does not hold yet: any token but the end of the text is allowed."""
        thinking = self.thinking
        return thinking is not None and (thinking.is_open or (self.awaits_thought and not thinking.num_ended))

    def read(self, token: int) -> bool:
        """Read one token. Returns False, without a change, when the grammar does not allow it."""
        if self.is_unconstrained and self.thinking is not None:
            self.thinking.advance(token)
            return True
        if not self.matcher.accept(token):
            return False
        self.thinking = None
        self.num_matched += 1
        return True

    def fork(self) -> "GrammarReader":
        """Return a copy that reads draft tokens; ``undo`` reverts its effect on the matcher."""
        return GrammarReader(self.matcher, None if self.thinking is None else self.thinking.copy(), self.awaits_thought)

    def undo(self) -> None:
        self.matcher.rollback(self.num_matched)


class ConstrainedOutput:
    """The grammar state of one request's output: a function of its tokens."""

    def __init__(
        self, matcher: GrammarPosition, prompt: list[int], config: EngineConfig, *, expects_thought: bool
    ) -> None:
        """
        Args:
            prompt: token ids; used only if the model has thinking markers.
            expects_thought: a first thought is expected, unless the prompt contains its end.
        """
        thinking, awaits_thought = None, False
        start, end = config.thinking_start_token_ids, config.thinking_end_token_ids
        if start and end:
            thinking = ThinkingState(start, end, prompt)
            awaits_thought = expects_thought and Marker(end).last_in(prompt) < 0
        self.reader = GrammarReader(matcher, thinking, awaits_thought)

    def read(self, tokens: list[int]) -> bool:
        """Read the next tokens. Returns False when the grammar does not allow one of them."""
        return all(map(self.reader.read, tokens))
