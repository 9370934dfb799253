"""The deadline of a step, after which its workers count as hung."""

from collections import deque

from quire.protocol.process.log import event_logger

log = event_logger("scheduler")

FLOOR_S = 2.0
TIMES_USUAL = 10.0
FIRST_STEPS_S = 60.0
"""Deadline of a step whose size was not seen yet: it compiles kernels and touches memory for the first time."""
TIMES_SLOW = 5.0
SLOW_S = 0.5
"""A step is reported as slow above SLOW_S and above TIMES_SLOW times the longest recent step of its size."""
NUM_KEPT = 100
"""Step times kept per size; their maximum estimates the 99th percentile."""


class StepDeadline:
    """Learns step durations and computes when the oldest step in flight is overdue. Results arrive in order.

    The size of a step is the bit length of its number of tokens. A step may take TIMES_USUAL times the longest recent
    step of its size, but at least FLOOR_S; a step of a new size may take FIRST_STEPS_S.
    """

    def __init__(self) -> None:
        self._in_flight: deque[tuple[int, int, float]] = deque()
        """(step, size, time of sending)."""
        self._seconds: dict[int, deque[float]] = {}
        self._last_result = 0.0
        self.num_slow = 0
        """Slow steps since the start; see SLOW_S."""

    def sent(self, step: int, num_tokens: int, now: float) -> None:
        self._in_flight.append((step, num_tokens.bit_length(), now))

    def result_received(self, step: int, now: float) -> float | None:
        """Record the result of a step, and return the step's duration in seconds.

        Ignored, with None, unless it is the oldest in flight, because a result can arrive twice.
        """
        if not self._in_flight or self._in_flight[0][0] != step:
            return None
        _, size, sent_at = self._in_flight.popleft()
        seconds = self._seconds.get(size)
        if seconds is None:
            seconds = self._seconds[size] = deque(maxlen=NUM_KEPT)
        duration = now - max(sent_at, self._last_result)  # a worker executes steps one after another
        if duration > SLOW_S and seconds and duration > TIMES_SLOW * max(seconds):
            self.num_slow += 1
            log.warning("slow step", step=step, seconds=duration, longest_before=max(seconds))
        seconds.append(duration)
        self._last_result = now
        return duration

    def forget(self) -> None:
        """Forget steps in flight and learned durations: the workers are replaced."""
        self._in_flight.clear()
        # New workers compile their kernels again, and a deadline learned from warm ones would end them.
        self._seconds.clear()

    def remaining(self, now: float) -> float | None:
        """Return the seconds until the oldest step in flight is overdue, negative when it is, or None without steps."""
        if not self._in_flight:
            return None
        _, size, sent_at = self._in_flight[0]
        return max(sent_at, self._last_result) + self.allowed(size) - now

    def allowed(self, size: int) -> float:
        seconds = self._seconds.get(size)
        # The maximum and not a mean: the deadline shall catch a hang, and a step that took long once may do so again. A
        # wrong suspicion costs all requests a recomputation.
        return FIRST_STEPS_S if seconds is None else max(FLOOR_S, TIMES_USUAL * max(seconds))
