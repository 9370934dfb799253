"""Rules that decide which requests a result ends, and with which finish reason."""

from typing import NamedTuple, Protocol

from quire.protocol.wire.front_end_messages import EndReason
from quire.scheduler_proc.messages.results import Sampled
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.requests.stop_table import StopTable


class Ending(NamedTuple):
    reason: EndReason
    stop_reason: int | None = None
    detail: str = ""


class Endings(Protocol):
    """Checks the tokens of a result for requests that end."""

    def candidates(self, sampled: Sampled) -> list[int]:
        """Return the handles of requests that may end although they are in steady decode."""
        ...

    def ending_after(self, request: Request, token: int) -> Ending | None:
        """Return the ending of a request to which ``token`` was just appended, or None if it continues."""
        ...

    def bad_row_detail(self, handle: int) -> str:
        """The error text for the client of a request with bad logits."""
        ...


class TokenEndings:
    """By the tokens themselves: stop tokens, lengths, and repetition."""

    def __init__(self, stops: StopTable) -> None:
        self._stops = stops

    def candidates(self, sampled: Sampled) -> list[int]:
        hits = self._stops.positions(sampled.last_tokens)
        return sampled.handles[hits].tolist() if hits else []

    def ending_after(self, request: Request, token: int) -> Ending | None:
        if token in request.stop_tokens and _may_stop(request):
            own = token in request.sampling.stop_token_ids
            return Ending(EndReason.STOPPED, token if own else None)
        if (ending := length_ending(request)) is not None:
            return ending
        if request.repetition is not None:
            request.repetition.add(token)
        return Ending(EndReason.REPETITION) if request.repeats_itself else None

    def bad_row_detail(self, handle: int) -> str:
        return "numerical_error: the model's logits or hidden states are not finite"


def length_ending(request: Request) -> Ending | None:
    """Return the ending by the length limit, or None."""
    return Ending(EndReason.LENGTH) if request.num_tokens >= request.max_total_tokens else None


def _may_stop(request: Request) -> bool:
    """Whether the newest token may stop the request: it is not among the first ``min_tokens``, or ends a grammar.

    Workers sample a stop token so early only if the grammar allows nothing else.
    """
    least = request.sampling.min_tokens
    return not least or request.num_output_tokens > least or request.has_grammar
