"""Options for loading a trace of any format."""

import math
from dataclasses import dataclass
from pathlib import Path

from quire.protocol.errors import ConfigError


@dataclass(frozen=True)
class LoadOptions:
    """Load options. Times are seconds of the trace, before ``rate`` is applied.

    Attributes:
        rate: speed-up of the starts of conversations and independent requests; pauses inside a conversation (tool
            calls, think time) are unchanged.
        lenient: skip and count bad lines instead of rejecting the file.
        limit: number of calls to use; None for all.
        stagger: seconds between the starts of conversations, if the trace has no common clock (agentic).
        seed: random seed for synthetic arrivals and lengths.
        start, duration: window of arrivals to use; ``duration`` None: to the end.
        join_subagents: in a closed loop, the request after a sub-agent waits for the sub-agent (agentic).
        tokenizer: checkpoint folder whose tokenizer is applied to text; None for the demo model's.
        block_size: tokens per content id, if the trace has tokens or text but no ids.
    """

    rate: float = 1.0
    lenient: bool = False
    limit: int | None = None
    stagger: float = 60.0
    seed: int = 0
    start: float = 0.0
    duration: float | None = None
    join_subagents: bool = False
    tokenizer: Path | None = None
    block_size: int = 16

    def __post_init__(self) -> None:
        """Raises ConfigError if a number is out of range."""
        for name, value, is_good in (
            ("rate", self.rate, self.rate > 0),
            ("limit", self.limit, self.limit is None or self.limit > 0),
            ("stagger", self.stagger, self.stagger >= 0),
            ("seed", self.seed, self.seed >= 0),
            ("start", self.start, self.start >= 0),
            ("duration", self.duration, self.duration is None or self.duration > 0),
            ("block_size", self.block_size, self.block_size > 0),
        ):
            if not is_good or (value is not None and not math.isfinite(value)):
                raise ConfigError(f"{name.replace('_', '-')} is out of range (got {value})")
