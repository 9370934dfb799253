"""What the offline API gives back, by the names that vLLM's users know."""

from dataclasses import dataclass, field

from quire.launch.text.text_out import TokenTexts
from quire.protocol.wire.front_end_messages import Statistics
from quire.protocol.wire.logprobs import TokenLogprobs


@dataclass(slots=True)
class Logprob:
    """``rank`` from 1; ``decoded_token``: the token's text by itself."""

    logprob: float
    rank: int
    decoded_token: str


def logprob_by_id(entry: TokenLogprobs, texts: TokenTexts, *, lowest: float = float("-inf")) -> dict[int, Logprob]:
    """One token's log probabilities by token id; those below ``lowest`` are given as that."""
    found = {
        token: Logprob(max(value, lowest), rank, texts.text(token)) for rank, (token, value) in enumerate(entry.top, 1)
    }
    found[entry.token_id] = Logprob(max(entry.logprob, lowest), entry.rank, texts.text(entry.token_id))
    return found


@dataclass(slots=True)
class CompletionOutput:
    """One sampled answer.

    Attributes:
        logprobs: per token, token id to Logprob, the sampled one and the best ones; None unless asked for.
        finish_reason: stop, length, abort, error or repetition.
        stop_reason: the stop string, or the stop token's id, that ended it.
        error: why it failed, where ``finish_reason`` is error; the other answers of the call are not touched by it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """What became of one prompt; ``outputs`` has ``n`` answers.

    ``prompt_logprobs``: per prompt token, token id to Logprob, its own and the best ones; None for the first token,
    and None in all unless asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class EngineStatistics(dict[str, int]):
    """The scheduler's counters and gauges, by key or as attributes: the fields of the Statistics message.

    What is counted by reason has a key for each reason that there was, such as ``waiting_by_reason_budget``: ask for
    it with ``get``. Histograms are not in it.
    """

    @classmethod
    def of(cls, message: Statistics) -> "EngineStatistics":
        flat = cls()
        for name in message.__struct_fields__:
            value = getattr(message, name)
            if isinstance(value, dict):
                flat |= {f"{name}_{reason}": count for reason, count in value.items()}
            elif isinstance(value, int) and name != "query":
                flat[name] = int(value)
        return flat

    def __getattr__(self, name: str) -> int:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None
