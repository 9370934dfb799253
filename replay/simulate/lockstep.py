"""Engines that share the experts of their model, and therefore step together."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from quire.protocol.wire.arrays import Int32
from quire.replay.costs.expert_parallel import NOTHING, ExpertParallelCost
from quire.replay.run.step_shape import StepShape
from quire.replay.simulate.simulator import Simulator, StepInFlight
from quire.replay.workload.sources import NEVER


class LockstepSimulator(Simulator):
    """An engine whose steps begin when all engines begin one. In a step of the others, it computes nothing or a step.

    While it computes nothing it waits for the others, and an engine that receives between steps receives afterwards.
    """

    def __init__(self, *parts: Any, **options: Any) -> None:
        # The length of a step depends on what the other engines compute in it, so that no engine can run ahead.
        super().__init__(*parts, **(options | {"fast_forward": False}))
        self._scheduled: deque[StepShape] = deque()
        """Shapes of the scheduled steps that the worker has not started, the last ones in flight."""
        self._idle_until = 0.0

    @property
    def next_shape(self) -> StepShape | None:
        """The shape of the next step to begin, or None."""
        return self._scheduled[0] if self._scheduled else None

    def next_time(self) -> float:
        now = super().next_time()
        return max(now, self._idle_until) if self._receives_between_steps else now

    def begin_step(self, begin: float, end: float) -> None:
        """Compute the next step, or nothing, from ``begin`` to ``end``."""
        if not self._scheduled:
            self._idle_until = end
            return
        place = len(self._in_flight) - len(self._scheduled)
        self._scheduled.popleft()
        self._in_flight[place] = self._in_flight[place]._replace(begin=begin, end=end)
        self._worker_free = end

    def _launch(self, step: int, shape: StepShape, handles: Int32 | None) -> None:
        self._scheduled.append(shape)
        self._in_flight.append(StepInFlight(step, NEVER, NEVER, handles))


class JointSteps:
    """Begins the steps of engines together. A step ends for all of them at the same time."""

    def __init__(self, engines: Sequence[LockstepSimulator], cost: ExpertParallelCost) -> None:
        self._engines = engines
        self._cost = cost
        self.end = 0.0
        """When the step that the workers compute ends."""

    def begin(self, now: float) -> bool:
        """Start the next step of all engines, if the last one has ended by ``now`` and any engine has scheduled one.

        Returns:
            Whether a step was started.
        """
        shapes = [engine.next_shape for engine in self._engines]
        if self.end > now or not any(shapes):
            return False
        self.end = now + self._cost.seconds_together([shape or NOTHING for shape in shapes])
        for engine in self._engines:
            engine.begin_step(now, self.end)
        return True
