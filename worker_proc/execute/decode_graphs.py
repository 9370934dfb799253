"""CUDA graphs of steady decode steps: captured for several batch sizes when the worker starts, then replayed.

A kernel launch costs the host 5 to 10 µs, and a step has hundreds of them; a replay is a single launch. Without a GPU,
or with ``--enforce-eager``, the same step is launched kernel by kernel.
"""

import time
from dataclasses import dataclass

import torch

from quire.protocol.process.log import event_logger
from quire.worker_proc.execute.decode_step import DecodeStep

log = event_logger("worker")

_STEP_OF_SIZES = 8
_WARM_UPS = 2
"""Runs before a capture, because kernels are compiled and libraries allocate their workspaces at their first use."""


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A captured graph. ``logits`` is the tensor that a replay writes; None for a graph with sampling."""

    graph: "torch.cuda.CUDAGraph"
    logits: torch.Tensor | None


def capture_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes to capture, ascending: 1, 2, 4, multiples of 8, and above 256 multiples of 32."""
    sizes = {1, 2, 4, max_rows, *range(_STEP_OF_SIZES, min(max_rows, 256) + 1, _STEP_OF_SIZES)}
    sizes |= set(range(256, max_rows + 1, 4 * _STEP_OF_SIZES))
    return sorted(size for size in sizes if size <= max_rows)


class DecodeGraphs:
    """Runs a ``DecodeStep`` for any number of rows, by replay if a graph was captured.

    All graphs share one memory pool: only one runs at a time, and its logits are read before the next one is launched.
    """

    def __init__(self, step: DecodeStep, *, eager: bool) -> None:
        self.step = step
        self.eager = eager
        self._sizes = capture_sizes(step.max_rows)
        self._graphs: dict[tuple[int, bool], CapturedStep] = {}

    def capture(self) -> None:
        """Capture all graphs. The batch must be empty, so that all rows are padding and no slot is read or written."""
        if self.eager:
            log.info("no CUDA graphs: --enforce-eager or no GPU")
            return
        begun, before = time.monotonic(), torch.cuda.memory_allocated()
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):  # largest first: the smaller graphs then reuse the memory in its pool
            for sampling in (True, False):
                for _ in range(_WARM_UPS):
                    self._launch(size, sampling)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    logits = self._launch(size, sampling)
                self._graphs[size, sampling] = CapturedStep(graph, logits)
        taken = (torch.cuda.memory_allocated() - before) / 2**20
        seconds = time.monotonic() - begun
        log.info("captured CUDA graphs", graphs=len(self._graphs), max_rows=self._sizes[-1], mib=taken, seconds=seconds)

    def run(self, num_rows: int, sampling: bool) -> torch.Tensor | None:
        """Run one step of the batch's ``num_rows`` rows.

        Args:
            sampling: also sample, write ``step.sampled`` and ``step.bad``, and advance.

        Returns:
            Logits ``[num_rows, vocab_size]``, valid until the next step; None with sampling.
        """
        size = self._size_for(num_rows)
        captured = self._graphs.get((size, sampling))
        if captured is None:
            logits = self._launch(size, sampling)
        else:
            captured.graph.replay()
            logits = captured.logits
        return None if logits is None else logits[:num_rows]

    def _launch(self, size: int, sampling: bool) -> torch.Tensor | None:
        logits = self.step.forward(size)
        if not sampling:
            return logits
        self.step.sample(logits)
        return None

    def _size_for(self, num_rows: int) -> int:
        return next(size for size in self._sizes if size >= num_rows)
