"""Converts a user's settings to the configuration of scheduler and workers: resolves and checks every default."""

import hashlib
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from quire.launch.config.adapter_options import check_adapter_sizes
from quire.launch.config.declared import check_fit, check_needs, check_range, check_ranges
from quire.launch.config.end_tokens import with_end_tokens
from quire.launch.config.implementation import check_implementation, for_ranks, read_model
from quire.launch.config.model_defaults import chat_template_source, closes_objects, sampling_defaults
from quire.launch.config.model_folder import find_model
from quire.launch.config.options import DEFAULT_ENCODER_CACHE, EngineOptions
from quire.launch.config.pooling import for_model
from quire.launch.config.sampling_options import check_grammar_library, check_processor_names, thinking_markers
from quire.launch.config.speculative import parse_speculative
from quire.launch.config.trace_options import crash_dump_dir, trace_path
from quire.protocol.config import MAX_PRIORITY, MIN_PRIORITY, EngineConfig, SpeculativeConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.checkpoint import check_sizes, stored_tensors, with_stored_format
from quire.protocol.model.model_config import ModelConfig
from quire.protocol.model.pooling_files import with_pooling
from quire.protocol.model.weight_format import online_format
from quire.protocol.process.cache_folder import cache_path
from quire.protocol.settings import ROUTED_EXPERTS, STATELESS, STATES, EngineSettings
from quire.protocol.wire.kv_events import check_endpoints, check_format
from quire.version import __version__, install_command

KV_CACHE_DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def make_engine_config(
    options: EngineOptions, model: ModelConfig | None = None, folder: Path | None = None, *, simulated: bool = False
) -> EngineConfig:
    """Resolve every default and check the result.

    Args:
        model: the shape to run with dummy weights, for benchmarks; if None, the checkpoint in ``folder`` is read.
        simulated: no worker has a device or pages, so that any device has tiers of any size, and costs are not kept.

    Raises:
        ConfigError: a setting is out of range, or two settings contradict each other; with the flag and the range.
    """
    if model is None:
        assert folder is not None
        model = _read_model(folder, options, with_weights=options.load_format != "dummy")
    model = with_pooling(_quantised(options, model), options.pooling)
    template = chat_template_source(options.chat_template)
    options = for_model(options, model)
    device = _device(options.device)
    dtype = model.dtype if options.dtype == "auto" else options.dtype
    speculative, num_drafts = _speculative(options, model)
    max_model_len, max_num_seqs, batched = _sizes(options, model, num_drafts, on_cpu=device == "cpu")
    _check(options, model, device)
    if not simulated:
        _check_pages(options)
        _check_vision_packages(options, model)
    kv_cache_dtype = _kv_cache_dtype(options, model, dtype)
    thinking_start, thinking_end = thinking_markers(
        folder, options.reasoning_start_str, options.reasoning_end_str, model.vocab_size
    )
    settings: dict[str, Any] = {name: getattr(options, name) for name in EngineSettings.__struct_fields__}
    settings["load_format"] = "dummy" if folder is None else options.load_format
    settings["prefix_caching_hash_algo"] = options.prefix_caching_hash_algo.replace("xxhash", "xxh3_128")
    settings["kv_events_curve_dir"] = _absolute(options.kv_events_curve_dir)
    settings["ssd_cache_dir"] = _absolute(options.ssd_cache_dir)
    return EngineConfig(
        **settings,
        # last: these start processes, which a refusal does not need
        model=with_end_tokens(for_ranks(model, options.tensor_parallel_size), folder, template),
        model_path=str(folder) if folder is not None else "",
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        encoder_cache_tokens=_encoder_cache_tokens(options, model),
        num_blocks_override=options.num_gpu_blocks_override or 0,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes or 0,
        priority_range=parse_priority_range(options.priority_range),
        num_speculative_tokens=num_drafts,
        speculative=speculative,
        logits_processors=options.logits_processors or [],
        logits_processors_exclude=options.logits_processors_exclude or [],
        closed_objects=closes_objects(options.structured_outputs_config),
        sampling_defaults=sampling_defaults(folder, options.generation_config),
        chat_template=template,
        thinking_start_token_ids=thinking_start,
        thinking_end_token_ids=thinking_end,
        trace=trace_path(options.trace, options.trace_max_bytes),
        crash_dump_dir=crash_dump_dir(options.crash_dump_dir),
        learned_costs_dir="" if simulated else _learned_costs_dir(),
        version=__version__,
    )


