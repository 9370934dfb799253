"""``python -P -m quire.bench.worker.sampling``: the worker's CPU time for sampling, as one line of JSON.

Started by ``quire bench sampling``. It runs no model: logits are random, in the memory layout of a model's output.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import msgspec
import numpy as np
import torch

from quire.kernels.cpu.native.library import load_native
from quire.protocol.config import EngineConfig, SpeculativeConfig
from quire.protocol.request.logits_processors import AdapterLogitsProcessor
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.worker_messages import NewRequestData
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.positions import SampledPositions
from quire.worker_proc.drafts.make import make_proposer
from quire.worker_proc.sampling.sampler import Sampler

CPU = torch.device("cpu")
PLAIN = {"temperature": 1.0}
HISTORY = 2000
DRAFT_ROWS = 64
DRAFTS = 4


def everything(vocab: int) -> dict[str, Any]:
    """Return sampling parameters that use all features at the same time."""
    return {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": dict.fromkeys(range(100, 150), 1.0),
        "allowed_token_ids": list(range(0, vocab, 2)),
        "bad_words_token_ids": [[7], [8, 9], [10, 11, 12]],
        "min_tokens": 2**20,
        "stop_token_ids": [3, 4],
    }


class IdlePlugin(AdapterLogitsProcessor):
    """A plugin that no request uses."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> None:
        return None


class Sampling:
    """A batch of equal requests with partial outputs, and a sampler."""

    def __init__(self, config: EngineConfig, rows: int, params: dict[str, Any]) -> None:
        vocab = config.model.vocab_size
        self.batch = InputBatch(rows, 512, lambda params: self.sampler.reads_output(params))
        self.sampler = Sampler(self.batch, config, CPU)
        sampling = SamplingParams(max_tokens=None, **params)
        rng = np.random.default_rng(0)
        new = [NewRequestData(h, f"r{h}", 128, 256, 255, [1], sampling, h) for h in range(rows)]
        self.batch.change_rows([], new, rng.integers(0, vocab, 256 * rows, dtype=np.int32))
        self.sampler.update_state(self.batch.builder.get_and_reset(rows))
        self.positions = SampledPositions.one_per_row(np.arange(rows))
        self._logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 3
        self._work = torch.empty_like(self._logits)

    def step(self) -> tuple[float, float]:
        """Sample one step; return CPU and wall seconds."""
        self._work.copy_(self._logits)
        cpu, wall = time.process_time(), time.perf_counter()
        self.sampler.update_state(None)
        sampled = self.sampler.sample(self._work, self.positions)
        self.sampler.accepted(self.positions, sampled.tokens, None)
        times = time.process_time() - cpu, time.perf_counter() - wall
        self.batch.num_known += 1
        return times


def unused(config: EngineConfig, rows: int, repeats: int) -> float:
    """Return seconds per step around the sampling itself, when no request uses a logits processor."""
    made = Sampling(config, rows, PLAIN)
    processors, positions = made.sampler.processors, made.positions
    logits = torch.zeros(rows, 1)
    tokens = torch.zeros(rows, dtype=torch.int64)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        made.sampler.update_state(None)
        if made.sampler.needs_history:
            raise AssertionError("needs_history is true, but no request uses a processor that reads outputs")
        processors.apply(logits, positions, None)
        processors.accepted(positions, tokens, None)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def proposing(config: EngineConfig, method: str, repeats: int) -> float:
    """Return seconds per request and step of a proposer, over sequences with an earlier match of the last tokens."""
    config = msgspec.structs.replace(
        config, num_speculative_tokens=DRAFTS, speculative=SpeculativeConfig(method=method), max_model_len=4 * HISTORY
    )
    batch = InputBatch(DRAFT_ROWS, 4 * HISTORY)
    proposer = make_proposer(config, batch, CPU)
    assert proposer is not None
    rng = np.random.default_rng(1)
    phrase = rng.integers(0, config.model.vocab_size, (DRAFT_ROWS, HISTORY // 4), dtype=np.int32)
    tokens = np.concatenate([phrase, phrase[:, ::-1], phrase, phrase], axis=1)
    params = SamplingParams()
    new = [NewRequestData(h, f"r{h}", 8, HISTORY, HISTORY - 1, [1], params, h) for h in range(DRAFT_ROWS)]
    batch.change_rows([], new, tokens[:, :HISTORY].ravel())
    batch.builder.reset()
    wanted = dict.fromkeys(range(DRAFT_ROWS), DRAFTS)
    times = []
    for step in range(repeats + 1):
        started = time.process_time()
        proposer.propose(wanted)
        times.append(time.process_time() - started)
        following = phrase[:, step % phrase.shape[1]]
        at = batch.tokens.length[:DRAFT_ROWS]
        batch.tokens.data[np.arange(DRAFT_ROWS), at] = following
        batch.tokens.length[:DRAFT_ROWS] += 1
        batch.num_known[:DRAFT_ROWS] += 1
    return statistics.median(times[1:]) / DRAFT_ROWS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    with torch.inference_mode():
        plain = Sampling(config, args.rows, PLAIN)
        plugin = f"quire.bench.worker.sampling:{IdlePlugin.__name__}"
        idle = Sampling(msgspec.structs.replace(config, logits_processors=[plugin]), args.rows, PLAIN)
        full = Sampling(config, args.rows, everything(config.model.vocab_size))
        # Steps alternate, because the machine is noisy; the first two warm up.
        rounds = [(plain.step(), full.step(), idle.step()) for _ in range(args.repeats + 2)][2:]
        found: dict[str, Any] = {
            "native": int(load_native() is not None),
            "unused_us": {rows: unused(config, rows, 20 * args.repeats) * 1e6 for rows in (1, 16, 64, args.rows)},
            "plain_cpu_ms": statistics.median(p[0] for p, *_ in rounds) * 1e3,
            "plain_wall_ms": statistics.median(p[1] for p, *_ in rounds) * 1e3,
            "everything_cpu_ms": statistics.median(f[0] for _, f, _ in rounds) * 1e3,
            "everything_wall_ms": statistics.median(f[1] for _, f, _ in rounds) * 1e3,
            "everything_over_plain": statistics.median(f[0] / p[0] for p, f, _ in rounds),
            "idle_plugin_over_plain": statistics.median(i[0] / p[0] for p, _, i in rounds),
        }
        for method in ("ngram", "suffix"):
            found[f"{method}_us"] = proposing(config, method, args.repeats) * 1e6
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
