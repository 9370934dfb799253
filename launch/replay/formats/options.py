"""What the user says of how a trace is to be read, whatever its format."""

import math
from dataclasses import dataclass
from pathlib import Path

from quire.protocol.errors import ConfigError


@dataclass(frozen=True)
class LoadOptions:
    """Times are seconds of the trace, before ``rate``.

    Attributes:
        rate: conversations and independent requests start this many times as fast; pauses inside a conversation (a
            tool, a person) stay as they are.
        lenient: leave bad lines out and count them, rather than refuse the file.
        limit: the first so many calls; None for all.
        stagger: seconds between the starts of conversations, where the trace has no common clock (agentic).
        seed: of a synthetic workload's arrivals and lengths.
        start, duration: only calls that come in this window; ``duration`` None: to the end.
        join_subagents: in a closed loop, the request after a sub-agent waits for it (agentic).
        tokenizer: folder of the checkpoint whose tokenizer cuts text; None for the demo model's.
        block_size: tokens per content id where the trace has tokens or text rather than ids.
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
        """Raises: ConfigError: a number is out of its range."""
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
                raise ConfigError(f"{name.replace('_', '-')} cannot be {value}")