def _read_model(folder: Path, options: EngineOptions, *, with_weights: bool) -> ModelConfig:
    """Read the checkpoint's shape. A broken checkpoint is refused here, before any process starts."""
    model = read_model(folder, options.model_impl)
    if with_weights:
        stored = stored_tensors(folder, renamed=model.transformers is None)
        check_sizes(folder, stored, model)
        model = with_stored_format(folder, stored, model)
    return model


def _quantised(options: EngineOptions, model: ModelConfig) -> ModelConfig:
    """Return the model with the format of ``--quantization``, or without its rounding of activations."""
    kind, form = options.quantization, model.weight_format
    if form is not None and not options.round_activations:
        form = msgspec.structs.replace(form, int8_activations=False, fp8_activations="")
        model = msgspec.structs.replace(model, weight_format=form)
    if kind == "none":
        return model
    if model.weight_format is not None or (model.moe is not None and model.moe.bias):
        raise ConfigError(
            f"--quantization {kind}: the checkpoint's weights are quantised already, or are experts with biases: "
            f"omit the flag"
        )
    return msgspec.structs.replace(model, weight_format=online_format(kind))


def _learned_costs_dir() -> str:
    """Return a folder in the user's cache folder, or "" if the user has no home folder."""
    try:
        return str(cache_path("costs"))
    except RuntimeError:
        return ""


def _absolute(path: str) -> str:
    return path and str(Path(path).expanduser().absolute())


def parse_priority_range(text: str | None) -> tuple[int, int] | None:
    """Return the two numbers of ``LOW:HIGH``, or None if not given; raise ConfigError if invalid."""
    if text is None:
        return None
    match = re.fullmatch(r"(-?[0-9]{1,10}):(-?[0-9]{1,10})", text)
    low, high = (int(match[1]), int(match[2])) if match else (1, 0)
    if not MIN_PRIORITY <= low <= high <= MAX_PRIORITY:
        raise ConfigError(
            f"--priority-range must be LOW:HIGH, from {MIN_PRIORITY} to {MAX_PRIORITY}, not {text[:64]!r} "
            f"(write --priority-range=-5:5 if it begins with a dash)"
        )
    return low, high


def with_api_keys(config: EngineConfig, keys: Sequence[str]) -> EngineConfig:
    """Return ``config`` for a server with these API keys.

    By default, requests may not raise their priority, and several keys do not share the prefix cache. If they do not,
    contents on disk have a folder for these keys in this order, because block hashes name a tenant by its number.
    """
    num_keys = len(keys)
    allowed = config.priority_range
    if allowed is None and num_keys:
        allowed = (0, MAX_PRIORITY)
    isolated = config.isolate_prefix_cache_by_key
    isolated = num_keys > 1 if isolated is None else isolated and num_keys > 0
    cache = config.ssd_cache_dir
    if cache and isolated:
        digest = hashlib.scrypt("\n".join(keys).encode(), salt=b"quire ssd cache", n=2**14, r=8, p=1, dklen=8)
        cache = str(Path(cache) / f"keys-{digest.hex()}")
    return msgspec.structs.replace(
        config,
        num_tenants=num_keys,
        priority_range=allowed,
        isolate_prefix_cache_by_key=isolated,
        ssd_cache_dir=cache,
    )


def _speculative(options: EngineOptions, model: ModelConfig) -> tuple[SpeculativeConfig | None, int]:
    if options.speculative_config is None:
        return None, 0
    with_weights = options.load_format != "dummy"
    return parse_speculative(options.speculative_config, model, find_model, with_weights=with_weights)


