"""Where one answer stands: its tokens against its grammar, and before that its thoughts, which have none."""

from dataclasses import dataclass

from quire.protocol.config import EngineConfig
from quire.protocol.request.thinking import Marker, ThinkingState
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.structured.backend import Matcher


@dataclass(slots=True)
class Reading:
    """Reads an answer token by token.

    The grammar holds from the first token that is no thought: at once, unless the prompt leaves thinking open, or a
    first thought is awaited. Once it has begun, it holds to the end, whatever the text spells.

    Attributes:
        thinking: while the answer may still think; None once the grammar holds.
        awaits_thought: a first thought is to come, and has not ended.
        num_matched: tokens that the matcher has accepted through this reading.
    """

    matcher: Matcher
    thinking: ThinkingState | None
    awaits_thought: bool
    num_matched: int = 0

    @property
    def is_unconstrained(self) -> bool:
        """No grammar holds yet: any token may come next but the end of the text."""
        thinking = self.thinking
        return thinking is not None and (thinking.is_open or (self.awaits_thought and not thinking.num_ended))

    def read(self, token: int) -> bool:
        """False, and nothing changed, where the grammar does not allow ``token``."""
        if self.is_unconstrained and self.thinking is not None:
            self.thinking.advance(token)
            return True
        if not self.matcher.accept(token):
            return False
        self.thinking = None
        self.num_matched += 1
        return True

    def fork(self) -> "Reading":
        """For drafts: reads on from here, and ``undo`` leaves no trace of it."""
        return Reading(self.matcher, None if self.thinking is None else self.thinking.copy(), self.awaits_thought)

    def undo(self) -> None:
        self.matcher.rollback(self.num_matched)


class ConstrainedAnswer:
    """The reading of one request's answer. It is a function of the request's tokens, and only remembers how many it
    has read: a preemption, a resubmission or a new epoch need nothing else."""

    def __init__(self, matcher: Matcher, request: Request, config: EngineConfig) -> None:
        self._num_read = request.num_prompt_tokens
        thinking, awaits_thought = None, False
        start, end = config.thinking_start_token_ids, config.thinking_end_token_ids
        if start and end:
            prompt = request.tokens.array()[: request.num_prompt_tokens].tolist()
            thinking = ThinkingState(start, end, prompt)
            has_budget = request.sampling.thinking_token_budget is not None
            awaits_thought = has_budget and Marker(end).last_in(prompt) < 0
        self.reading = Reading(matcher, thinking, awaits_thought)

    def catch_up(self, request: Request) -> bool:
        """Read the tokens that are new; False where the grammar does not allow one."""
        tokens = request.tokens.tail(self._num_read)
        self._num_read += len(tokens)
        return all(map(self.reading.read, tokens))
