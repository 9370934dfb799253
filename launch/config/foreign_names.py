"""Suggestions for names of other engines' flags: the equivalent here, or why there is none."""

from collections.abc import Collection

from quire.protocol.errors import did_you_mean

# Flags of vLLM, SGLang and llama.cpp with an equivalent here.
FOREIGN_NAMES = {
    # vLLM, SGLang
    "tp": "--tensor-parallel-size",
    "tp_size": "--tensor-parallel-size",
    "dp": "--data-parallel-size",
    "dp_size": "--data-parallel-size",
    "data_parallel_backend": "--nodes",
    "distributed_executor_backend": "--nodes",
    "nnodes": "--nodes",
    "load_balance_method": "--routing",
    "routing_policy": "--routing",
    "model": "MODEL (the first argument)",
    "model_path": "MODEL (the first argument)",
    "max_running_requests": "--max-num-seqs",
    "chunked_prefill_size": "--long-prefill-token-threshold",
    "page_size": "--block-size",
    "context_length": "--max-model-len",
    "mem_fraction_static": "--gpu-memory-utilization",
    "disable_radix_cache": "--no-enable-prefix-caching",
    "no_prefix_caching": "--no-enable-prefix-caching",
    "schedule_policy": "--scheduling-policy",
    "max_queued_requests": "--max-num-queued-reqs",
    "scheduler_reserve_full_isl": "--reserve-full-sequence",
    "speculative_model": "--speculative-config",
    "num_speculative_tokens": "--speculative-config",
    "guided_decoding_backend": "--structured-outputs-backend",
    "grammar_backend": "--structured-outputs-backend",
    "logits_processor_pattern": "--logits-processors",
    "sampling_defaults": "--generation-config",
    "uvicorn_log_level": "--log-level",
    "disable_log_requests": "--log-level warning",
    "disable_log_stats": "--log-level warning",
    "disable_uvicorn_access_log": "--log-level warning",
    "enable_log_requests": "--log-level info",
    "kv_events_config": "--kv-events-endpoint",
    "lora_paths": "--lora-modules",
    "max_loras_per_batch": "--max-loras",
    "max_loaded_loras": "--max-cpu-loras",
    "limit_mm_per_prompt": "--max-images-per-prompt",
    "allowed_media_domain": "--allowed-media-domains",
    "mm_processor_cache_gb": "--image-memory-bytes",
    # llama.cpp
    "m": "MODEL (the first argument)",
    "hf": "MODEL (the first argument)",
    "hf_repo": "MODEL (the first argument)",
    "a": "--served-model-name",
    "alias": "--served-model-name",
    "c": "--max-model-len",
    "ctx_size": "--max-model-len",
    "np": "--max-num-seqs",
    "parallel": "--max-num-seqs",
    "b": "--max-num-batched-tokens",
    "batch_size": "--max-num-batched-tokens",
    "ub": "--max-num-batched-tokens",
    "ubatch_size": "--max-num-batched-tokens",
    "ctk": "--kv-cache-dtype",
    "cache_type_k": "--kv-cache-dtype",
    "ctv": "--kv-cache-dtype",
    "cache_type_v": "--kv-cache-dtype",
    "fa": "--attention-backend",
    "flash_attn": "--attention-backend",
    "md": "--speculative-config",
    "model_draft": "--speculative-config",
    "draft_max": "--speculative-config",
    "chat_template_file": "--chat-template",
    "reasoning_format": "--reasoning-parser",
    "q": "--quantization",
    "load_in_4bit": "--quantization int4",
    "pooler_config": "--pooling",
    "override_pooler_config": "--pooling",
    "api_prefix": "--root-path",
    "ssl_key_file": "--ssl-keyfile",
    "ssl_cert_file": "--ssl-certfile",
    "threads_http": "--api-server-count",
    "lora": "--lora-modules",
    "verbose": "--log-level debug",
}

_TASKS = "not needed: the routes of all tasks of the model are served; --pooling lets one that generates text embed"
_PIPELINES = "not supported: use --tensor-parallel-size, or --data-parallel-size for several engines"
_RANKS = "not needed: one server starts all engines (--data-parallel-size), on other machines too (--nodes)"
_DEVICE = "a model is on one kind of device as a whole: choose it with --device"
_TOOLS = "tools need no flag: docs/sampling.md"
_ALWAYS = "not needed: it is always on"
_THREADS = "not needed: all cores that the process may use are used; taskset and CPU quotas limit them"
_REQUEST = "a parameter of requests, or a value of generation_config.json: --generation-config"

# Flags without an equivalent: why.
NO_EQUIVALENT = {
    "lora_scaled": "the scale of an adapter is that of its adapter_config.json: --lora-modules",
    "lora_dtype": "not needed: adapters have the type of the model's activations",
    "mmproj": "not needed: MODEL's folder has the vision tower and the processor",
    "mm_processor_kwargs": "the settings of the checkpoint's preprocessor_config.json are used: change them there",
    "allowed_local_media_path": "not supported: send files as data: URLs",
    "enable_multimodal": _ALWAYS,
    "task": _TASKS,
    "runner": _TASKS,
    "convert": _TASKS,
    "embedding": _TASKS,
    "embeddings": _TASKS,
    "is_embedding": _TASKS,
    "reranking": _TASKS,
    "data_parallel_size": "several engines are a setting of quire serve: start it with --data-parallel-size",
    "data_parallel_size_local": _RANKS,
    "data_parallel_address": _RANKS,
    "data_parallel_rpc_port": _RANKS,
    "data_parallel_rank": _RANKS,
    "data_parallel_start_rank": _RANKS,
    "headless": _RANKS,
    "node_rank": _RANKS,
    "dist_init_addr": _RANKS,
    "enable_expert_parallel": _PIPELINES,
    "ep_size": _PIPELINES,
    "pipeline_parallel_size": _PIPELINES,
    "ngl": _DEVICE,
    "gpu_layers": _DEVICE,
    "n_gpu_layers": _DEVICE,
    "cpu_offload_gb": _DEVICE,
    "trust_remote_code": "no code of a checkpoint is executed: docs/models.md lists the supported models",
    "tokenizer": "the tokenizer is that of MODEL's folder",
    "revision": "download that revision, and give its folder as MODEL",
    "enable_auto_tool_choice": _TOOLS,
    "jinja": "not needed: the chat template is always used",
    "cont_batching": _ALWAYS,
    "metrics": _ALWAYS,
    "enable_metrics": _ALWAYS,
    "eviction_policy": "removed: lru is always used, because value gained only in small pools: docs/log/2026-11-27.md",
    "slots": "not supported: quire top shows the requests by state",
    "cache_reuse": "not needed: equal prefixes are reused unless --no-enable-prefix-caching is given",
    "t": _THREADS,
    "threads": _THREADS,
    "temp": _REQUEST,
    "override_generation_config": _REQUEST,
    "n_predict": _REQUEST,
}


def suggest(name: str, known: Collection[str]) -> str:
    """Return what to add to an error about an unknown key: ``"; did you mean ...?"``, why there is none, or ""."""
    if name in NO_EQUIVALENT:
        return f"; {NO_EQUIVALENT[name]}"
    foreign = FOREIGN_NAMES.get(name)
    return f"; did you mean {foreign}?" if foreign else did_you_mean(name, known)