def _check(options: EngineOptions, model: ModelConfig, device: str) -> None:
    """Check the settings that do not depend on sizes."""
    check_ranges(options)
    check_needs(options)
    check_adapter_sizes(options)
    low, high = options.kv_pressure_low, options.kv_pressure_high
    if low > high:
        raise ConfigError(
            f"--kv-pressure-low must be at most --kv-pressure-high (got {low} and {high}): set both, from 0.01 to 1.0"
        )
    check_implementation(options, model, device)
    check_fit(options, STATES if model.has_states else STATELESS)
    _check_ranks(model, options.tensor_parallel_size)
    curve_dir = options.kv_events_curve_dir and str(Path(options.kv_events_curve_dir).expanduser())
    endpoints = options.kv_events_endpoint, options.kv_events_replay_endpoint
    check_endpoints(*endpoints, curve_dir, is_open=options.kv_events_without_keys)
    check_format(options.kv_events_format, options.kv_events_topic, options.kv_events_endpoint)
    if options.max_programs and options.scheduling_policy != "program":
        raise ConfigError(
            f"--max-programs {options.max_programs} needs --scheduling-policy program: fcfs, priority and continuum "
            "admit no programs"
        )
    if options.scheduling_policy == "continuum" and not options.enable_prefix_caching:
        raise ConfigError("--scheduling-policy continuum needs --enable-prefix-caching: only cached blocks are kept")
    check_processor_names(options.logits_processors or [])
    _check_experts(options, model)
    check_grammar_library(options.structured_outputs_backend)


def _check_pages(options: EngineOptions) -> None:
    """Check that workers can have the pages of the tiers behind the prefix cache."""
    if bool(options.ssd_cache_dir) != bool(options.ssd_cache_bytes):
        given, missing = "--ssd-cache-dir", "--ssd-cache-bytes"
        if options.ssd_cache_bytes:
            given, missing = missing, given
        raise ConfigError(f"{given} needs {missing}: give both or neither")
    if not (wanted := options.cpu_offload_bytes):
        return
    from quire.protocol.process.host_limits import available_bytes  # psutil, which --help does not wait for

    free = available_bytes()
    if wanted > free:
        raise ConfigError(f"--cpu-offload-bytes must be at most {free}, the host memory that is free (got {wanted})")


def _check_experts(options: EngineOptions, model: ModelConfig) -> None:
    """Raise ConfigError if routed experts are to be kept, and there are none, or the KV pool cannot keep them."""
    flag = "--enable-return-routed-experts"
    if not options.enable_return_routed_experts:
        return
    if model.moe is None:
        raise ConfigError(f"{flag} needs a model with experts, and {model.architecture} has none: omit the flag")
    if all(model.window(layer) or model.chunk(layer) for layer in range(model.num_layers)):
        wanted = "a layer without a sliding window or chunks"
        raise ConfigError(f"{flag} needs {wanted}, and this model has none: omit the flag")
    check_fit(options, ROUTED_EXPERTS)


def _kv_cache_dtype(options: EngineOptions, model: ModelConfig, dtype: str) -> str:
    """Resolve ``auto``: fp8 for a checkpoint that is meant for it, as in vLLM, or the dtype of the weights."""
    default = KV_CACHE_DTYPES["fp8"] if model.fp8_kv_cache and model.latent is None else dtype
    resolved = KV_CACHE_DTYPES.get(options.kv_cache_dtype, default)
    if model.latent is not None and resolved.startswith("float8"):
        raise ConfigError(
            f"--kv-cache-dtype {options.kv_cache_dtype} is not supported by Quire's own code for {model.architecture}, "
            f"whose cache has latents: use auto, bfloat16 or float32, or set --model-impl transformers"
        )
    if options.calculate_kv_scales and not resolved.startswith("float8"):
        raise ConfigError(f"--calculate-kv-scales needs an fp8 KV cache (got {resolved}): add --kv-cache-dtype fp8")
    return resolved


def _device(wanted: str) -> str:
    """Resolve ``auto``. Looks for the NVIDIA driver's device file, because importing torch is slow."""
    if wanted != "auto":
        return wanted
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "cuda" if Path("/dev/nvidiactl").exists() and not hidden else "cpu"


