"""The throughput line: what the engine did in the last seconds, logged while there is work."""

import logging
from typing import Any

from quire.protocol.process.log import event_logger
from quire.protocol.wire.front_end_messages import Statistics
from quire.scheduler_proc.scheduler import Scheduler

log = event_logger("scheduler")

INTERVAL_S = 10.0
NOTHING = Statistics(0)


class ThroughputLog:
    """Logs rates and gauges every ``INTERVAL_S`` in which something happened. Costs nothing in between.

    Attributes:
        due: when ``report`` is to be called next.
    """

    def __init__(self, now: float) -> None:
        self.due = now + INTERVAL_S
        self._since = now
        self._before = NOTHING

    def report(self, scheduler: Scheduler | None, now: float) -> None:
        """Log the time since the last call, unless the engine had no work."""
        seconds, self._since, self.due = now - self._since, now, now + INTERVAL_S
        if scheduler is None or not log.isEnabledFor(logging.INFO):
            return
        before, self._before = self._before, scheduler.statistics()
        current = self._before
        num_prompt = current.prompt_tokens - before.prompt_tokens
        num_output = current.generation_tokens - before.generation_tokens
        if not (num_prompt or num_output or current.num_running or current.num_waiting):
            return
        queries = current.prefix_cache_queries - before.prefix_cache_queries
        drafts = current.num_draft_tokens - before.num_draft_tokens
        data: dict[str, Any] = {
            "prompt_tokens_per_s": num_prompt / seconds,
            "output_tokens_per_s": num_output / seconds,
            "running": current.num_running,
            "waiting": current.num_waiting,
            "kv_use": 1.0 - current.num_free_blocks / max(current.num_usable_blocks, 1),
            "prefix_hit_share": (current.prefix_cache_hit_tokens - before.prefix_cache_hit_tokens) / max(queries, 1),
            "preemptions": current.num_preemptions - before.num_preemptions,
        }
        if drafts:
            data["draft_acceptance"] = (current.num_accepted_tokens - before.num_accepted_tokens) / drafts
        log.info("throughput", **data)
