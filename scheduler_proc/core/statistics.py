"""Totals that the scheduler counts."""

from collections import Counter, deque

from quire.scheduler_proc.requests.reasons import Decision, PreemptReason


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
        self.refused_messages = 0
        self.num_requests_refused = 0
        self.num_stray_messages = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_worker_restarts = 0

    def as_dict(self) -> dict[str, int]:
        return dict(vars(self))


class DecisionLog:
    """The newest decisions with their reasons, until somebody takes them; and totals that outlive them."""

    def __init__(self, max_kept: int = 4096) -> None:
        self._decisions: deque[Decision] = deque(maxlen=max_kept)
        self.preemptions: Counter[str] = Counter({str(reason): 0 for reason in PreemptReason})

    def note(self, decision: Decision) -> None:
        self._decisions.append(decision)
        if decision.kind == "preempt":
            self.preemptions[decision.reason] += 1

    def take(self) -> list[Decision]:
        """Decisions since the last call, the oldest dropped where there were too many."""
        taken = list(self._decisions)
        self._decisions.clear()
        return taken
