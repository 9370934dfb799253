"""What the scheduler has done: totals, the newest decisions with their reasons, and the events of timelines."""

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from typing import Any

from quire.protocol.wire.front_end_messages import Histogram, StepOutputs
from quire.protocol.wire.timeline import TimelineEvent
from quire.scheduler_proc.requests.reasons import Decision, PreemptReason, WaitReason
from quire.scheduler_proc.requests.request import Request


class Counters:
    """Totals since start, with the field names of the Statistics message."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hit_tokens = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.dropped_tokens = 0
        self.refused_messages = 0
        self.num_requests_refused = 0
        self.num_stray_messages = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_worker_restarts = 0

        self.num_accepted_tokens_per_pos = [0] * num_speculative_tokens
        self.steps_by_size: defaultdict[int, int] = defaultdict(int)
        """Number of steps by their number of tokens: one cheap operation per step."""

    @property
    def num_steps(self) -> int:
        return sum(self.steps_by_size.values())

    @property
    def step_tokens(self) -> Histogram:
        """The number of tokens of each step."""
        bounds = [2**i for i in range(15)]
        counts = [0] * (len(bounds) + 1)
        for size, count in self.steps_by_size.items():
            counts[bisect_left(bounds, size)] += count
        total = sum(size * count for size, count in self.steps_by_size.items())
        return Histogram([float(bound) for bound in bounds], counts, float(total))

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}


class RecentDecisions:
    """The newest decisions with their reasons, and the number of preemptions and choices by reason since start.

    ``now``: the time of what happens, for timelines only.
    """

    def __init__(self, max_kept: int = 4096) -> None:
        self._decisions: deque[Decision] = deque(maxlen=max_kept)
        self.preemptions: Counter[str] = Counter({str(reason): 0 for reason in PreemptReason})
        self.load_choices = Counter({"load": 0, "compute": 0, "split": 0})
        self.now = 0.0
        self._events: list[tuple[int, StepOutputs]] = []

    def note(self, decision: Decision) -> None:
        self._decisions.append(decision)
        if decision.kind == "preempt":
            self.preemptions[decision.reason] += 1
        elif decision.kind == "choose" or decision.reason == WaitReason.LOADING:
            self.load_choices["load" if decision.kind == "wait" else decision.reason] += 1

    def preempted(self, step: int, request: Request, reason: PreemptReason, beneficiary: str = "") -> None:
        """Note that a request is about to be preempted."""
        lost = request.num_computed_tokens
        self.note(Decision(step, "preempt", request.request_id, reason, beneficiary, num_tokens=lost))
        self.follow(request, "preempted", reason, lost)

    def follow(self, request: Request, event: str, reason: str = "", num_tokens: int = 0) -> None:
        """Keep an event for the client of a request, if it has asked for them."""
        if request.sampling.return_timeline:
            entry = request.request_id, TimelineEvent(event, self.now, reason, num_tokens)
            self._events.append((request.client, StepOutputs([], None, None, [], timeline=[entry])))

    def take_events(self) -> list[tuple[int, StepOutputs]]:
        """Return and clear the (client, message) pairs of events. They are to be sent before tokens and endings."""
        taken, self._events = self._events, []
        return taken

    def take(self) -> list[Decision]:
        """Return and clear the decisions since the last call; only the newest ``max_kept`` are kept."""
        taken = list(self._decisions)
        self._decisions.clear()
        return taken
