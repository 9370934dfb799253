"""Timing of calls: CUDA events over replays of a graph, or the host's clock. Results are medians, except for limits."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

_WARM_UPS = 2
_GRAPH_S = 0.01
"""Target seconds of a replay, so that its launch time is negligible."""

_MAX_CALLS = 128
_MIN_ROUNDS = 5

_MAX_FIRST_CALL = 4
"""If the first call on a CPU takes more than this many times the seconds per figure, its time is the result."""


class CallTimer:
    """Times calls on one device.

    ``calls`` do the same work on different memory: when they alternate, no call finds its input in a cache. ``copies``
    returns the number of calls for this.

    Args:
        figure_s: approximate seconds per figure; 0 makes each call once, for dry runs.
    """

    def __init__(self, device: torch.device, figure_s: float) -> None:
        self.device = device
        self._figure_s = figure_s
        self._cache_bytes = 0
        if device.type == "cuda":
            self._cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size

    def copies(self, num_bytes: int) -> int:
        """Return the number of buffers of ``num_bytes`` that together are four times as large as the device's cache."""
        if self._figure_s == 0:
            return 1
        # torch does not report a CPU's cache size; few CPUs have more than 64 MiB.
        wanted = 4 * (self._cache_bytes or 1 << 26)
        return max(1, min(_MAX_CALLS, -(-wanted // max(num_bytes, 1))))

    def seconds(self, calls: Sequence[Call], *, graph: bool = True) -> float:
        """Median seconds of one call.

        Args:
            graph: capture the calls, so that launch time on the host does not count; False if they cannot be captured.
        """
        return statistics.median(self._rounds(calls, graph))

    def best_seconds(self, calls: Sequence[Call]) -> float:
        """Return seconds per call of the fastest round, the device's limit without interference of other processes."""
        return min(self._rounds(calls, graph=True))

    def alternating(self, calls: Sequence[Call]) -> list[float]:
        """Return the seconds of each call's fastest round on the host, in rounds of all calls."""
        rounds = _MIN_ROUNDS if self._figure_s else 0
        times = [elapsed_on_host(call) for call in calls]
        for _ in range(rounds):
            times = [min(best, elapsed_on_host(call)) for best, call in zip(times, calls, strict=True)]
        return times

    def _rounds(self, calls: Sequence[Call], graph: bool) -> list[float]:
        """Return the seconds of one call in each round."""
        if self._figure_s == 0:
            return self._host_rounds(calls, 1)
        if self.device.type != "cuda":
            return self._host_rounds(calls, _MIN_ROUNDS)
        return self._device_rounds(calls, graph)

    def _host_rounds(self, calls: Sequence[Call], min_rounds: int) -> list[float]:
        first = elapsed_on_host(calls[0])
        if first > _MAX_FIRST_CALL * self._figure_s > 0:
            return [first]
        times: list[float] = []
        end = time.perf_counter() + self._figure_s
        while len(times) < min_rounds or time.perf_counter() < end:
            times.append(elapsed_on_host(calls[len(times) % len(calls)]))
        return times

    def _device_rounds(self, calls: Sequence[Call], graph: bool) -> list[float]:
        for _ in range(_WARM_UPS):
            calls[0]()
        once = elapsed(calls[0])
        count = max(len(calls), min(_MAX_CALLS, int(_GRAPH_S / once) + 1))

        def all_calls() -> None:
            for index in range(count):
                calls[index % len(calls)]()

        run: Call = all_calls
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                all_calls()
            run = captured.replay
        run()
        times: list[float] = []
        end = time.perf_counter() + self._figure_s
        while len(times) < _MIN_ROUNDS or time.perf_counter() < end:
            times.append(elapsed(run) / count)
        return times


def elapsed_on_host(call: Call) -> float:
    """Return the seconds of one call by the host's clock."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def elapsed(run: Call) -> float:
    """Return the seconds that ``run`` takes on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
