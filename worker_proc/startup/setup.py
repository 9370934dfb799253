"""Setup of a worker from its configuration: device, memory plan, model, weights, attention backend."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import torch

from quire.kernels.common.triton_runtime import drop_unused_launch_hooks
from quire.kernels.cpu.native.library import Native, find_native, load_native
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import KVLayout, state_tensors
from quire.protocol.model.model_config import ModelConfig, is_native
from quire.protocol.process.host_limits import cpu_model, usable_cores
from quire.protocol.process.log import event_logger
from quire.protocol.wire.worker_messages import MemoryPlan, Ready
from quire.worker_proc.adapters.loader import AdapterLoader
from quire.worker_proc.adapters.sites import make_sites
from quire.worker_proc.attention.choose import fit_block_size, pick_backend
from quire.worker_proc.device.device import ComputeDtypes, cpu_compute_dtypes
from quire.worker_proc.drafts.make import check_speculative
from quire.worker_proc.execute.model_runner import ModelRunner
from quire.worker_proc.execute.routed_experts import expert_block_bytes
from quire.worker_proc.images.encoder import ItemEncoder
from quire.worker_proc.models.cpu_ops import CpuOps
from quire.worker_proc.models.model import Model
from quire.worker_proc.models.ops import Ops, RowByRowOps, TorchOps
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.models.routes import Routes
from quire.worker_proc.parallel.group import SingleRank, TensorParallel
from quire.worker_proc.side_work import SideWork
from quire.worker_proc.startup.draft_setup import load_draft, plan_draft
from quire.worker_proc.startup.kv_scales import checkpoint_kv_scales, have_head_scales, set_kv_scales
from quire.worker_proc.startup.loader import fill_model
from quire.worker_proc.startup.measured import measured_plan
from quire.worker_proc.startup.memory import log_plan, plan_memory
from quire.worker_proc.startup.tower_setup import build_tower, image_bytes, load_tower
from quire.worker_proc.transfers.make import make_mover

log = event_logger("worker")

ONE_THREAD_BELOW_BYTES = 16 * 2**20


def make_runner(
    config: EngineConfig,
    layout: KVLayout,
    *,
    group: TensorParallel | None = None,
    progress: bool = False,
    say: Callable[[str], None] = lambda phase: None,
) -> tuple[ModelRunner, Ready]:
    """Make the runner and its Ready message. Cheap checks come first: headers, memory plan, then weights.

    Args:
        group: the worker group; None: a single rank.
        progress: show a progress bar while weights are loaded.
        say: called with what the start does, for people.

    Raises:
        ConfigError: the device, the checkpoint or the memory cannot be used.
    """
    started = time.monotonic()
    group = group or SingleRank()
    if config.speculative is not None:
        check_speculative(config.speculative)
    device = pick_device(config, group.rank)
    dtypes = _compute_dtypes(config, device)
    build = _builder(config, dtypes, pick_ops(device, config.deterministic))
    model = build(config.model, "meta", group)
    layout = _own_layout(config, layout, model, dtypes.weights)
    scales = checkpoint_kv_scales(config, layout.dtype)
    draft_plan = plan_draft(config, build, _name(dtypes.weights))
    tower = build_tower(config, dtypes.weights)
    size, cache_bytes = image_bytes(config, tower, dtypes.weights)
    size += sum(p.nbytes for p in model.parameters()) + (0 if draft_plan is None else draft_plan.weight_bytes)
    if device.type == "cpu":
        set_threads(size, math.prod(config.sharing(group.rank)))
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    backend = pick_backend(config, layout, device, capability, head_scales=have_head_scales(scales))
    draft_backend = pick_backend(draft_plan.config, draft_plan.layout, device, capability) if draft_plan else None
    block_size = fit_block_size(config, layout, [each for each in (backend, draft_backend) if each is not None])
    config, layout = msgspec.structs.replace(config, block_size=block_size), layout.with_block_size(block_size)
    if draft_plan is not None:
        draft_plan = replace(draft_plan, layout=draft_plan.layout.with_block_size(block_size))
    expert_bytes = expert_block_bytes(layout, model.build.routes)
    other_block_bytes = expert_bytes + (draft_plan.block_bytes if draft_plan is not None else 0)
    adapter_bytes = 0 if model.build.additions is None else model.build.additions.slot_bytes
    plan = plan_memory(config, layout, size, device, other_block_bytes, adapter_bytes, cache_bytes, rank=group.rank)
    log_plan(plan, config.max_model_len)
    say("loads weights")
    model = build(config.model, device, group)
    fill_model(model, config, dtypes.weights, device, progress)
    if config.model.encoder is None:
        set_kv_scales(model, scales, config, layout.dtype)
    load_tower(tower, config, device)
    draft = None
    if draft_plan is not None and draft_backend is not None:
        draft = load_draft(draft_plan, plan.num_blocks, draft_backend, device, progress=progress)
    loaded = time.monotonic()
    make = partial(ModelRunner, config, layout, model=model, backend=backend, device=device, num_slots=plan.num_slots)
    if device.type == "cuda" and draft is None and layout.groups:
        plan = measured_plan(plan, config, layout, device, make, expert_bytes)
    _log_parts(config, plan, adapter_bytes, expert_bytes)
    say("runs its first steps")
    runner = make(plan.num_blocks, draft=draft)
    runner.warm_up()
    runner.items.tower = tower
    timings = {"load_s": loaded - started, "prepare_s": time.monotonic() - loaded}
    plan = msgspec.structs.replace(plan, device=device_name(device))
    return runner, Ready([plan.num_blocks] * len(layout.groups), plan, timings, num_slots=plan.num_slots)


def _builder(config: EngineConfig, dtypes: ComputeDtypes, ops: Ops) -> Callable[..., Model]:
    """Return what builds the model and draft models."""

    def build(of: ModelConfig, place: torch.device | str, ranks: TensorParallel | None = None) -> Model:
        """Build the model on a device, or on ``meta`` without data. Draft models have no adapters; all ranks choose the
        same experts, which the first one keeps."""
        return build_model(
            of,
            dtypes.weights,
            place,
            config.max_model_len,
            ops=ops,
            parallel=ranks,
            activation_dtype=dtypes.activations,
            additions=None if ranks is None else make_sites(config, dtypes.activations, place),
            routes=None if ranks is None or ranks.rank else _routes(config),
        )

    return build


def make_side_work(
    runner: ModelRunner, group: TensorParallel, config: EngineConfig, wake: Callable[[], None]
) -> tuple[list[SideWork], int]:
    """Return the work beside the steps, and the bytes of a page of KV blocks; 0 without pages.

    Args:
        wake: called in a thread when there are answers.
    """
    work: list[SideWork] = []
    page_bytes = 0
    if config.cpu_offload_bytes or config.ssd_cache_bytes:
        mover = make_mover(runner, group, config, wake)
        work, page_bytes = [mover], mover.page_bytes
    if runner.adapters is not None:
        work.append(AdapterLoader(runner.adapters, config.model, wake))
    if config.item_kinds:
        work.append(ItemEncoder(runner.items, runner.forward.model, wake))
    return work, page_bytes


def _log_parts(config: EngineConfig, plan: MemoryPlan, adapter_bytes: int, expert_bytes: int) -> None:
    """Log what computes the model, and parts of the plan that not every engine has. ``expert_bytes``: of a block."""
    mib, model = 2**20, config.model
    log.info("model", architecture=model.architecture, implementation=model.implementation)
    if model.transformers is not None and is_native(model.architecture):
        log.warning("Quire's own code for this model is faster than transformers': omit --model-impl transformers")
    if model.unread_vision:
        log.info("the checkpoint's vision part is not loaded: the model reads text")
    if adapter_bytes:
        slots = config.max_loras + 1
        log.info("LoRA adapters", slots=slots, largest_mib=adapter_bytes / mib, reserved_mib=plan.adapters / mib)
    if expert_bytes:
        log.info("routed experts, as a part of the KV cache", mib=plan.num_blocks * expert_bytes / mib)


def _routes(config: EngineConfig) -> Routes | None:
    """Make what collects the chosen experts, or return None without ``--enable-return-routed-experts``."""
    moe = config.model.moe
    return Routes(moe) if config.enable_return_routed_experts and moe is not None else None


def _own_layout(config: EngineConfig, layout: KVLayout, model: Model, dtype: torch.dtype) -> KVLayout:
    """Return this rank's KV layout: its share of the heads, in the weights' dtype unless a flag sets another one.

    States have the dtype of the activations, unless they are always wider.
    """
    if config.model.encoder is not None:
        return layout
    states = state_tensors(config.model, _name(model.build.activation_dtype))
    follows = config.kv_cache_dtype == config.dtype
    groups = [
        msgspec.structs.replace(group, num_kv_heads=model.attention_shape(group.layers[0]).num_kv_heads)
        for group in layout.groups
    ]
    own_dtype = _name(dtype) if follows else config.kv_cache_dtype
    return msgspec.structs.replace(layout, groups=groups, dtype=own_dtype, states=states)


def pick_device(config: EngineConfig, rank: int) -> torch.device:
    """Return the CPU, or the GPU of this rank: by default the one with its index."""
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device: use --device cpu")
    device = config.ranks[rank].device if config.ranks else rank
    if device >= torch.cuda.device_count():
        raise ConfigError(
            f"--tensor-parallel-size {config.tensor_parallel_size} with --data-parallel-size "
            f"{config.data_parallel_size} needs GPU {device}, and torch finds {torch.cuda.device_count()} GPUs"
        )
    torch.cuda.set_device(device)
    return torch.device("cuda", device)


def device_name(device: torch.device) -> str:
    """Return the name that is equal for devices that compute equally fast. Call after ``set_threads``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()} with {torch.get_num_threads()} threads"


