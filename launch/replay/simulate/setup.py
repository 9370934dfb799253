"""What a simulated engine runs by: what the user set, what the trace says, and defaults, in this order."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec

from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.options import FOREIGN_NAMES, EngineOptions
from quire.launch.measure.shapes import SHAPES
from quire.launch.replay.core.policies import QUIRE, Policies, find_preset
from quire.launch.replay.costs.cost import CostModel
from quire.launch.replay.costs.models import find_model
from quire.launch.replay.simulate.setting_values import parse_setting
from quire.launch.replay.workload.workload import SHORT_HASH_BYTES, Call, Workload, block_names
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError, did_you_mean
from quire.protocol.model.kv_layout import KVLayout, kv_layout
from quire.protocol.model.model_config import ModelConfig

DEFAULT_MODEL = "llama-3.1-8b"
DEFAULT_KV_BYTES = 52 * 2**30
"""An 80 GiB GPU at 90 %, less an 8B model's weights and what a step needs."""
MAX_USABLE_BLOCKS = 2**26
"""Each block is an object of the simulation: more would take more than 10 GiB."""

INERT = {
    "load_format": "a simulated worker has no weights",
    "attention_backend": "the cost model decides how long attention takes",
    "enforce_eager": "the cost model decides how long a step takes",
    "deterministic": "the cost model decides how long a step takes",
    "gpu_memory_utilization": "set kv_cache_memory_bytes or num_usable_blocks",
    "prefix_caching_hash_algo": "a trace names its blocks itself",
    "speculative_config": "a simulated worker makes no drafts",
    "logits_processors": "nothing is sampled",
    "logprobs_mode": "nothing is sampled",
    "reasoning_start_str": "nothing is sampled",
    "reasoning_end_str": "nothing is sampled",
    "structured_outputs_backend": "nothing is sampled",
    "kv_events_endpoint": "nobody listens",
    "kv_events_replay_endpoint": "nobody listens",
    "seed": "nothing is drawn at random",
    "trace": "a simulation records nothing",
    "trace_prompts": "a simulation records nothing",
    "trace_max_bytes": "a simulation records nothing",
    "crash_dump_dir": "a simulation records nothing",
}
"""Flags that change nothing in a simulation, and why."""


@dataclass(frozen=True, slots=True)
class Setup:
    """``shown``: what the run goes by, as ``--set`` names it. ``notes``: what was decided for the user."""

    config: EngineConfig
    layout: KVLayout
    num_usable_blocks: int
    shown: dict[str, Any]
    notes: list[str]
    policies: Policies = QUIRE


def make_setup(workload: Workload, given: Mapping[str, str], cost: CostModel | None) -> Setup:
    """Settle every setting of the simulated engine.

    Args:
        given: ``--set`` key to its text.
        cost: tells the size of the pool where nobody says it.

    Raises:
        ConfigError: an unknown key, one that changes nothing here, a value of the wrong type or out of range.
    """
    values = _typed(given, workload)
    notes: list[str] = []
    longest = max((call.num_prompt_tokens + call.num_output_tokens for call in workload.calls), default=2)
    model, name = _model(values.pop("model", None), longest, values)
    if "max_model_len" not in values:
        values["max_model_len"] = max(min(longest, model.max_position), 2)
        notes.append(f"max_model_len is that of the longest call, {values['max_model_len']}: the trace does not tell")
    policies = dataclasses.replace(
        find_preset(values["like"]).policies if "like" in values else QUIRE,
        **{key: values.pop(key) for key in _policy_fields() if key in values},
    )
    like, usable = values.pop("like", None), values.pop("num_usable_blocks", None)
    config = make_engine_config(EngineOptions(model=name, **({"device": "cuda"} | values)), model=model)
    layout = kv_layout(model, config.block_size, config.kv_cache_dtype)
    num_usable_blocks = _num_usable_blocks(usable, config, layout, workload, cost, notes)
    shown = {
        "model": name,
        **({"like": like} if like else {}),
        **_shown(config),
        "num_usable_blocks": num_usable_blocks,
    }
    shown |= {key: value for key, value in dataclasses.asdict(policies).items() if value != getattr(QUIRE, key)}
    return Setup(config, layout, num_usable_blocks, shown, notes, policies)


def settle_model(workload: Workload, given: Mapping[str, str]) -> tuple[ModelConfig, int]:
    """The model and the number of GPUs that share it, for a cost model to go by."""
    values = _typed(given, workload)
    longest = max((call.num_prompt_tokens + call.num_output_tokens for call in workload.calls), default=2)
    return _model(values.pop("model", None), longest, values)[0], values.get("tensor_parallel_size", 1)


def _policy_fields() -> list[str]:
    return [field.name for field in dataclasses.fields(Policies)]


def _types() -> dict[str, Any]:
    types = {name: hint for name, hint in get_type_hints(EngineOptions).items() if name not in INERT}
    return types | get_type_hints(Policies) | {"like": str, "num_usable_blocks": int}


