"""Measures what a GPU's steps need besides weights and KV blocks, before the pool is allocated.

A runner with a small pool runs the largest prefill step and a decode step of all rows, and captures its largest graphs.
The memory that is then taken holds activations, attention scratch, block tables, the workspaces of libraries and the
graphs, with the fragmentation of torch's allocator. The runner is dropped, and the pool gets the rest.
"""

import gc
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.process.log import event_logger
from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.worker_messages import MemoryPlan, NewRequestData, SchedulerOutput
from quire.worker_proc.execute.model_runner import ModelRunner

log = event_logger("worker")

_SAMPLING = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, presence_penalty=0.1, logprobs=1)
"""Parameters with the largest buffers: a histogram per row, token counts, and log probabilities."""
MARGIN = 0.01
"""Share of the device's memory that stays free: the next worker must be able to have as many blocks, and its own
measurement may differ."""
_MIB = 2**20


def measured_plan(
    plan: MemoryPlan,
    config: EngineConfig,
    layout: KVLayout,
    device: torch.device,
    make: Callable[[int], ModelRunner],
    other_block_bytes: int = 0,
) -> MemoryPlan:
    """Return ``plan`` with the measured memory instead of the estimate, and with as many blocks as then fit.

    Args:
        plan: the plan from estimates; the weights are loaded.
        make: makes a runner with a number of KV blocks, the null block included.
        other_block_bytes: as of ``plan_memory``.

    Raises:
        ConfigError: no block fits; the message has the measured memory.
    """
    rows = min(config.max_num_seqs, plan.num_slots - 1) if layout.states else config.max_num_seqs
    prompts, block_bytes = _prompts(config, rows), layout.block_bytes + other_block_bytes
    num_blocks = 1 + sum(-(-length // group.block_size) for length in prompts for group in layout.groups)
    num_blocks += len(prompts) * len(layout.groups)  # the decode step may begin a block
    before = _free(device)
    runner = make(num_blocks)
    _run(runner, prompts, layout)
    runner.warm_up(largest_only=True)
    used = before - _free(device) - num_blocks * block_bytes - plan.states
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    usable = int(plan.total * config.gpu_memory_utilization) - (plan.total - before) - used - plan.states
    usable -= plan.images  # no step takes it
    fitting = usable // block_bytes
    wanted = config.kv_cache_memory_bytes // block_bytes or (usable - int(MARGIN * plan.total)) // block_bytes
    if config.num_blocks_override:
        wanted = config.num_blocks_override + 1
    if not 2 <= wanted <= fitting:
        raise ConfigError(
            f"memory does not suffice: weights {plan.weights // _MIB} MiB, measured steps and graphs "
            f"{used // _MIB} MiB, KV cache {max(wanted, 2) * block_bytes // _MIB} MiB; "
            f"{max(usable, 0) // _MIB} MiB are left for it: "
            f"lower --max-num-batched-tokens, --max-num-seqs, --kv-cache-memory-bytes or --num-gpu-blocks-override, "
            f"or raise --gpu-memory-utilization"
        )
    log.info("measured steps", estimated_mib=plan.activations / _MIB, measured_mib=used / _MIB, num_blocks=wanted - 1)
    kv_cache = wanted * block_bytes
    return msgspec.structs.replace(plan, activations=used, kv_cache=kv_cache, num_blocks=wanted)


def _free(device: torch.device) -> int:
    """Return the device's free bytes; torch keeps what its peaks needed."""
    torch.cuda.synchronize(device)
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


def _prompts(config: EngineConfig, most_rows: int) -> list[int]:
    """Return the lengths of prompts that fill a step: as many requests as possible, each with at least one token."""
    budget = min(config.max_num_batched_tokens, most_rows * (config.max_model_len - 1))
    rows = min(most_rows, budget)
    return [budget // rows + (row < budget % rows) for row in range(rows)]


def _run(runner: ModelRunner, prompts: Sequence[int], layout: KVLayout) -> None:
    """Run the prompts in one step, then decode one token of each; without a head for tokens, pool them."""
    blocks, next_block = [], 1
    for length in prompts:
        for group in layout.groups:
            count = -(-(length + 1) // group.block_size)
            blocks.append(np.arange(next_block, next_block + count, dtype=np.int32))
            next_block += count
    counts = [len(own) for own in blocks]
    groups = len(layout.groups)
    model = runner.forward.model.config
    pooling = None if model.generates or model.pooling is None else PoolingParams(model.pooling.tasks[-1])
    new = [
        NewRequestData(
            row,
            f"measured-{row}",
            length,
            length,
            0,
            counts[row * groups :][:groups],
            _SAMPLING,
            row,
            pooling=pooling,
        )
        for row, length in enumerate(prompts)
    ]
    slots = np.arange(1, len(prompts) + 1, dtype=np.int32)
    first = SchedulerOutput(
        1,
        new_requests=new,
        token_ids=np.zeros(sum(prompts), np.int32),
        block_ids=np.concatenate(blocks),
        state_slots=slots if layout.states else None,
        blocks_to_zero=slots.tolist() if layout.states else [],
        counts=[(row, length) for row, length in enumerate(prompts) if length != 1],
    )
    for step in (first, SchedulerOutput(2)) if pooling is None else (first,):
        runner.execute(step).result()
    runner.begin_worker_epoch(0)
