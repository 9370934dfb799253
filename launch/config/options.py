"""The engine's settings as a user gives them: as flags, in config files and as keywords of ``LLM(...)``."""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from quire.launch.config.declared import convert
from quire.launch.config.foreign_names import suggest
from quire.launch.config.sampling_options import processor_name
from quire.protocol.errors import ConfigError
from quire.protocol.settings import MEMORY, MODEL, SAMPLING, SCHEDULING, TRACES, VECTORS_ONLY, EngineSettings, Setting

DEFAULT_ENCODER_CACHE = 16384
"""Rows: four images of the largest usual size."""


class EngineOptions(EngineSettings, frozen=True, kw_only=True):
    """All settings of the engine. Those declared here are resolved before the engine starts; None: not given."""

    model: Annotated[
        str | None,
        Setting(
            MODEL,
            "checkpoint folder in Hugging Face's format, or a Hugging Face id. An id needs the extra `hub`",
            default="the demo model",
        ),
    ] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Setting(MODEL, "device to run on; auto: a GPU if a driver is found")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Setting(
            MODEL,
            "data type of weights and activations; auto: the checkpoint's. On a CPU without bfloat16 instructions, "
            "weights keep their type and all else is float32; without a C++ compiler everything is float32. The "
            "worker logs the types in use",
        ),
    ] = "auto"
    model_impl: Annotated[
        Literal["auto", "native", "transformers"],
        Setting(
            MODEL,
            "what computes the model: Quire's own code (native) or a class of transformers, which needs the extra "
            "`transformers` ([models](models.md#models-of-transformers)); auto: native where there is code for the "
            "model, which is faster",
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "fp8", "int4"],
        Setting(
            MODEL,
            "format to which linear layers of a 16-bit or 32-bit checkpoint are rounded when it is loaded: int8 and "
            "fp8 with a scale per output, int4 with one per 32 inputs. A quantised checkpoint needs no flag",
        ),
    ] = "none"
    round_activations: Annotated[
        bool,
        Setting(
            MODEL,
            "round activations to int8 or fp8 where the checkpoint's quantization does, as its maker computes. Off: "
            "results are closer to the unquantised model's",
        ),
    ] = True
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"],
        Setting(
            MODEL,
            "data type of the KV cache; auto: that of the weights, or fp8 if the checkpoint has a scheme for it; fp8: "
            "fp8_e4m3. The fp8 types fit twice as many tokens as 16-bit types, with less precision",
        ),
    ] = "auto"

    pooling: Annotated[
        Literal["auto", "none", "last", "mean", "cls"],
        Setting(
            MODEL,
            "how hidden states become vectors ([pooling](pooling.md)); auto: as the checkpoint's files say; none: the "
            "server has no pooling; last, mean, cls: from the last token, the mean of all, or the first token, also "
            "for a model that was made to generate text",
        ),
    ] = "auto"
    chat_template: Annotated[
        str | None,
        Setting(
            MODEL,
            "chat template that replaces the checkpoint's: a file, or the template's text. A template is code in "
            "Jinja; it is rendered in a process with limits on its time and memory",
            metavar="TEMPLATE",
            default="the checkpoint's",
        ),
    ] = None

    max_model_len: Annotated[
        int | None,
        Setting(
            MEMORY,
            "context length: maximum number of tokens of a request, prompt and answer",
            default="the model's",
            unit="tokens",
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None, Setting(MEMORY, "maximum number of requests per step", default="256; 64 on a CPU")
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Setting(
            MEMORY,
            "token budget: maximum number of tokens per step",
            default="8192; 2048 on a CPU",
            unit="tokens",
        ),
    ] = None
    encoder_cache_tokens: Annotated[
        int | None,
        Setting(
            MEMORY,
            "rows of images and of given embeddings that the encoder cache holds, so that an image of several requests "
            "or turns is encoded once; no image may have more. 0: the server takes text only",
            range=(0, 2**24),
            unit="tokens",
            default=f"{DEFAULT_ENCODER_CACHE} for a model that reads images, and with --enable-prompt-embeds",
        ),
    ] = None
    num_gpu_blocks_override: Annotated[
        int | None,
        Setting(
            MEMORY, "number of KV blocks, not counting the null block", range=(1, 2**31 - 2), default="as many as fit"
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        int | None,
        Setting(
            MEMORY,
            "size of the KV cache in bytes, per worker. On a CPU, memory is used only as blocks fill: "
            "[size of the pool](kv_cache.md#size-of-the-pool)",
            range=(1, 2**50),
            unit="bytes",
            default="from --gpu-memory-utilization; on a CPU half of the free memory",
        ),
    ] = None

    priority_range: Annotated[
        str | None,
        Setting(
            SCHEDULING,
            "priorities that requests may have; others get 403. By default, a client with an API key may lower the "
            "priority of its requests, but not raise it",
            metavar="LOW:HIGH",
            default="any; with API keys 0:2147483647",
        ),
    ] = None

    generation_config: Annotated[
        str,
        Setting(
            SAMPLING,
            "source of default sampling parameters: auto (the checkpoint's generation_config.json), vllm (none) or a "
            "folder. They apply to requests that leave out `temperature`, `top_k`, `top_p`, `min_p`, "
            "`repetition_penalty`, or in chats `max_tokens`: [defaults](sampling.md#defaults-of-the-model)",
            metavar="SOURCE",
        ),
    ] = "auto"
    structured_outputs_config: Annotated[
        dict[str, Any] | None,
        Setting(
            SAMPLING,
            'how JSON schemas are read. `{"disable_additional_properties": false}`: an object may have properties that '
            "its schema does not name, as JSON Schema says. By default it may not, unless the schema has "
            "`additionalProperties`: [closed objects](sampling.md#closed-objects)",
        ),
    ] = None
    speculative_config: Annotated[
        dict[str, Any] | None,
        Setting(
            SAMPLING,
            "speculative decoding: method, num_speculative_tokens and other keys. A mapping in YAML and Python: "
            "[speculative decoding](sampling.md#speculative-decoding)",
            not_with=(VECTORS_ONLY,),
        ),
    ] = None
    logits_processors: Annotated[
        list[str] | None,
        Setting(
            SAMPLING,
            "one or more logits processors to load. In Python they may be classes: [logits "
            "processors](sampling.md#logits-processors). The current directory is searched only if `PYTHONPATH` "
            "contains it",
            metavar="MODULE:CLASS",
        ),
    ] = None
    logits_processors_exclude: Annotated[
        list[str] | None,
        Setting(
            SAMPLING,
            "installed logits processors (entry points) that are not loaded, by name",
            metavar="NAME",
        ),
    ] = None
    reasoning_start_str: Annotated[
        str | None,
        Setting(
            SAMPLING,
            "text that starts thinking; empty, together with an empty --reasoning-end-str: no thinking",
            metavar="TEXT",
            default="<think> if the tokenizer has both markers as single tokens",
        ),
    ] = None
    reasoning_end_str: Annotated[
        str | None, Setting(SAMPLING, "text that ends thinking", metavar="TEXT", default="</think> likewise")
    ] = None

    trace: Annotated[
        str | None,
        Setting(
            TRACES,
            "file to record the scheduler's inputs and decisions in; .zst: compressed. For `quire replay`: "
            "[traces](traces.md). `.zst` needs the extra `trace`. An existing file is overwritten",
            metavar="FILE",
        ),
    ] = None
    crash_dump_dir: Annotated[
        str | None,
        Setting(
            TRACES,
            "folder for crash dumps, the last events before a failure; empty: none. A dump is a trace without "
            "prompts; with `--trace` it is written beside that file. SIGUSR2 to the scheduler writes one at once",
            metavar="DIR",
            default="quire/crash-dumps in $XDG_STATE_HOME or ~/.local/state",
        ),
    ] = None


def parse_options(given: Mapping[str, Any], where: str) -> EngineOptions:
    """Return EngineOptions from keywords or a config file. Dashes and underscores in keys are equivalent.

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
    return convert(values, EngineOptions, where)


def _plain(name: str, value: Any) -> Any:
    """Convert a path, a class or a JSON text to the type that the field is declared with."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if name == "logits_processors" and isinstance(value, list | tuple):
        return [processor_name(each) for each in value]
    if name in ("speculative_config", "structured_outputs_config") and isinstance(value, str):
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} must be a JSON object, not {value[:64]!r}") from None
    return value
