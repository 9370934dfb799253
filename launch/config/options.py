"""The engine's flags, once: the command line, config files and ``LLM(...)`` are all made from this table.

``EngineOptions`` is what a user said; ``make_engine_config`` decides the rest and checks it.
"""

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from quire.launch.config.model_folder import find_model
from quire.launch.config.sampling_options import (
    check_grammar_library,
    check_processor_names,
    processor_name,
    thinking_markers,
)
from quire.launch.config.speculative import parse_speculative
from quire.launch.config.trace_options import crash_dump_dir, trace_path
from quire.protocol.config import MAX_PRIORITY, MIN_PRIORITY, EngineConfig, SpeculativeConfig
from quire.protocol.errors import ConfigError, did_you_mean
from quire.protocol.model.checkpoint import check_sizes, stored_tensors
from quire.protocol.model.model_config import ModelConfig, load_model_config
from quire.protocol.wire.kv_events import check_endpoints
from quire.version import __version__

# Names that users of other engines type, and ours for them.
FOREIGN_NAMES = {
    "tp": "--tensor-parallel-size",
    "tp_size": "--tensor-parallel-size",
    "model_path": "MODEL (the first argument)",
    "max_running_requests": "--max-num-seqs",
    "chunked_prefill_size": "--long-prefill-token-threshold",
    "page_size": "--block-size",
    "context_length": "--max-model-len",
    "ctx_size": "--max-model-len",
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
}

KV_CACHE_DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}

# Of the settings whose range depends on no other.
RANGES: dict[str, tuple[float, float]] = {
    "block_size": (1, 1024),
    "num_gpu_blocks_override": (1, 2**31 - 2),
    "kv_cache_memory_bytes": (1, 2**50),
    "gpu_memory_utilization": (0.01, 1.0),
    "long_prefill_token_threshold": (0, 2**24),
    "max_prefill_share": (0.01, 1.0),
    "max_num_queued_reqs": (0, 2**20),
    "tensor_parallel_size": (1, 64),
    "watermark": (0, 0.5),
    "seed": (0, 2**63 - 1),
}


