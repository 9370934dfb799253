"""The engine settings in the header of a trace, by ``--set`` key."""

from typing import Any

from quire.scheduler_proc.trace.lines import Header

SETTINGS = (
    "dtype",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "block_size",
    "enable_prefix_caching",
    "cpu_offload_bytes",
    "ssd_cache_bytes",
    "async_scheduling",
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "max_prefill_share",
    "scheduling_policy",
    "max_num_queued_reqs",
    "reserve_full_sequence",
    "watermark",
    "kv_pressure_high",
    "kv_pressure_low",
    "enable_lora",
    "max_loras",
    "max_cpu_loras",
    "encoder_cache_tokens",
    "enable_prompt_embeds",
)
"""Engine flags that affect scheduling."""

_FLAG_OF_DTYPE = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


def recorded_settings(header: Header) -> dict[str, Any]:
    """Return the recorded settings, without the model: only its shape is recorded, not its name."""
    settings = {name: getattr(header.config, name) for name in SETTINGS}
    settings["kv_cache_dtype"] = _FLAG_OF_DTYPE.get(header.config.kv_cache_dtype, header.config.kv_cache_dtype)
    return settings | {"num_usable_blocks": header.num_blocks - 1}
