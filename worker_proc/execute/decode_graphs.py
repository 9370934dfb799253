"""CUDA graphs: steps that are captured for several batch sizes when the worker starts, then replayed.

A kernel launch costs the host 5 to 10 µs, and a step has hundreds of them; a replay is a single launch. Without a GPU,
or with ``--enforce-eager``, the same steps are launched kernel by kernel.
"""

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any, Generic, TypeVar

import torch

from quire.protocol.process.log import event_logger
from quire.worker_proc.batch.step_inputs import StepInputs
from quire.worker_proc.execute.decode_step import DecodeStep
from quire.worker_proc.execute.verify_step import VerifyStep
from quire.worker_proc.models.additions import Additions

log = event_logger("worker")

_STEP_OF_SIZES = 8
_WARM_UPS = 2
"""Runs before a capture, because kernels are compiled and libraries allocate their workspaces at their first use."""

Key = TypeVar("Key", bound=Hashable)
Launch = Callable[[Key], torch.Tensor | None]
"""Launches the step of a key; returns its logits, or None."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured graph, and the tensor that a replay writes, if any."""

    graph: "torch.cuda.CUDAGraph"
    logits: torch.Tensor | None


def capture_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes to capture, ascending: 1, 2, 4, multiples of 8, and above 256 multiples of 32."""
    # A batch runs in the next larger graph, with rows of padding. More sizes waste less of it and take longer to
    # capture; each start pays for that.
    sizes = {1, 2, 4, max_rows, *range(_STEP_OF_SIZES, min(max_rows, 256) + 1, _STEP_OF_SIZES)}
    sizes |= set(range(256, max_rows + 1, 4 * _STEP_OF_SIZES))
    return sorted(size for size in sizes if size <= max_rows)


class Graphs(Generic[Key]):
    """Runs the steps of some keys, by replay if they were captured.

    All graphs share one memory pool: only one runs at a time, and its logits are read before the next one is launched.
    """

    def __init__(self, launch: "Launch[Key]") -> None:
        self._launch = launch
        self._captured: dict[Key, Captured] = {}

    def capture(self, keys: Iterable[Key], pool: Any) -> None:
        """Capture the steps, largest first: smaller graphs reuse the memory in the pool. The batch must be empty, so
        that all rows are padding and no slot is read or written.
        """
        for key in keys:
            for _ in range(_WARM_UPS):
                self._launch(key)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._launch(key)
            self._captured[key] = Captured(graph, logits)

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, key: Key) -> torch.Tensor | None:
        """Run the step. The returned tensor is valid until the next step."""
        captured = self._captured.get(key)
        if captured is None:
            return self._launch(key)
        captured.graph.replay()
        return captured.logits


class DecodeGraphs:
    """Runs a ``DecodeStep`` for any number of rows, and, with draft tokens, a ``VerifyStep``."""

    def __init__(
        self, step: DecodeStep, verify: VerifyStep | None, additions: Additions | None, *, eager: bool
    ) -> None:
        """
        Args:
            verify: None without speculative decoding.
            additions: what rows add to linear layers; steps with additions have graphs of their own.
        """
        self.step, self.verify, self._additions = step, verify, additions
        self.eager = eager
        self._sizes = capture_sizes(step.max_rows)
        self._decode: Graphs[tuple[int, bool, bool]] = Graphs(self._launch)
        self._verify: Graphs[tuple[int, bool]] = Graphs(self._launch_verify)

    def capture(self, *, largest_only: bool = False) -> None:
        """Capture all graphs, or those of the largest size. The batch must be empty."""
        if self.eager:
            log.info("no CUDA graphs: --enforce-eager or no GPU")
            return
        begun, before = time.monotonic(), torch.cuda.memory_allocated()
        pool = torch.cuda.graph_pool_handle()
        sizes = self._sizes[-1:] if largest_only else self._sizes[::-1]
        adapted = (False,) if self._additions is None else (True, False)
        if self.verify is not None:
            self._verify.capture(product(sizes, adapted), pool)
        self._decode.capture(product(sizes, (True, False), adapted), pool)
        taken = (torch.cuda.memory_allocated() - before) / 2**20
        seconds = time.monotonic() - begun
        num_graphs = len(self._decode) + len(self._verify)
        log.info("captured CUDA graphs", graphs=num_graphs, max_rows=self._sizes[-1], mib=taken, seconds=seconds)

    def run(self, num_rows: int, sampling: bool) -> torch.Tensor | None:
        """Run one step of the batch's ``num_rows`` rows.

        Args:
            sampling: also sample, write ``step.sampled`` and ``step.bad``, and advance.

        Returns:
            Logits ``[num_rows, vocab_size]``, valid until the next step; None with sampling.
        """
        if self._changes_experts:
            logits = self._launch((num_rows, sampling, True))
        else:
            logits = self._decode.run((self.size_for(num_rows), sampling, self._adapted))
        return None if logits is None else logits[:num_rows]

    def takes(self, inputs: StepInputs) -> bool:
        """Return whether ``run_verify`` can run a step with these inputs."""
        return self.verify is not None and not self._changes_experts and self.verify.takes(inputs)

    def store(self, inputs: StepInputs) -> torch.Tensor:
        """Send the inputs of ``run_verify`` with the step's one copy, as ``VerifyStep.store`` does."""
        assert self.verify is not None
        return self.verify.store(inputs, self.size_for(len(inputs.rows)))

    def run_verify(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """Run one step with draft tokens, whose inputs were stored; returns logits ``[num_tokens, vocab_size]``."""
        logits = self._verify.run((self.size_for(num_rows), self._adapted))
        assert logits is not None
        return logits[:num_tokens]

    def size_for(self, num_rows: int) -> int:
        """Return the size of the smallest graph for ``num_rows`` rows."""
        return next(size for size in self._sizes if size >= num_rows)

    @property
    def _adapted(self) -> bool:
        return self._additions is not None and self._additions.active

    @property
    def _changes_experts(self) -> bool:
        """Whether rows of the running step change experts: it waits for the device, so that no graph has it."""
        return self._additions is not None and self._additions.changes_experts

    def _set_adapted(self, adapted: bool) -> None:
        if self._additions is not None:
            self._additions.active = adapted

    def _launch(self, key: tuple[int, bool, bool]) -> torch.Tensor | None:
        size, sampling, adapted = key
        self._set_adapted(adapted)
        logits = self.step.forward(size)
        if not sampling:
            return logits
        self.step.sample(logits)
        return None

    def _launch_verify(self, key: tuple[int, bool]) -> torch.Tensor:
        assert self.verify is not None
        size, adapted = key
        self._set_adapted(adapted)
        return self.verify.forward(size)
