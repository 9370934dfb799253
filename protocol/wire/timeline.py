"""The events of one request, for a client that asks for them."""

import msgspec


class TimelineEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happened to a request with ``SamplingParams.return_timeline``.

    Attributes:
        event: queued, scheduled, preempted, loaded, first_token, resubmitted or ended.
        seconds: when, on the monotonic clock that all processes share; for clients since the first event.
        reason: why it was preempted (a PreemptReason) or ended (a finish reason), or which tiers it was loaded from.
        tokens: found in the prefix cache, lost with the preemption, loaded (0 if a part failed), or generated.
    """

    event: str
    seconds: float
    reason: str = ""
    tokens: int = 0
