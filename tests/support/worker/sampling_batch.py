"""A batch and its sampler without a model."""

from typing import Any

import numpy as np
import torch
from scheduler_driver import make_config

from quire.protocol.config import EngineConfig
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.worker_messages import NewRequestData
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.positions import SampledPositions
from quire.worker_proc.sampling.sampler import SampledTokens, Sampler

CPU = torch.device("cpu")


def sampling_config(vocab_size: int, **settings: Any) -> EngineConfig:
    return make_config(vocab_size=vocab_size, **settings)


def make_sampler(vocab_size: int, max_rows: int, max_len: int, **settings: Any) -> tuple[InputBatch, Sampler]:
    """Make both, without rows."""
    config = sampling_config(vocab_size, max_num_seqs=max_rows, **settings)
    batch = InputBatch(max_rows, max_len, lambda params: sampler.reads_output(params))
    sampler = Sampler(batch, config, CPU)
    return batch, sampler


def batch_of(
    rows: list[tuple[int, int, dict[str, Any]]], vocab_size: int, **settings: Any
) -> tuple[InputBatch, Sampler]:
    """Add rows of (seed, known tokens, sampling); all their tokens are 0 and belong to the prompt."""
    new = [
        NewRequestData(h, f"r{h}", known, known, 0, [1], SamplingParams(**sampling), seed)
        for h, (seed, known, sampling) in enumerate(rows)
    ]
    batch, sampler = make_sampler(vocab_size, len(rows), max(known for _, known, _ in rows), **settings)
    batch.change_rows([], new, np.zeros(sum(known for _, known, _ in rows), np.int32))
    sampler.update_state(batch.builder.get_and_reset(len(rows)))
    return batch, sampler


def sample_each(sampler: Sampler, logits: torch.Tensor) -> SampledTokens:
    """Sample one token for each of the first rows."""
    return sampler.sample(logits, SampledPositions.one_per_row(np.arange(len(logits))))
