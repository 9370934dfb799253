"""How long a step may take before its workers count as hung."""

from collections import deque

from quire.protocol.process.log import event_logger

log = event_logger("scheduler")

FLOOR_S = 2.0
TIMES_USUAL = 10.0
FIRST_STEPS_S = 60.0
"""For steps of a size that was not seen yet: kernels are compiled, memory is touched for the first time."""
TIMES_SLOW = 5.0
SLOW_S = 0.5
"""What is slower than that and ``TIMES_SLOW`` as slow as usual is worth a warning."""
NUM_KEPT = 100
"""Of the steps of one size: the longest of them is what 99 of 100 do not exceed."""


class StepDeadline:
    """Learns what steps take, and says when the oldest in flight is overdue. Steps are answered in order.

    Sizes are powers of two of a step's tokens. A step may take ``TIMES_USUAL`` as long as the longest of the last ones
    of its size, FLOOR_S at least; how long a step of a new size takes is not known.
    """

    def __init__(self) -> None:
        self._in_flight: deque[tuple[int, int, float]] = deque()
        """(step, size, when it was sent)."""
        self._seconds: dict[int, deque[float]] = {}
        self._answered = 0.0
        self.num_slow = 0
        """Steps that took ``TIMES_SLOW`` as long as the longest of the last ones of their size."""

    def sent(self, step: int, num_tokens: int, now: float) -> None:
        self._in_flight.append((step, num_tokens.bit_length(), now))

    def answered(self, step: int, now: float) -> None:
        """Without effect unless it is the oldest one: an answer may come twice."""
        if not self._in_flight or self._in_flight[0][0] != step:
            return
        _, size, began = self._in_flight.popleft()
        seconds = self._seconds.get(size)
        if seconds is None:
            seconds = self._seconds[size] = deque(maxlen=NUM_KEPT)
        took = now - max(began, self._answered)  # a worker does one after the other
        if took > SLOW_S and seconds and took > TIMES_SLOW * max(seconds):
            self.num_slow += 1
            log.warning("slow step", step=step, seconds=took, longest_before=max(seconds))
        seconds.append(took)
        self._answered = now

    def forget(self) -> None:
        """Nothing in flight will be answered, and other workers compute the next steps."""
        self._in_flight.clear()
        self._seconds.clear()

    def remaining(self, now: float) -> float | None:
        """Seconds until the oldest step in flight is overdue, below 0 when it is; None while there is none."""
        if not self._in_flight:
            return None
        _, size, began = self._in_flight[0]
        return max(began, self._answered) + self.allowed(size) - now

    def allowed(self, size: int) -> float:
        seconds = self._seconds.get(size)
        return FIRST_STEPS_S if seconds is None else max(FLOOR_S, TIMES_USUAL * max(seconds))
