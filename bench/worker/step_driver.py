"""A ModelRunner with random weights that executes hand-written diffs of decoding requests."""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from quire.bench.worker.record import Size
from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import NULL_BLOCK_ID, KVLayout, kv_layout
from quire.protocol.model.model_config import ModelConfig
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.worker_messages import NewRequestData, SchedulerOutput
from quire.worker_proc.attention.backend import AttentionBackend
from quire.worker_proc.execute.model_runner import ModelRunner
from quire.worker_proc.execute.pending_result import PendingResult
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.ops import Ops
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.startup.loader import init_dummy_weights

BLOCK_SIZE = 16
_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class DriverTimes:
    """Seconds per step: wall time, and the worker's CPU time from a decoded diff to its result."""

    wall: float
    cpu: float


def sized(model: ModelConfig, size: Size) -> ModelConfig:
    """Return the model or, for a dry run, a tiny one of its family that Triton's interpreter can run."""
    if size != "dry":
        return model
    tiny = {"num_layers": 1, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 61}
    return msgspec.structs.replace(model, num_heads=4, num_kv_heads=2, head_dim=16, **tiny)


def dummy_model(model: ModelConfig, dtype: torch.dtype, device: torch.device, max_model_len: int, ops: Ops) -> Decoder:
    """Build the model with random weights."""
    built = build_model(model, dtype, device, max_model_len, ops=ops)
    init_dummy_weights(built, seed=0)
    assert isinstance(built, Decoder)
    return built


class StepDriver:
    """Owns the runner and counts its steps. Every row has blocks for ``max_len`` tokens from its first step."""

    def __init__(
        self,
        model: Decoder,
        dtype: torch.dtype,
        device: torch.device,
        backend: AttentionBackend,
        max_rows: int,
        max_len: int,
        *,
        eager: bool = False,
    ) -> None:
        name = str(dtype).removeprefix("torch.")
        self._per_row = -(-max_len // BLOCK_SIZE)
        self._device = device
        self._step = 0
        self._handles: list[int] = []
        layout: KVLayout = kv_layout(model.config, BLOCK_SIZE, name)
        self._num_groups = len(layout.groups)
        num_blocks = 1 + max_rows * self._per_row * self._num_groups
        config = EngineConfig(
            model=model.config,
            model_path="",
            load_format="dummy",
            device=device.type,
            dtype=name,
            kv_cache_dtype=name,
            max_model_len=self._per_row * BLOCK_SIZE,
            max_num_seqs=max_rows,
            block_size=BLOCK_SIZE,
            enforce_eager=eager,
        )
        self.runner = ModelRunner(config, layout, num_blocks, model, backend, device)
        for cache in self.runner.forward.kv_caches:
            cache.normal_()  # Not computed by a step; zeros would need less power than real keys, and be faster.

    @property
    def has_graphs(self) -> bool:
        return self.runner.steady is not None and not self.runner.steady.graphs.eager

    def fill(self, num_rows: int, length: int) -> None:
        """Replace all requests by ``num_rows`` requests of ``length`` tokens, all but the last of them computed."""
        handles = range(self._step * 1000 + 1, self._step * 1000 + 1 + num_rows)
        params = SamplingParams(temperature=0.0)
        blocks = [self._per_row] * self._num_groups
        new = [NewRequestData(h, f"r{h}", length, length, length - 1, blocks, params, h) for h in handles]
        # In random order, as after hours of allocation and freeing.
        ids = np.random.default_rng(0).permutation(num_rows * sum(blocks)) + NULL_BLOCK_ID + 1
        first = self._execute(
            removed=self._handles,
            new_requests=new,
            token_ids=np.ones(num_rows * length, np.int32),
            block_ids=ids.astype(np.int32),
        )
        _require_tokens(first)
        self._handles = list(handles)

    def steady(self, steps: int) -> DriverTimes:
        """Run steady decode steps, two in flight, as the worker's loop does."""
        in_flight: deque[PendingResult] = deque()
        cpu = 0.0
        started = time.perf_counter()
        for index in range(steps + _IN_FLIGHT):
            if index < steps:
                at = time.thread_time()
                in_flight.append(self._execute())
                cpu += time.thread_time() - at
            if index >= _IN_FLIGHT - 1 and in_flight:
                oldest = in_flight.popleft()
                while not oldest.ready:
                    pass  # Waiting is not counted as work.
                at = time.thread_time()
                _require_tokens(oldest)
                cpu += time.thread_time() - at
        return DriverTimes((time.perf_counter() - started) / steps, cpu / steps)

    def empty(self) -> None:
        """Remove all requests, so that graphs may be captured, as at a worker's start."""
        batch = self.runner.batch
        batch.change_rows(list(batch.row_of), [], None)
        self.runner.sampler.update_state(batch.builder.get_and_reset(0))
        self._handles = []
        if self.runner.steady is not None:
            self.runner.steady.leave()
            self.runner.steady.graphs.step.columns.refresh(batch)

    def _execute(self, **fields: Any) -> PendingResult:
        """Run a step whose diff has these fields."""
        self._step += 1
        return self.runner.execute(SchedulerOutput(self._step, **fields))


def _require_tokens(pending: PendingResult) -> None:
    """Raise RuntimeError if the step failed; all later steps would fail too."""
    failure = pending.result().failure
    if failure:
        raise RuntimeError(failure)
