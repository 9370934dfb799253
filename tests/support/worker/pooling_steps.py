"""Drives a model runner with pooled requests: chunks of their prompts, prefixes of other rows, rows that decode."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from side_parts import parts_of

from quire.protocol.config import EngineConfig
from quire.protocol.model.adapter import read_adapter
from quire.protocol.model.checkpoint import stored_tensors, with_stored_format
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.model_config import load_model_config
from quire.protocol.model.pooling_files import with_pooling
from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.adapter_messages import AdapterLoaded, LoadAdapter
from quire.protocol.wire.side_rows import POOLED
from quire.protocol.wire.worker_messages import ModelRunnerOutput, NewRequestData, SchedulerOutput
from quire.worker_proc.adapters.loader import AdapterLoader
from quire.worker_proc.parallel.group import TensorParallel
from quire.worker_proc.startup.setup import make_runner

BLOCK_SIZE = 16
NUM_BLOCKS = 1200
EMBED = PoolingParams()
Rows = npt.NDArray[np.float32]


@dataclass
class Pooled:
    """A request: its prompt, parameters, and number of tokens that are in the blocks of ``prefix``, a held request.

    Without ``params`` it decodes.
    """

    prompt: list[int]
    params: PoolingParams | None = EMBED
    prefix: int = -1
    num_shared: int = 0
    adapter: int = 0


class PoolingRunner:
    """A runner whose steps compute at most ``chunk`` tokens of each request."""

    def __init__(
        self, folder: Path, *, pooling: str = "auto", group: TensorParallel | None = None, **settings: Any
    ) -> None:
        read = with_pooling(load_model_config(folder), pooling)
        model = with_stored_format(folder, stored_tensors(folder), read)
        defaults = {
            "model": model,
            "model_path": str(folder),
            "dtype": "float32",
            "max_model_len": model.max_position,
            "max_num_batched_tokens": 2**16,
            "max_num_seqs": 32,
            "block_size": BLOCK_SIZE,
            "num_blocks_override": NUM_BLOCKS,
        }
        self.config = msgspec.convert(defaults | settings, EngineConfig, from_attributes=True)
        self.runner, _ = make_runner(self.config, kv_layout(model, BLOCK_SIZE, self.config.kv_cache_dtype), group=group)
        self.steps = 0
        self.results: list[ModelRunnerOutput] = []
        self.tokens: dict[int, list[int]] = {}
        self._sampling: list[int] = []
        self._blocks: dict[int, list[int]] = {}
        self._free = list(range(NUM_BLOCKS, 0, -1))
        self._leaving: list[int] = []

    def load_adapter(self, folder: Path, *, number: int, slot: int) -> None:
        """Load a LoRA adapter into a slot."""
        assert self.runner.adapters is not None
        woken = Event()
        self.loader = loader = AdapterLoader(self.runner.adapters, self.config.model, woken.set)
        digest = read_adapter(folder, self.config.model, self.config.max_lora_rank).digest
        loader.submit(LoadAdapter(number, digest, str(folder), slot))
        answers: list[AdapterLoaded] = []
        while not answers:
            assert woken.wait(10), "no answer to LoadAdapter"
            woken.clear()
            answers = loader.take_answers()
        assert not answers[0].problem, answers[0].problem

    def step(self, **fields: Any) -> ModelRunnerOutput:
        """Run a step, and collect the tokens that it samples."""
        self.steps += 1
        result = self.runner.execute(SchedulerOutput(self.steps, **fields)).result()
        self.runner.check()
        self.results.append(result)
        if result.handles is not None:
            self._sampling = result.handles.tolist()
        for handle, token in zip(self._sampling, [] if result.tokens is None else result.tokens.tolist(), strict=False):
            self.tokens.setdefault(handle, []).append(token)
        return result

    def adding(self, requests: dict[int, Pooled]) -> dict[str, Any]:
        """Return fields of a step that adds requests, and removes those that have ended."""
        new, blocks = [], []
        for handle, request in requests.items():
            length, sampling = len(request.prompt), SamplingParams(temperature=0.0)
            own = self._blocks.get(request.prefix, [])[: request.num_shared // BLOCK_SIZE]
            own = own + [self._free.pop() for _ in range(len(own), -(-(length + 64) // BLOCK_SIZE))]
            self._blocks[handle] = own
            blocks += own
            new.append(
                NewRequestData(
                    handle,
                    f"r{handle}",
                    length,
                    length,
                    request.num_shared,
                    [len(own)],
                    sampling,
                    7,
                    request.adapter,
                    request.params,
                )
            )
        return {
            "removed": self._take_leaving(),
            "new_requests": new,
            "token_ids": np.array([token for request in requests.values() for token in request.prompt], np.int32),
            "block_ids": np.array(blocks, np.int32),
        }

    def pool(self, requests: Sequence[Pooled], *, chunk: int = 10**6) -> list[Rows]:
        """Serve requests that begin in one step; return the rows of each, once its prompt has ended.

        Requests that decode run until the last prompt has ended, and are then removed.
        """
        handles = {self.steps * 1000 + index: index for index in range(len(requests))}
        of = {handle: requests[index] for handle, index in handles.items()}
        left = {handle: len(request.prompt) - request.num_shared for handle, request in of.items()}
        parts: dict[int, list[Rows]] = {handle: [] for handle in handles}
        fields = self.adding(of)
        while any(left[handle] for handle in of if of[handle].params is not None):
            counts = {handle: min(chunk, rest) if rest else 1 for handle, rest in left.items()}
            result = self.step(**fields, counts=[(handle, count) for handle, count in counts.items() if count != 1])
            left = {handle: max(rest - counts[handle], 0) for handle, rest in left.items()}
            for handle, start, (rows,) in parts_of(result, POOLED):
                assert start == sum(len(part) for part in parts[handle])
                parts[handle].append(rows)
            ended = [handle for handle, rest in left.items() if not rest and of[handle].params is not None]
            left = {handle: rest for handle, rest in left.items() if handle not in ended}
            of = {handle: request for handle, request in of.items() if handle in left}
            fields = {"removed": ended} if of else {}
            self._leaving += [] if of else ended
        self._leaving += list(of)
        return [np.concatenate(rows) if rows else np.zeros((0, 0), np.float32) for rows in parts.values()]

    def _take_leaving(self) -> list[int]:
        leaving, self._leaving = self._leaving, []
        return leaving


def embedding(folder: Path, prompts: Sequence[list[int]], chunk: int = 10**6, **settings: Any) -> Rows:
    """Return the vectors of prompts in one batch, ``[prompts, size]``."""
    runner = PoolingRunner(folder, **settings)
    return np.concatenate(runner.pool([Pooled(prompt) for prompt in prompts], chunk=chunk))


def cosines(left: Rows, right: Any) -> Rows:
    """Return the cosine of each pair of rows."""
    other = np.asarray(right, np.float64)
    one = left.astype(np.float64)
    return np.sum(one * other, 1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
