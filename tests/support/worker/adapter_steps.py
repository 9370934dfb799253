"""Drives a model runner with LoRA adapters: loads through the worker's loader, and requests with an adapter each."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import numpy as np
import torch
from dense_attention import DenseBackend
from model_steps import Rows
from side_parts import parts_of

from quire.kernels.lora.lora import NO_SLOT
from quire.protocol.config import EngineConfig
from quire.protocol.model.adapter import read_adapter
from quire.protocol.model.checkpoint import stored_tensors, with_stored_format
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.model_config import load_model_config
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.adapter_messages import AdapterLoaded, LoadAdapter
from quire.protocol.wire.side_rows import LOGPROBS
from quire.protocol.wire.worker_messages import NewRequestData, SchedulerOutput
from quire.worker_proc.adapters.loader import AdapterLoader
from quire.worker_proc.parallel.group import TensorParallel
from quire.worker_proc.startup.setup import make_runner

BLOCK_SIZE = 4
BLOCKS = 16
"""Blocks of each request: its length is at most 64 tokens."""

MOST_GROUPS = 3

Request = tuple[list[int], int]
"""A prompt, and the number of its adapter, or 0."""
Answer = tuple[list[int], list[bytes]]
"""Tokens, and their log probabilities, exact to the bit."""


def adapter_config(folder: Path, **settings: Any) -> EngineConfig:
    """Return the configuration of an engine with adapters, for a checkpoint folder or a GGUF file."""
    if "model" not in settings:
        settings["model"] = with_stored_format(folder, stored_tensors(folder), load_model_config(folder))
    defaults = {
        "model_path": str(folder),
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 8,
        "block_size": BLOCK_SIZE,
        "num_blocks_override": 8 * BLOCKS * MOST_GROUPS,
        "enable_lora": True,
        "max_loras": 3,
    }
    return msgspec.convert(defaults | settings, EngineConfig, from_attributes=True)


class AdapterRunner:
    """A runner, its loader, and the steps that serve requests, all of them from the start in one batch."""

    def __init__(self, folder: Path, *, group: TensorParallel | None = None, **settings: Any) -> None:
        self.config = config = adapter_config(folder, **settings)
        layout = kv_layout(config.model, BLOCK_SIZE, config.kv_cache_dtype)
        self.groups = len(layout.groups)
        self.runner, _ = make_runner(config, layout, group=group)
        self.woken = Event()
        if self.runner.adapters is not None:
            self.loader = AdapterLoader(self.runner.adapters, config.model, self.woken.set)
        self.steps = 0
        self.leaving: list[int] = []
        self._sampling: list[int] = []

    def load(self, folder: Path, number: int, slot: int, *, digest: bytes = b"", **fields: Any) -> AdapterLoaded:
        """Load an adapter, and wait for the answer. ``digest``: by default that of the folder's content."""
        own = digest or read_adapter(folder, self.config.model, self.config.max_lora_rank).digest
        return self.answer(LoadAdapter(number, own, str(folder), slot, **fields))

    def answer(self, message: LoadAdapter) -> AdapterLoaded:
        self.loader.submit(message)
        for _ in range(100):
            self.woken.wait(0.1)
            self.woken.clear()
            answers = self.loader.take_answers()
            if answers:
                (answer,) = answers
                return answer
        raise AssertionError("no answer to LoadAdapter")

    def step(self, **fields: Any) -> Any:
        self.steps += 1
        result = self.runner.execute(SchedulerOutput(self.steps, **fields)).result()
        self.runner.check()
        return result

    def generate(self, requests: Sequence[Request], num_tokens: int, *, chunk: int = 5) -> list[Answer]:
        """Return the greedy answer of each request; all of them begin in one step.

        Prompts are computed in chunks, so that most steps mix them with decodes, and requests end in different steps.
        """
        handles = {self.steps * 100 + index: index for index in range(len(requests))}
        left = {handle: len(requests[index][0]) for handle, index in handles.items()}
        answers: list[Answer] = [([], []) for _ in requests]
        fields = self.adding(handles, requests)
        while left:
            counts = {handle: min(chunk, rest) for handle, rest in left.items() if rest}
            result = self.step(**fields, counts=[(handle, count) for handle, count in counts.items() if count != 1])
            left = {handle: rest - counts.get(handle, 0) for handle, rest in left.items()}
            ended = self._take(result, handles, answers, num_tokens)
            left = {handle: rest for handle, rest in left.items() if handle not in ended}
            self.leaving, fields = ended, {"removed": ended}
        return answers

    def adding(self, handles: Iterable[int], requests: Sequence[Request], **sampling: Any) -> dict[str, Any]:
        """Return fields of a step that adds requests, and removes those that have ended."""
        params = SamplingParams(**{"temperature": 0.0, "logprobs": 1} | sampling)
        counts = [BLOCKS] * self.groups
        new = [
            NewRequestData(handle, f"r{handle}", len(prompt), len(prompt), 0, counts, params, 7, adapter)
            for handle, (prompt, adapter) in zip(handles, requests, strict=True)
        ]
        return {
            "removed": self.leaving,
            "new_requests": new,
            "token_ids": np.array([token for prompt, _ in requests for token in prompt], np.int32),
            "block_ids": np.arange(1, 1 + len(requests) * self.groups * BLOCKS, dtype=np.int32),
        }

    def _take(self, result: Any, handles: Mapping[int, int], answers: list[Answer], num_tokens: int) -> list[int]:
        """Append the step's tokens to the answers; return the handles whose answers are complete."""
        if result.handles is not None:
            self._sampling = result.handles.tolist()
        if result.tokens is None:
            return []
        found = {handle: values for handle, _, (_, _, values) in parts_of(result, LOGPROBS)}
        for handle, token in zip(self._sampling, result.tokens.tolist(), strict=True):
            answers[handles[handle]][0].append(token)
            answers[handles[handle]][1].append(found[handle].tobytes())
        return [handle for handle in self._sampling if len(answers[handles[handle]][0]) == num_tokens]


def logits_of(runner: AdapterRunner, requests: Sequence[Request]) -> list[torch.Tensor]:
    """Return the logits of all tokens of each request, ``[tokens, vocab]``, from one forward pass."""
    adapters, model = runner.runner.adapters, runner.runner.forward.model
    assert adapters is not None
    lengths = [len(prompt) for prompt, _ in requests]
    slots = np.array([adapters.slot_of.get(number, NO_SLOT) for _, number in requests], np.int32)
    adapters.sites.begin_step(slots)
    adapters.sites.rows.assign(np.repeat(slots, lengths))
    with torch.inference_mode():
        prompts = {row: torch.tensor(prompt) for row, (prompt, _) in enumerate(requests)}
        logits = Rows(model, lengths, DenseBackend()).step(prompts)
    return [logits[row] for row in range(len(requests))]
