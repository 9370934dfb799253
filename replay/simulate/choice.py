"""Which of several simulated engines gets a call."""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from hashlib import sha256
from typing import TypeAlias

import numpy as np

from quire.protocol.routing import EnginePlace
from quire.protocol.wire.kv_events import AllBlocksCleared
from quire.protocol.wire.router_messages import Progress, Route
from quire.replay.run.run_record import StepColumns
from quire.replay.simulate.setup import Setup
from quire.replay.workload.workload import SHORT_HASH_BYTES, Call, block_names
from quire.router_proc.core.events import CacheChanged, EngineMeasured, EnginesKnown
from quire.router_proc.core.index import counted_group
from quire.router_proc.core.pace import Pace, compare
from quire.router_proc.core.router import Router
from quire.scheduler_proc.kv.events import KVEventRecorder
from quire.scheduler_proc.scheduler import Scheduler

PUBLISH_S = 0.1
"""Seconds between the loads that vLLM's coordinator sends to clients."""
WAITING_WEIGHT = 4
"""Running requests that count as much as a waiting one in vLLM's client."""


class RouterChoice:
    """The live router, which receives the engines' events at once, and their pace once a second as in the process.

    ``reasons`` counts the choices by reason.
    """

    def __init__(self, setup: Setup, recorders: Sequence[KVEventRecorder | None], steps: Sequence[StepColumns]) -> None:
        """
        Args:
            recorders: of each engine's prefix cache, for the policy ``cache``.
            steps: of each engine, to which its finished steps are added.
        """
        assert setup.routing != "vllm"
        self.reasons = Counter[str]()
        self._router = Router(setup.config.routing(setup.routing, ""))
        self._recorders = recorders
        self._setup = setup
        self._group = counted_group(setup.layout)
        self._steps = steps
        self._paces = [Pace() for _ in steps]
        self._num_seen = [0] * len(steps)
        self._measured_at = 0.0
        self._started: list[int] = []
        self._ended: list[int] = []
        places = [
            EnginePlace(number, "simulated", 1, "serving", setup.layout.block_size, 1, device=f"{setup.pace(number):g}")
            for number in range(len(recorders))
        ]
        self._router.consume(EnginesKnown(places))

    def choose(self, call: Call, now: float) -> int:
        """Return the number of the engine that gets ``call``."""
        self._measure(now)
        self._send_progress()
        adapter = sha256(call.adapter.encode()).digest() if call.adapter and self._setup.config.enable_lora else b""
        self._router.consume(
            Route(call.number, call.num_prompt_tokens, self._keys(call), call.conversation, 0, adapter)
        )
        ((_, routed),) = self._router.take_messages()
        self.reasons[routed.reason] += 1
        return routed.engine

    def started(self, call: Call) -> None:
        """Note that ``call`` has got its first token."""
        self._started.append(call.number)

    def ended(self, call: Call) -> None:
        """Note that ``call`` has ended or was rejected."""
        self._ended.append(call.number)

    def advanced(self, engine: int, now: float) -> None:
        """Note that an engine has consumed events or scheduled steps."""
        recorder = self._recorders[engine]
        if recorder is not None and (events := recorder.take()):
            counted = [each for each in events if isinstance(each, AllBlocksCleared) or each.group == self._group]
            self._router.consume(CacheChanged(engine, counted))

    def _send_progress(self) -> None:
        if self._started or self._ended:
            self._router.consume(Progress(self._started, self._ended))
            self._started, self._ended = [], []

    def _measure(self, now: float) -> None:
        """Report the engines' paces, as the process does once a second."""
        if now < self._measured_at + 1.0:
            return
        for number, (steps, pace) in enumerate(zip(self._steps, self._paces, strict=True)):
            first = self._num_seen[number]
            self._num_seen[number] = last = bisect_right(steps.end, now, first)
            tokens = sum(steps.prefill_tokens[first:last]) + sum(steps.decode_tokens[first:last])
            seconds = sum(steps.end[first:last]) - sum(steps.begin[first:last])
            pace.add(now - self._measured_at, seconds, tokens, last - first)
        self._measured_at = now
        for number, found in enumerate(compare(self._paces)):
            self._router.consume(EngineMeasured(number, found))

    def _keys(self, call: Call) -> bytes:
        """Return the first 8 bytes of the hash of each full block of the prompt."""
        if self._setup.routing != "cache":
            return b""
        size = self._setup.layout.block_size
        words = np.frombuffer(block_names(call, size), np.uint64).reshape(-1, SHORT_HASH_BYTES // 8)
        return words[: call.num_prompt_tokens // size, 0].tobytes()


class VllmChoice:
    """The client of vLLM 0.19, which knows each engine's load as it was published last, and its own requests since.

    It chooses the least ``4 * waiting + running``, the first of equal ones; its own requests since then count as
    waiting (``DPLBAsyncMPClient.get_core_engine_for_request`` of vllm/v1/engine/core_client.py). The coordinator
    (vllm/v1/engine/coordinator.py) publishes the loads after the engines' last steps every 100 ms.
    """

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.reasons = Counter[str]()
        self._schedulers = schedulers
        self._reports: list[deque[tuple[float, int]]] = [deque() for _ in schedulers]
        """(time, score) of each engine after its steps, oldest first; all since the last one that was published."""
        self._scores = [0] * len(schedulers)
        self._published = 0
        """Number of intervals at the end of which loads were published."""

    def choose(self, call: Call, now: float) -> int:
        self._publish(now)
        engine = self._scores.index(min(self._scores))
        self._scores[engine] += WAITING_WEIGHT
        self.reasons["load"] += 1
        return engine

    def started(self, call: Call) -> None:
        pass

    def ended(self, call: Call) -> None:
        pass

    def advanced(self, engine: int, now: float) -> None:
        table = self._schedulers[engine].table
        self._reports[engine].append((now, WAITING_WEIGHT * table.num_waiting + len(table.running)))

    def _publish(self, now: float) -> None:
        """Replace the scores by those that were published last."""
        intervals = int(now / PUBLISH_S)
        if intervals == self._published:
            return
        self._published = intervals
        for engine, reports in enumerate(self._reports):
            while len(reports) > 1 and reports[1][0] <= intervals * PUBLISH_S:
                reports.popleft()
            reported = bool(reports) and reports[0][0] <= intervals * PUBLISH_S
            self._scores[engine] = reports[0][1] if reported else 0


Choice: TypeAlias = RouterChoice | VllmChoice