class Help(msgspec.Struct, frozen=True):
    """What the command line says of a flag."""

    text: str


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings as a user gives them; None means: decide for me."""

    model: Annotated[str | None, Help("Hugging Face folder or id; none: the built-in demo model")] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"], Help("dummy: random weights of the checkpoint's shape")
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], Help("where the model runs")] = "auto"
    dtype: Annotated[Literal["auto", "bfloat16", "float16", "float32"], Help("auto: the checkpoint's")] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"],
        Help("of the KV cache; auto: as the weights; fp8 is fp8_e4m3"),
    ] = "auto"
    tensor_parallel_size: Annotated[int, Help("worker processes that share each layer, one per GPU")] = 1
    attention_backend: Annotated[
        Literal["auto", "cpu", "triton", "flashinfer", "flash_attn"],
        Help("auto: cpu or triton, as the device is; the others are extras"),
    ] = "auto"
    enforce_eager: Annotated[bool, Help("no CUDA graphs")] = False
    deterministic: Annotated[bool, Help("equal bits for a request whatever else runs; slower")] = False
    max_model_len: Annotated[int | None, Help("most tokens of one request, prompt and answer (the model's)")] = None
    max_num_seqs: Annotated[int | None, Help("most requests in one step (256; 64 on a CPU)")] = None
    max_num_batched_tokens: Annotated[int | None, Help("most tokens in one step (8192; 2048 on a CPU)")] = None
    block_size: Annotated[int, Help("tokens in a KV block")] = 16
    num_gpu_blocks_override: Annotated[int | None, Help("KV blocks to use, whatever the memory")] = None
    gpu_memory_utilization: Annotated[float, Help("share of a GPU's memory to use")] = 0.9
    kv_cache_memory_bytes: Annotated[int | None, Help("bytes for the KV pool (on a CPU 1 GiB)")] = None
    enable_prefix_caching: Annotated[bool, Help("reuse the KV of equal prefixes")] = True
    async_scheduling: Annotated[bool, Help("decide a step while the one before runs")] = True
    enable_chunked_prefill: Annotated[bool, Help("spread long prompts over steps")] = True
    long_prefill_token_threshold: Annotated[int, Help("most prompt tokens of one request in one step; 0: no limit")] = 0
    max_prefill_share: Annotated[float, Help("most of a step's tokens for prefill while others decode")] = 0.5
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], Help("who goes first: the earliest, or the lowest priority number")
    ] = "fcfs"
    priority_range: Annotated[
        str | None,
        Help("LOW:HIGH, the priorities that requests may have; others get 403 (any; with API keys 0 and up)"),
    ] = None
    fair_admission: Annotated[bool, Help("API keys take turns, and share rows, blocks and cache")] = True
    isolate_prefix_cache_by_key: Annotated[bool, Help("no API key finds what another one's requests cached")] = False
    max_num_queued_reqs: Annotated[int, Help("most requests that wait; further ones get 503; 0: no limit")] = 0
    reserve_full_sequence: Annotated[bool, Help("admit only what has room for its longest possible answer")] = False
    watermark: Annotated[float, Help("share of the KV blocks that admission leaves free")] = 0.0
    prefix_caching_hash_algo: Annotated[
        Literal["sha256", "xxh3_128", "xxhash"], Help("of cached blocks; xxhash means xxh3_128, and needs the extra")
    ] = "sha256"
    speculative_config: Annotated[
        dict[str, Any] | None, Help("who drafts tokens, as JSON: method, num_speculative_tokens, ...")
    ] = None
    logits_processors: Annotated[list[str] | None, Help("logits processors to load, as module:Class")] = None
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "processed_logprobs"], Help("of the model itself, or of what is sampled from")
    ] = "raw_logprobs"
    reasoning_start_str: Annotated[str | None, Help("begins thinking (<think>, if that is a token)")] = None
    reasoning_end_str: Annotated[str | None, Help("ends thinking (</think>, if that is a token)")] = None
    structured_outputs_backend: Annotated[Literal["llguidance", "xgrammar"], Help("library of grammars")] = "llguidance"
    kv_events_endpoint: Annotated[str, Help("publish cache events: ipc:///folder/name or tcp://ADDRESS:port")] = ""
    kv_events_replay_endpoint: Annotated[str, Help("where missed cache events are asked for, in the same form")] = ""
    kv_events_curve_dir: Annotated[
        str, Help("keys for events over TCP: server.key_secret, and allowed/*.key of those who may connect")
    ] = ""
    trace: Annotated[str | None, Help("record what the scheduler decides in this file; .zst: compressed")] = None
    trace_prompts: Annotated[bool, Help("with the prompts' tokens")] = False
    trace_max_bytes: Annotated[int, Help("go on in FILE.1, FILE.2, ... when one is so large; 0: one file")] = 0
    crash_dump_dir: Annotated[
        str | None, Help("folder for the last events of an engine that failed; empty: none (the user's state folder)")
    ] = None
    seed: Annotated[int, Help("of random weights")] = 0


def parse_options(given: Mapping[str, Any], where: str) -> EngineOptions:
    """EngineOptions from keywords or a config file; dashes and underscores are the same.

    Raises:
        ConfigError: an unknown key (with the nearest known one), or a value of the wrong type.
    """
    known = EngineOptions.__struct_fields__
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{where}: unknown key {key!r}{suggest(name, known)}")
        values[name] = _plain(name, value)
    try:
        return msgspec.convert(values, EngineOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_say(error)}") from None


def _plain(name: str, value: Any) -> Any:
    """A value as its field has it, from the other forms that Python and JSON have for it."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if name == "logits_processors" and isinstance(value, list | tuple):
        return [processor_name(each) for each in value]
    if name == "speculative_config" and isinstance(value, str):
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            raise ConfigError(f"--speculative-config must be a JSON object, not {value[:64]!r}") from None
    return value


def suggest(name: str, known: "tuple[str, ...] | list[str]") -> str:
    """``"; did you mean ...?"`` for a key that is not known, foreign names included."""
    foreign = FOREIGN_NAMES.get(name)
    return f"; did you mean {foreign}?" if foreign else did_you_mean(name, known)


