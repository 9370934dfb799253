"""From a configuration to a worker that can run steps: device, memory plan, model, weights, backend."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.kv_layout import DTYPE_BYTES, KVLayout
from quire.protocol.messages import Ready
from quire.worker_proc.attention.backend import AttentionBackend
from quire.worker_proc.device import cpu_compute_dtype
from quire.worker_proc.loader import init_dummy_weights, load_weights
from quire.worker_proc.memory import describe_plan, plan_memory, pool_warning
from quire.worker_proc.model_runner import ModelRunner
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.parallel.group import Alone, TensorParallel

Say = Callable[[str], None]

ONE_THREAD_BELOW_BYTES = 16 * 2**20


def make_runner(
    config: EngineConfig, layout: KVLayout, say: Say, *, group: TensorParallel | None = None, progress: bool = False
) -> tuple[ModelRunner, Ready]:
    """Everything a worker needs, in the order in which it can fail cheaply: headers, plan, then weights.

    Args:
        say: takes each line that a person should see.
        group: the other ranks; None: there are none.
        progress: show a bar while weights load.

    Raises:
        ConfigError: the device, the checkpoint or the memory will not do.
    """
    started = time.monotonic()
    group = group or Alone()
    device = pick_device(config, group.rank)
    dtype, reason = _compute_dtype(config, device)
    if reason:
        say(f"running in {_name(dtype)} rather than {config.dtype}: {reason}")
    layout = _own_layout(config, layout, dtype, group)
    model = build_model(config.model, dtype, "meta", config.max_model_len)
    size = sum(p.numel() for p in model.parameters()) * DTYPE_BYTES[_name(dtype)]
    if device.type == "cpu":
        set_threads(size, group.size)
    plan = plan_memory(config, layout, size, device)
    say(describe_plan(plan, config.max_model_len))
    warning = pool_warning(plan, config.max_model_len)
    if warning:
        say(warning)
    model = build_model(config.model, dtype, device, config.max_model_len)
    with torch.inference_mode():
        if config.load_format == "dummy":
            init_dummy_weights(model, config.seed)
        else:
            load_weights(model, Path(config.model_path), dtype, progress)
        if device.type == "cpu":
            model.prepack()
    loaded = time.monotonic()
    backend = pick_backend(device, say)
    runner = ModelRunner(config, layout, plan.num_blocks, model, backend, device)
    timings = {"load_s": loaded - started, "prepare_s": time.monotonic() - loaded}
    return runner, Ready([plan.num_blocks] * len(layout.groups), plan, timings)


def _own_layout(config: EngineConfig, layout: KVLayout, dtype: torch.dtype, group: TensorParallel) -> KVLayout:
    """What this rank keeps of each token: its share of the heads, and in its own dtype unless told which."""
    follows = config.kv_cache_dtype == config.dtype
    heads = max(1, layout.num_kv_heads // group.size)
    return KVLayout(layout.groups, heads, layout.head_dim, _name(dtype) if follows else config.kv_cache_dtype)


def pick_device(config: EngineConfig, rank: int) -> torch.device:
    """The CPU, or the GPU of this rank's number."""
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device cuda: this torch finds no CUDA device; use --device cpu")
    if rank >= torch.cuda.device_count():
        raise ConfigError(
            f"--tensor-parallel-size {config.tensor_parallel_size}: there are {torch.cuda.device_count()} GPUs"
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def set_threads(weight_bytes: int, num_ranks: int = 1) -> None:
    """One thread per physical core; one in all for a tiny model, whose steps are shorter than the threads' barriers.

    Hyper-threads share the units that matter here. Ranks share the cores: two threads that wait for each other on one
    core cost milliseconds. A user's own ``OMP_NUM_THREADS`` stands.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        cores = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))
        torch.set_num_threads(1 if weight_bytes < ONE_THREAD_BELOW_BYTES else max(1, cores // num_ranks))


def pick_backend(device: torch.device, say: Say) -> AttentionBackend:
    if device.type == "cpu":
        from quire.worker_proc.attention.cpu import CpuBackend

        say(f"attention backend cpu (the device is a CPU), threads: {torch.get_num_threads()}")
        return CpuBackend()
    from quire.worker_proc.attention.triton_backend import TritonBackend

    say("attention backend triton: the device is a GPU")
    return TritonBackend()


def _compute_dtype(config: EngineConfig, device: torch.device) -> tuple[torch.dtype, str]:
    wanted: torch.dtype = getattr(torch, config.dtype)
    return cpu_compute_dtype(wanted) if device.type == "cpu" else (wanted, "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def say_on_stderr(text: str) -> None:
    print(f"quire worker: {text}", file=sys.stderr, flush=True)
