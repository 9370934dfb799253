"""Seconds per call: by CUDA events over replays of a graph, or by the host's clock. The median, but for limits."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

_WARM_UPS = 2
_GRAPH_S = 0.01
"""What a replay should take, so that its own launch does not count."""

_MOST_CALLS = 128
_LEAST_ROUNDS = 5

_PATIENCE = 4
"""A first call on a CPU that takes so many times what a figure may take is the figure: no second one is worth it."""


class Clock:
    """Times calls on one device.

    ``calls`` do the same work on different memory: made in turn, none finds in a cache what it reads. How many that
    takes, ``copies`` knows.

    Args:
        figure_s: seconds to spend on a figure, about; 0: every call is made once, for a trial of the script.
    """

    def __init__(self, device: torch.device, figure_s: float) -> None:
        self.device = device
        self._figure_s = figure_s
        self._cache_bytes = 0
        if device.type == "cuda":
            self._cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size

    def copies(self, num_bytes: int) -> int:
        """How many sets of memory of ``num_bytes`` each outgrow the device's cache fourfold."""
        if self._figure_s == 0:
            return 1
        # A CPU's caches are not told; 64 MiB is more than most cores share.
        wanted = 4 * (self._cache_bytes or 1 << 26)
        return max(1, min(_MOST_CALLS, -(-wanted // max(num_bytes, 1))))

    def seconds(self, calls: Sequence[Call], *, graph: bool = True) -> float:
        """Median seconds of one call.

        Args:
            graph: capture the calls, so that launching costs the host nothing; False for what cannot be captured.
        """
        return statistics.median(self._rounds(calls, graph))

    def best_seconds(self, calls: Sequence[Call]) -> float:
        """Of the fastest round: what a device can do, whoever else uses it."""
        return min(self._rounds(calls, graph=True))

    def _rounds(self, calls: Sequence[Call], graph: bool) -> list[float]:
        """Seconds of one call, round by round."""
        if self._figure_s == 0:
            return self._host_rounds(calls, 1)
        if self.device.type != "cuda":
            return self._host_rounds(calls, _LEAST_ROUNDS)
        return self._device_rounds(calls, graph)

    def _host_rounds(self, calls: Sequence[Call], least: int) -> list[float]:
        begun = time.perf_counter()
        calls[0]()
        first = time.perf_counter() - begun
        if first > _PATIENCE * self._figure_s > 0:
            return [first]
        taken: list[float] = []
        end = time.perf_counter() + self._figure_s
        while len(taken) < least or time.perf_counter() < end:
            begun = time.perf_counter()
            calls[len(taken) % len(calls)]()
            taken.append(time.perf_counter() - begun)
        return taken

    def _device_rounds(self, calls: Sequence[Call], graph: bool) -> list[float]:
        for _ in range(_WARM_UPS):
            calls[0]()
        once = elapsed(calls[0])
        count = max(len(calls), min(_MOST_CALLS, int(_GRAPH_S / once) + 1))

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
        taken: list[float] = []
        end = time.perf_counter() + self._figure_s
        while len(taken) < _LEAST_ROUNDS or time.perf_counter() < end:
            taken.append(elapsed(run) / count)
        return taken


def elapsed(run: Call) -> float:
    """Seconds on the device."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begun.record()
    run()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1000