def make_engine_config(
    options: EngineOptions, model: ModelConfig | None = None, folder: Path | None = None
) -> EngineConfig:
    """Decide every default and check the whole.

    Args:
        model: the shape to run with random weights, for benchmarks; else ``folder``'s checkpoint is read.

    Raises:
        ConfigError: a setting out of range, or two that contradict each other; names the flag and the range.
    """
    if model is None:
        assert folder is not None
        model = load_model_config(folder)
        if options.load_format != "dummy":
            # A broken checkpoint fails here, before any process starts.
            check_sizes(folder, stored_tensors(folder), model)
    device = _device(options.device)
    dtype = model.dtype if options.dtype == "auto" else options.dtype
    speculative, num_drafts = _speculative(options, model)
    max_model_len, max_num_seqs, batched = _sizes(options, model, num_drafts, on_cpu=device == "cpu")
    _check(options, model)
    thinking_start, thinking_end = thinking_markers(
        folder, options.reasoning_start_str, options.reasoning_end_str, model.vocab_size
    )
    return EngineConfig(
        model=model,
        model_path=str(folder) if folder is not None else "",
        load_format="dummy" if folder is None else options.load_format,
        device=device,
        dtype=dtype,
        kv_cache_dtype=KV_CACHE_DTYPES.get(options.kv_cache_dtype, dtype),
        tensor_parallel_size=options.tensor_parallel_size,
        attention_backend=options.attention_backend,
        enforce_eager=options.enforce_eager,
        deterministic=options.deterministic,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        block_size=options.block_size,
        num_blocks_override=options.num_gpu_blocks_override or 0,
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes or 0,
        enable_prefix_caching=options.enable_prefix_caching,
        enable_chunked_prefill=options.enable_chunked_prefill,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        max_prefill_share=options.max_prefill_share,
        scheduling_policy=options.scheduling_policy,
        priority_range=parse_priority_range(options.priority_range),
        fair_admission=options.fair_admission,
        isolate_prefix_cache_by_key=options.isolate_prefix_cache_by_key,
        max_num_queued_reqs=options.max_num_queued_reqs,
        reserve_full_sequence=options.reserve_full_sequence,
        watermark=options.watermark,
        prefix_caching_hash_algo=_hash_algo(options.prefix_caching_hash_algo),
        num_speculative_tokens=num_drafts,
        speculative=speculative,
        logits_processors=options.logits_processors or [],
        logprobs_mode=options.logprobs_mode,
        thinking_start_token_ids=thinking_start,
        thinking_end_token_ids=thinking_end,
        structured_outputs_backend=options.structured_outputs_backend,
        kv_events_endpoint=options.kv_events_endpoint,
        kv_events_replay_endpoint=options.kv_events_replay_endpoint,
        kv_events_curve_dir=options.kv_events_curve_dir
        and str(Path(options.kv_events_curve_dir).expanduser().absolute()),
        async_scheduling=options.async_scheduling,
        seed=options.seed,
        trace=trace_path(options.trace, options.trace_max_bytes),
        trace_prompts=options.trace_prompts,
        trace_max_bytes=options.trace_max_bytes,
        crash_dump_dir=crash_dump_dir(options.crash_dump_dir),
        version=__version__,
    )


def parse_priority_range(text: str | None) -> tuple[int, int] | None:
    """Of ``LOW:HIGH``. Raises ConfigError."""
    if text is None:
        return None
    match = re.fullmatch(r"(-?[0-9]{1,10}):(-?[0-9]{1,10})", text)
    low, high = (int(match[1]), int(match[2])) if match else (1, 0)
    if not MIN_PRIORITY <= low <= high <= MAX_PRIORITY:
        raise ConfigError(
            f"--priority-range must be LOW:HIGH, from {MIN_PRIORITY} to {MAX_PRIORITY}, not {text[:64]!r} "
            f"(as --priority-range=-5:5, where it begins with a dash)"
        )
    return low, high


def with_keys(config: EngineConfig, num_keys: int) -> EngineConfig:
    """``config`` for a server that so many API keys open: whoever has one may not go before all others by a number."""
    allowed = config.priority_range
    if allowed is None and num_keys:
        allowed = (0, MAX_PRIORITY)
    return msgspec.structs.replace(config, num_tenants=num_keys, priority_range=allowed)


