"""Memory plan of the device, made and logged before any weight is read."""

import psutil
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import DTYPE_BYTES, KVLayout
from quire.protocol.process.host_limits import available_bytes
from quire.protocol.process.log import event_logger
from quire.protocol.wire.worker_messages import MemoryPlan
from quire.worker_proc.attention.cpu_expanded import expansion_bytes

log = event_logger("worker")

CPU_SHARE = 0.5
"""Share of the free host memory for the default pool. Front ends, new workers and file pages need the rest."""
CPU_LEAST = 2**30
"""Bytes of the default pool on a CPU if they are free, also for a small context: finished prefixes stay cached."""
_MIB = 2**20


def plan_memory(
    config: EngineConfig,
    layout: KVLayout,
    weight_bytes: int,
    device: torch.device,
    other_block_bytes: int = 0,
    adapter_bytes: int = 0,
    image_bytes: int = 0,
    *,
    rank: int = 0,
) -> MemoryPlan:
    """Plan memory and choose the numbers of KV blocks and of slots of recurrent states.

    Unless a flag sets the number or ``kv_cache_memory_bytes``, the pool gets on a GPU the memory that
    ``gpu_memory_utilization`` leaves after weights and activations, and on a CPU half of what is left, without
    ``cpu_offload_bytes``, but not more than twice the need of all requests at the maximum length. The ranks on a
    machine's CPU divide its memory, and by default all engines on it do. For models with recurrent states, slots are a
    part of the pool (``_state_slots``).

    Args:
        weight_bytes: bytes of all weights, including a draft model's.
        other_block_bytes: bytes per block of a draft model's cache, or of the table of routed experts.
        adapter_bytes: bytes of the largest LoRA adapter. On a GPU each slot has as many; on a CPU adapters are in host
            memory, which is taken when they are loaded.
        image_bytes: bytes of the encoder cache, and of what encoding one image needs.

    Raises:
        ConfigError: weights and the pool do not fit in memory; the message has the needed and the usable memory.
    """
    activations = _activation_bytes(config)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # What other processes hold is subtracted from the share and not from the whole device: the flag says which part
        # of it this engine and all others may fill.
        usable = int(total * config.gpu_memory_utilization) - (total - free)
    else:
        total = psutil.virtual_memory().total
        usable = available_bytes() // config.sharing(rank)[0]
        activations += expansion_bytes(config)
    # One more than a step may use, to which an adapter is loaded while the others are in use.
    adapters = (config.max_loras + 1) * adapter_bytes if device.type == "cuda" else 0
    left = usable - weight_bytes - activations - adapters - image_bytes
    block_bytes, num_slots = layout.block_bytes + other_block_bytes, 0
    if not layout.groups:
        num_blocks = 2  # the null block and an unused one
    elif config.num_blocks_override:
        num_blocks = config.num_blocks_override + 1
        num_slots = _state_slots(config, layout, num_blocks * block_bytes, left - num_blocks * block_bytes)
    else:
        others = usable - usable // config.sharing(rank)[1]  # other engines start at the same time
        default = left if device.type == "cuda" else _cpu_pool_bytes(config, layout, left - others, block_bytes)
        pool = config.kv_cache_memory_bytes or max(default, 0)
        most_states = min(max(pool * 3 // 4, _state_bytes(config, layout, 1)), pool - 2 * block_bytes)
        num_slots = _state_slots(config, layout, pool, most_states)
        num_blocks = (pool - _state_bytes(config, layout, num_slots)) // block_bytes
    kv_cache, states = num_blocks * block_bytes, _state_bytes(config, layout, num_slots)
    if num_blocks < 2 or (states and not num_slots) or kv_cache + states > left:
        raise ConfigError(
            f"memory does not suffice: weights {weight_bytes // _MIB} MiB, activations {activations // _MIB} MiB, "
            f"{_of_adapters(adapters)}{_of_images(image_bytes)}"
            f"{_of_states(max(states, _state_bytes(config, layout, 1)))}"
            f"KV cache {max(kv_cache, 2 * block_bytes) // _MIB} MiB; "
            f"{max(usable, 0) // _MIB} MiB are usable: "
            f"lower --max-model-len, --kv-cache-memory-bytes or --num-gpu-blocks-override, or raise "
            f"--gpu-memory-utilization"
        )
    return MemoryPlan(
        device=str(device),
        total=total,
        weights=weight_bytes,
        activations=activations,
        kv_cache=kv_cache,
        num_blocks=num_blocks,
        block_size=config.block_size,
        adapters=adapters,
        images=image_bytes,
        states=states,
        num_slots=num_slots + 1 if states else 0,
    )


def _state_slots(config: EngineConfig, layout: KVLayout, pool_bytes: int, most_bytes: int) -> int:
    """Return the number of slots of recurrent states without slot 0: that of the flag, or one chosen from memory.

    In a small pool blocks keep a quarter of the memory. ``most_bytes``: that can be left to states.
    """
    if not layout.states or config.state_slots:
        return config.state_slots if layout.states else 0
    rows, places = config.max_num_seqs, most_bytes // layout.slot_bytes - 1
    fitting = max(
        places - rows * config.num_speculative_tokens, min(rows, places // (1 + config.num_speculative_tokens))
    )
    return max(0, min(layout.num_slots(pool_bytes, rows), fitting))


def _state_bytes(config: EngineConfig, layout: KVLayout, num_slots: int) -> int:
    """Return the bytes of so many slots of recurrent states, and of what comes with them.

    That is slot 0, which no request has, and a place for each draft of a step: no more requests run than have slots.
    """
    drafts = config.num_speculative_tokens * min(config.max_num_seqs, num_slots)
    return layout.slot_bytes * (1 + num_slots + drafts)


def _of_adapters(num_bytes: int) -> str:
    return f"LoRA adapters {num_bytes // _MIB} MiB (lower --max-loras or --max-lora-rank), " if num_bytes else ""


def _of_images(num_bytes: int) -> str:
    return f"encoder cache {num_bytes // _MIB} MiB (lower --encoder-cache-tokens), " if num_bytes else ""


def _of_states(num_bytes: int) -> str:
    return f"recurrent states {num_bytes // _MIB} MiB (lower --state-slots or --max-num-seqs), " if num_bytes else ""


def _cpu_pool_bytes(config: EngineConfig, layout: KVLayout, left: int, block_bytes: int) -> int:
    """Return the default size of the pool on a CPU. ``left``: bytes that this rank has for it."""
    left -= config.cpu_offload_bytes // config.tensor_parallel_size
    blocks = sum(-(-config.max_model_len // group.block_size) for group in layout.groups)
    needed = 2 * config.max_num_seqs * (blocks * block_bytes + 2 * layout.slot_bytes)
    return min(left, max(CPU_LEAST, min(int(left * CPU_SHARE), needed)))


def log_plan(plan: MemoryPlan, max_model_len: int) -> None:
    """Log the plan, and a warning if a request of the maximum length does not fit in the block pool."""
    num_blocks = plan.num_blocks - 1
    log.info(
        "memory plan",
        device=plan.device,
        weights_mib=plan.weights / _MIB,
        activations_mib=plan.activations / _MIB,
        kv_cache_mib=plan.kv_cache / _MIB,
        num_blocks=num_blocks,
        block_size=plan.block_size,
    )
    if plan.images:
        log.info("encoder cache, and the encoding of an image", mib=plan.images / _MIB)
    if plan.num_slots:
        log.info("recurrent states, beside the KV cache", slots=plan.num_slots - 1, mib=plan.states / _MIB)
    tokens = num_blocks * plan.block_size
    if plan.kv_cache and tokens < max_model_len:
        log.warning(
            "KV cache is smaller than the context: longer requests are refused or end early with finish reason length",
            tokens=tokens,
            max_model_len=max_model_len,
        )


def _activation_bytes(config: EngineConfig) -> int:
    """Return an upper bound of a step's activation memory.

    It is the larger of the MLP intermediates of all tokens and the logits of all sampled positions, plus the token
    counts for penalties if every request has some, the rotary tables, and the block tables on host and device.
    """
    model = config.model
    head_dim = max(dim for _, dim in model.all_kv_shapes)
    per_token = 2 * model.intermediate_size + 4 * model.hidden_size + 2 * model.num_heads * head_dim
    if model.moe is not None:  # every token goes through several experts, each with its own input and output
        experts = 2 * model.moe.intermediate_size + 2 * model.hidden_size
        per_token = max(per_token, 4 * model.hidden_size + model.moe.num_experts_per_token * experts)
    hidden = config.max_num_batched_tokens * per_token * DTYPE_BYTES[config.dtype]
    samples = config.max_num_seqs if model.generates else 0
    logits = 3 * samples * (1 + config.num_speculative_tokens) * model.vocab_size * 4
    counts = samples * model.vocab_size * 4
    rotary = 2 * config.max_model_len * head_dim * 4 * (1 if model.local_rope is None else 2)
    tables = 2 * config.max_num_seqs * (config.max_model_len // config.block_size + 1) * 4
    return max(hidden, logits) + counts + rotary + tables