def _typed(given: Mapping[str, str], workload: Workload) -> dict[str, Any]:
    """Values of their fields' types: the user's, then those of the engine it is to be like, then the trace's."""
    types = _types()
    wanted: dict[str, Any] = {}
    for key, text in given.items():
        name = key.replace("-", "_")
        _check_key(name, types)
        wanted[name] = text if name == "num_usable_blocks" else parse_setting(name, text, types[name])
    told = {key: value for key, value in workload.settings.items() if key not in INERT}
    for key in told.keys() - types.keys():
        raise ConfigError(f"{workload.source}: setting {key!r} is not known{did_you_mean(key, types)}")
    preset = find_preset(wanted["like"]).settings if "like" in wanted else {}
    values = told | dict(preset) | wanted
    _drop_other_sizes(values, wanted)
    return values


def _drop_other_sizes(values: dict[str, Any], wanted: Mapping[str, Any]) -> None:
    """Three keys say how large the pool is. The user may say one, and the trace's others are then void."""
    sizes = ("num_usable_blocks", "num_gpu_blocks_override", "kv_cache_memory_bytes")
    said = [key for key in sizes if wanted.get(key) is not None]
    if len(said) > 1:
        raise ConfigError(f"--set {said[0]} and --set {said[1]}: both say how large the pool is")
    for key in sizes if said else ():
        if key not in said:
            values.pop(key, None)


def _check_key(name: str, types: Mapping[str, Any]) -> None:
    if name in INERT:
        raise ConfigError(f"--set {name}: it changes nothing in a simulation: {INERT[name]}")
    if name not in types:
        foreign = FOREIGN_NAMES.get(name, "").removeprefix("--").replace("-", "_")
        near = f"; did you mean {foreign}?" if foreign in types else did_you_mean(name, types)
        raise ConfigError(f"--set {name}: no such key{near or '; known: ' + ', '.join(types)}")


def _model(wanted: Any, longest: int, values: Mapping[str, Any]) -> tuple[ModelConfig, str]:
    """The model and its name. Where nobody names one, a common shape stands for it, that knows as long contexts."""
    if isinstance(wanted, ModelConfig):
        return wanted, wanted.architecture
    if wanted is None:
        shape = SHAPES[DEFAULT_MODEL]
        most = max(shape.max_position, longest, values.get("max_model_len") or 0)
        return msgspec.structs.replace(shape, max_position=most), DEFAULT_MODEL
    try:
        return find_model(wanted), str(wanted)
    except ConfigError as error:
        raise ConfigError(f"--set model={error}") from None


def _shown(config: EngineConfig) -> dict[str, Any]:
    """Of the configuration what decides a run, as ``--set`` names it."""
    names = [name for name in EngineOptions.__struct_fields__ if name in EngineConfig.__struct_fields__]
    hidden = {*INERT, "model", "device", "dtype", "kv_cache_memory_bytes"}
    return {name: getattr(config, name) for name in names if name not in hidden}


def _num_usable_blocks(
    wanted: str | int | None,
    config: EngineConfig,
    layout: KVLayout,
    workload: Workload,
    cost: CostModel | None,
    notes: list[str],
) -> int:
    if wanted == "infinite":
        return len(layout.groups) * most_blocks(workload.calls, config.block_size, config.max_num_seqs)
    if wanted is not None:
        number: int = parse_setting("num_usable_blocks", str(wanted), int)
        if not 1 <= number <= MAX_USABLE_BLOCKS:
            raise ConfigError(f"num_usable_blocks must be from 1 to {MAX_USABLE_BLOCKS}, or infinite, not {number}")
        return number
    if config.num_blocks_override:
        return min(config.num_blocks_override, MAX_USABLE_BLOCKS)
    known = config.kv_cache_memory_bytes or (cost.kv_bytes if cost is not None else 0)
    copies = max(config.tensor_parallel_size // layout.num_kv_heads, 1)  # more ranks than heads: some have the same
    number = (known or DEFAULT_KV_BYTES) // (layout.block_bytes * copies) - 1
    if number < 1:
        raise ConfigError(f"{known or DEFAULT_KV_BYTES} bytes hold no KV block of {layout.block_bytes * copies} bytes")
    if not known:
        notes.append(f"num_usable_blocks is what {DEFAULT_KV_BYTES // 2**30} GiB hold, {number}: nobody says otherwise")
    return min(number, MAX_USABLE_BLOCKS)


def most_blocks(calls: list[Call], block_size: int, max_num_seqs: int) -> int:
    """As many blocks as ``calls`` ever fill, so that nothing has to be evicted.

    Distinct contents, and as much again as the largest of them hold at a time: equal prompts that are computed side
    by side have a copy each.
    """
    contents: set[bytes] = set()
    own = 0
    for call in calls:
        names = block_names(call, block_size)
        of_prompt = call.num_prompt_tokens // block_size
        own += len(names) // SHORT_HASH_BYTES - of_prompt
        contents.update(
            names[at : at + SHORT_HASH_BYTES] for at in range(0, of_prompt * SHORT_HASH_BYTES, SHORT_HASH_BYTES)
        )
    held = sorted((-(-(c.num_prompt_tokens + c.num_output_tokens) // block_size) for c in calls), reverse=True)
    bound = len(contents) + own + sum(held[:max_num_seqs])
    return max(min(bound, sum(held), MAX_USABLE_BLOCKS), 1)
