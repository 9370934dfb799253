"""Totals that the scheduler counts."""


class Counters:
    """Totals since start; the names are those of the Statistics message."""

    def __init__(self) -> None:
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hit_tokens = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.num_steps = 0
        self.dropped_tokens = 0

    def as_dict(self) -> dict[str, int]:
        return vars(self)