def set_threads(weight_bytes: int, num_ranks: int = 1) -> None:
    """Set torch's number of threads to the usable physical cores per rank, or to 1 for a tiny model.

    Steps of a tiny model are shorter than the threads' barriers. Hyper-threads share the arithmetic units. Ranks divide
    the cores, because two threads that wait for each other on one core cost milliseconds. ``OMP_NUM_THREADS``, if set,
    takes precedence.

    Args:
        num_ranks: workers of all engines on this machine.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, usable_cores() // num_ranks)
        torch.set_num_threads(1 if weight_bytes < ONE_THREAD_BELOW_BYTES else threads)


def pick_ops(device: torch.device, deterministic: bool) -> Ops:
    if device.type == "cpu":
        native = load_native()
        if native is not None:
            return CpuOps(native)
        return RowByRowOps() if deterministic else TorchOps()
    from quire.worker_proc.models.triton_ops import TritonOps

    ops = TritonOps()
    drop_unused_launch_hooks()
    return ops


def _compute_dtypes(config: EngineConfig, device: torch.device) -> ComputeDtypes:
    wanted: torch.dtype = getattr(torch, config.dtype)
    if device.type != "cpu":
        return ComputeDtypes(wanted, wanted)
    native = find_native()
    if isinstance(native, str):
        log.warning("no native CPU kernels, using slower torch operators", reason=native)
    chosen = cpu_compute_dtypes(wanted, native if isinstance(native, Native) else None)
    if chosen.reason:
        log.info("compute dtypes", weights=chosen.weights, activations=chosen.activations, reason=chosen.reason)
    return chosen


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