def _sizes(options: EngineOptions, model: ModelConfig, num_drafts: int, *, on_cpu: bool) -> tuple[int, int, int]:
    """Return max_model_len, max_num_seqs and max_num_batched_tokens. Each one bounds the range of the next."""
    max_model_len = options.max_model_len or model.max_position
    max_num_seqs = options.max_num_seqs if options.max_num_seqs is not None else (64 if on_cpu else 256)
    # One step has room for one token and all draft tokens of each request.
    least = max_num_seqs * (1 + num_drafts)
    batched = options.max_num_batched_tokens
    if batched is None:
        batched = max(2048 if on_cpu else 8192, least)
        batched = batched if options.enable_chunked_prefill else max(batched, max_model_len)
    check_range("max_model_len", max_model_len, 2, model.max_position)
    check_range("max_num_seqs", max_num_seqs, 1, 16384)
    check_range("max_num_batched_tokens", batched, max_num_seqs, 2**24)
    if batched < least:
        raise ConfigError(
            f"--max-num-batched-tokens must be at least {least} (--max-num-seqs, times 1 + num_speculative_tokens), "
            f"not {batched}"
        )
    if not options.enable_chunked_prefill and batched < max_model_len:
        raise ConfigError(
            f"--no-enable-chunked-prefill needs --max-num-batched-tokens of at least {max_model_len} (--max-model-len)"
        )
    if options.max_num_scheduled_tokens:
        least = max_num_seqs if options.enable_chunked_prefill else max(max_num_seqs, max_model_len)
        check_range("max_num_scheduled_tokens", options.max_num_scheduled_tokens, least, batched)
    return max_model_len, max_num_seqs, batched


def _check_vision_packages(options: EngineOptions, model: ModelConfig) -> None:
    """Raise ConfigError for a model that is to read images, for which packages are missing."""
    if model.vision is None or options.encoder_cache_tokens == 0:
        return
    missing = [module for module in ("transformers", "PIL") if importlib.util.find_spec(module) is None]
    if missing:
        ways = f"{install_command('vision')}, or --encoder-cache-tokens 0 to serve text only"
        raise ConfigError(f"images need {' and '.join(missing)}: {ways}")


def _encoder_cache_tokens(options: EngineOptions, model: ModelConfig) -> int:
    """Return the rows that the encoder cache holds, none if requests can have no items."""
    wanted = options.encoder_cache_tokens
    if model.vision is None and not options.enable_prompt_embeds:
        if wanted:
            raise ConfigError(
                f"--encoder-cache-tokens {wanted} needs a model that reads images, or --enable-prompt-embeds, and "
                f"{model.architecture} reads text only: omit the flag"
            )
        return 0
    if wanted != 0 and not options.enable_chunked_prefill:
        raise ConfigError("images need --enable-chunked-prefill: for text only, set --encoder-cache-tokens 0")
    if wanted == 0 and options.enable_prompt_embeds:
        raise ConfigError("--enable-prompt-embeds needs --encoder-cache-tokens of at least 1 (got 0): omit that flag")
    return DEFAULT_ENCODER_CACHE if wanted is None else wanted


def _check_ranks(model: ModelConfig, size: int) -> None:
    """Raise ConfigError unless ``size`` ranks divide the heads and widths of a model that Quire's code computes."""
    if model.transformers is not None:
        return

    def divides(ranks: int) -> bool:
        shared = all(heads % ranks == 0 or ranks % heads == 0 for heads, _ in model.all_kv_shapes)
        dense = model.moe is None or len(model.moe.layers) < model.num_layers
        widths = (model.intermediate_size % ranks == 0 or not dense) and (
            not model.moe or model.moe.divides_among(ranks)
        )
        return shared and model.num_heads % ranks == 0 and widths

    if not divides(size):
        possible = ", ".join(str(ranks) for ranks in range(1, model.num_heads + 1) if divides(ranks))
        raise ConfigError(f"--tensor-parallel-size {size} does not divide this model; possible: {possible}")