def _speculative(options: EngineOptions, model: ModelConfig) -> tuple[SpeculativeConfig | None, int]:
    if options.speculative_config is None:
        return None, 0
    with_weights = options.load_format != "dummy"
    return parse_speculative(options.speculative_config, model, find_model, with_weights=with_weights)


def _check(options: EngineOptions, model: ModelConfig) -> None:
    """All that is not a matter of sizes."""
    for name, (low, high) in RANGES.items():
        _check_range(name, getattr(options, name), low, high)
    _check_ranks(model, options.tensor_parallel_size)
    curve_dir = options.kv_events_curve_dir and str(Path(options.kv_events_curve_dir).expanduser())
    check_endpoints(options.kv_events_endpoint, options.kv_events_replay_endpoint, curve_dir)
    if options.kv_events_endpoint and not options.enable_prefix_caching:
        raise ConfigError("--kv-events-endpoint needs --enable-prefix-caching: without it there are no events")
    check_processor_names(options.logits_processors or [])
    check_grammar_library(options.structured_outputs_backend)


def _device(wanted: str) -> str:
    """Without importing torch: the driver's device file says whether there is a GPU."""
    if wanted != "auto":
        return wanted
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "cuda" if Path("/dev/nvidiactl").exists() and not hidden else "cpu"


def _sizes(options: EngineOptions, model: ModelConfig, num_drafts: int, *, on_cpu: bool) -> tuple[int, int, int]:
    """Of one request, of a step in requests, of a step in tokens: each bounds the next one's range."""
    max_model_len = options.max_model_len or model.max_position
    max_num_seqs = options.max_num_seqs if options.max_num_seqs is not None else (64 if on_cpu else 256)
    # Everybody's token and drafts fit into one step.
    least = max_num_seqs * (1 + num_drafts)
    batched = options.max_num_batched_tokens
    if batched is None:
        batched = max(2048 if on_cpu else 8192, least)
        batched = batched if options.enable_chunked_prefill else max(batched, max_model_len)
    _check_range("max_model_len", max_model_len, 2, model.max_position)
    _check_range("max_num_seqs", max_num_seqs, 1, 16384)
    _check_range("max_num_batched_tokens", batched, max_num_seqs, 2**24)
    if batched < least:
        raise ConfigError(
            f"--max-num-batched-tokens must be at least {least} (--max-num-seqs, times 1 + num_speculative_tokens), "
            f"not {batched}"
        )
    if not options.enable_chunked_prefill and batched < max_model_len:
        raise ConfigError(
            f"--no-enable-chunked-prefill needs --max-num-batched-tokens of at least {max_model_len} (--max-model-len)"
        )
    return max_model_len, max_num_seqs, batched


def _check_ranks(model: ModelConfig, size: int) -> None:
    """A model can be cut among as many ranks as divide its heads and widths."""

    def divides(ranks: int) -> bool:
        kv_heads = model.num_kv_heads
        shared = kv_heads % ranks == 0 or ranks % kv_heads == 0
        dense = model.moe is None or len(model.moe.layers) < model.num_layers
        widths = [model.intermediate_size] * dense + ([model.moe.intermediate_size] if model.moe else [])
        return shared and model.num_heads % ranks == 0 and all(width % ranks == 0 for width in widths)

    if not divides(size):
        possible = ", ".join(str(ranks) for ranks in range(1, model.num_heads + 1) if divides(ranks))
        raise ConfigError(f"--tensor-parallel-size {size} does not divide this model; possible: {possible}")


def _hash_algo(wanted: str) -> str:
    """The algorithm's own name. A package that it lacks is missed here, not in a process that has started."""
    if wanted == "sha256":
        return wanted
    if importlib.util.find_spec("xxhash") is None:
        raise ConfigError(f"--prefix-caching-hash-algo {wanted} needs the package xxhash: pip install 'quire[xxhash]'")
    return "xxh3_128"


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(f"--{name.replace('_', '-')} must be from {low} to {high}, not {value}")


def _say(error: msgspec.ValidationError) -> str:
    """msgspec's text with the flag in front: "Expected `int`, got `str` - at `$.seed`"."""
    match = re.fullmatch(r"(.*) - at `\$\.(\w+)`", str(error))
    return f"{match[2]}: {match[1]}" if match else str(error)
