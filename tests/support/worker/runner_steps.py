"""Drives the model runner with handwritten diffs: a tiny decoder with random weights, steps given as keywords."""

import functools
from typing import Any

import msgspec
import numpy as np
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.model_config import ModelConfig
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.worker_messages import ModelRunnerOutput, NewRequestData, SchedulerOutput
from quire.worker_proc.execute.model_runner import ModelRunner
from quire.worker_proc.startup.setup import make_runner

NUM_BLOCKS = 20
PROMPT = [5, 9, 2, 7, 7, 1]
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
CONFIG = EngineConfig(
    model=MODEL,
    model_path="",
    load_format="dummy",
    max_model_len=32,
    max_num_seqs=3,
    block_size=4,
    num_blocks_override=NUM_BLOCKS - 1,
    seed=11,
)


def appending(handle: int, group: int, block_ids: list[int]) -> dict[str, Any]:
    """Return fields of a step that give a held request these blocks."""
    return {
        "appended_handles": np.full(len(block_ids), handle, np.int32),
        "appended_groups": np.full(len(block_ids), group, np.int32),
        "appended_block_ids": np.array(block_ids, np.int32),
    }


@functools.cache
def _first_runner(model: bytes) -> ModelRunner:
    """Make the runner whose model all others share. ``model``: ``MODEL``, which a test may have replaced."""
    return make_runner(CONFIG, kv_layout(MODEL, 4, "float32"), progress=False)[0]


class Runner:
    """A ModelRunner that receives steps as keywords and numbers them. All have the same model."""

    def __init__(self) -> None:
        first = _first_runner(msgspec.json.encode(MODEL))
        forward = first.forward
        made = ModelRunner(
            CONFIG, first.kv_layout, first.num_blocks, forward.model, forward.backend, torch.device("cpu")
        )
        self.runner = made
        commit = made.tables.commit

        def commit_and_poison() -> None:
            commit()
            made.tables.poison()

        made.tables.commit = commit_and_poison  # type: ignore[method-assign]
        self.steps = 0
        self.handles: list[int] = []

    def step(self, **fields: Any) -> dict[int, int]:
        """Return handle → token of the step."""
        result = self.result(**fields)
        tokens = [] if result.tokens is None else result.tokens.tolist()
        return dict(zip(self.handles, tokens, strict=True))

    def result(self, **fields: Any) -> ModelRunnerOutput:
        self.steps += 1
        result = self.runner.execute(SchedulerOutput(self.steps, **fields)).result()
        self.runner.check()
        if result.handles is not None:
            self.handles = result.handles.tolist()
        return result


def adding(*rows: tuple[int, list[int], list[int]], computed: int = 0, **sampling: Any) -> dict[str, Any]:
    """Return fields of a step that adds (handle, tokens, blocks) rows, each computing all its remaining tokens."""
    params = SamplingParams(**{"temperature": 0.0} | sampling)
    new = [NewRequestData(h, f"r{h}", len(t), len(t), computed, [len(b)], params, 7) for h, t, b in rows]
    return {
        "new_requests": new,
        "token_ids": np.array([t for _, tokens, _ in rows for t in tokens], np.int32),
        "block_ids": np.array([b for _, _, blocks in rows for b in blocks], np.int32),
        "counts": [(h, len(t) - computed) for h, t, _ in rows if len(t) - computed != 1],
    }


def alone(prompt: list[int], n: int, **sampling: Any) -> list[int]:
    """Return the tokens of a prompt that runs alone, each from a prefill of all tokens before it."""
    tokens: list[int] = []
    for _ in range(n):
        tokens.append(Runner().step(**adding((0, prompt + tokens, [1, 2, 3, 4, 5, 6]), **sampling))[0])
    return tokens
