"""Configuration of a simulated engine: the user's settings, then the trace's, then defaults."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, get_type_hints

import msgspec

from quire.bench.measure.shapes import SHAPES
from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.foreign_names import FOREIGN_NAMES, NO_EQUIVALENT
from quire.launch.config.options import EngineOptions
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError, did_you_mean
from quire.protocol.model.kv_layout import KVLayout, kv_layout
from quire.protocol.model.model_config import ModelConfig
from quire.protocol.routing import MAX_ENGINES
from quire.replay.core.policies import QUIRE, Policies, Routing, find_preset
from quire.replay.costs.copies import NO_TIERS, CopyRates, Tiers, copy_rates, page_bytes
from quire.replay.costs.cost import CostModel
from quire.replay.costs.models import find_model
from quire.replay.costs.side_clock import ADAPTER_LOAD_S, ENCODE_ROW_S
from quire.replay.costs.sizes import simulated_slots
from quire.replay.simulate.setting_values import parse_setting
from quire.replay.workload.workload import SHORT_HASH_BYTES, Call, Workload, block_names

DEFAULT_MODEL = "llama-3.1-8b"
DEFAULT_KV_BYTES = 52 * 2**30
"""90 % of an 80 GiB GPU, less the weights of an 8B model and the activations of a step."""
NOTHING: Mapping[str, str] = MappingProxyType({})
MAX_USABLE_BLOCKS = 2**26
"""Each block is a Python object of the simulation: more would take more than 10 GiB."""

NO_SAMPLING, NO_EVENTS = "a simulation does not sample", "a simulation publishes no events"
INERT = {
    "load_format": "a simulated worker has no weights",
    "gpu_memory_utilization": "set kv_cache_memory_bytes or num_usable_blocks",
    "max_lora_rank": "adapter_load_s determines the time of a load",
    "prefix_caching_hash_algo": "the trace provides the block hashes",
    "speculative_config": "a simulated worker makes no drafts",
    "chat_template": "a simulation has no text",
    "ssd_cache_dir": "a simulation writes no files",
    "kv_page_check": "pages of a simulation have no bytes",
    "seed": "a simulation samples no tokens, and its hiccups are always the same",
    "attention_backend": "the cost model determines the time of attention",
    **dict.fromkeys(("enforce_eager", "deterministic"), "the cost model determines the time of a step"),
    **dict.fromkeys(("logits_processors", "logits_processors_exclude", "logprobs_mode"), NO_SAMPLING),
    **dict.fromkeys(("reasoning_start_str", "reasoning_end_str", "generation_config"), NO_SAMPLING),
    **dict.fromkeys(("structured_outputs_backend", "structured_outputs_config"), NO_SAMPLING),
    **dict.fromkeys(("kv_events_endpoint", "kv_events_replay_endpoint", "kv_events_without_keys"), NO_EVENTS),
    **dict.fromkeys(("kv_events_format", "kv_events_topic"), NO_EVENTS),
    **dict.fromkeys(("trace", "trace_prompts", "trace_max_bytes", "crash_dump_dir"), "a simulation records no trace"),
}
"""Flags without effect in a simulation, and why."""

SIZES = ("num_usable_blocks", "num_gpu_blocks_override", "kv_cache_memory_bytes")
"""Keys of ``--set`` that determine the size of the pool."""
RATES = {"host_gb_per_s": "host", "disk_read_gb_per_s": "disk_read", "disk_write_gb_per_s": "disk_write"}
"""Keys of ``--set`` for the rates of copies, and the fields of CopyRates."""


FLEET = {
    "data_parallel_size": "num_engines",
    "routing": "routing",
    "enable_expert_parallel": "enable_expert_parallel",
    "engine_paces": "engine_paces",
    "hiccups_per_minute": "hiccups_per_minute",
}
"""Keys of ``--set`` for several engines, and the fields of Setup."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A simulated engine, or several equal ones.

    Attributes:
        shown: the settings by ``--set`` key.
        notes: defaults that the user should know.
        enable_expert_parallel: the engines share the experts of their model, and step together.
        engine_paces: the time of a step of each engine over that of the cost model, in turn; engines with equal ones
            have equal devices. Empty: all are equal.
        hiccups_per_minute: how often each engine stops for some seconds, per minute of its steps.
    """

    config: EngineConfig
    layout: KVLayout
    num_usable_blocks: int
    shown: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    policies: Policies = QUIRE
    tiers: Tiers = NO_TIERS
    adapter_load_s: float = ADAPTER_LOAD_S
    num_engines: int = 1
    routing: Routing = "cache"
    enable_expert_parallel: bool = False
    engine_paces: list[float] = field(default_factory=list)
    hiccups_per_minute: float = 0.0

    @property
    def num_slots(self) -> int:
        """Slots of recurrent states, slot 0 included; 0 for models without."""
        return simulated_slots(self.config, self.layout, self.num_usable_blocks * self.layout.block_bytes)

    def pace(self, engine: int) -> float:
        return self.engine_paces[engine % len(self.engine_paces)] if self.engine_paces else 1.0


def make_setup(
    workload: Workload, changes: Mapping[str, str], cost: CostModel | None, base: Mapping[str, str] = NOTHING
) -> Setup:
    """Resolve every setting of the simulated engine.

    A number of blocks that the trace or ``base`` gives is one of their blocks: if ``changes`` give blocks another size,
    the pool keeps its bytes.

    Args:
        changes, base: texts by ``--set`` key; ``changes`` come first.
        cost: provides the size of the pool and the rate of copies if no setting does.

    Raises:
        ConfigError: an unknown key, a key without effect, or a value of the wrong type or out of range.
    """
    values = _typed({**base, **changes}, workload)
    notes: list[str] = []
    longest = max((call.num_prompt_tokens + call.num_output_tokens for call in workload.calls), default=2)
    model, name = _model(values.pop("model", None), longest, values)
    if "max_model_len" not in values:
        values["max_model_len"] = max(min(longest, model.max_position), 2)
        notes.append(f"max_model_len is {values['max_model_len']}, the longest call: the trace does not contain it")
    policies = dataclasses.replace(
        find_preset(values["like"]).policies if "like" in values else QUIRE,
        **{key: values.pop(key) for key in _policy_fields() if key in values},
    )
    like, usable = values.pop("like", None), values.pop("num_usable_blocks", None)
    rates = {key: values.pop(key) for key in RATES if key in values}
    fleet = {name: values.pop(key) for key, name in FLEET.items() if key in values}
    adapter_load_s = values.pop("adapter_load_s", ADAPTER_LOAD_S)
    if not 0 <= adapter_load_s < float("inf"):
        raise ConfigError(f"--set adapter_load_s must be at least 0 (got {adapter_load_s})")
    options = EngineOptions(model=name, **({"device": "cuda"} | values))
    config = make_engine_config(options, model=model, simulated=True)
    if config.item_kinds and (images := sum(bool(call.items) for call in workload.calls)):
        notes.append(f"{images} calls have images: encoding one takes {ENCODE_ROW_S * 1e6:g} us for each position")
    layout = kv_layout(model, config.block_size, config.kv_cache_dtype)
    num_usable_blocks = _num_usable_blocks(usable, config, layout, workload, cost, notes)
    is_kept = changes and not any(key.replace("-", "_") in SIZES for key in changes)
    if is_kept and usable != "infinite" and (usable or config.num_blocks_override) and layout.groups:
        before = make_setup(workload, base, cost)
        sizes = [each.rank_block_bytes(config.tensor_parallel_size) for each in (before.layout, layout)]
        if sizes[0] != sizes[1]:
            num_usable_blocks = _fitting((before.num_usable_blocks + 1) * sizes[0], sizes[1])
            text = f"num_usable_blocks is {num_usable_blocks}: a block has {sizes[1] / sizes[0]:g} times the bytes"
            notes.append(f"{text}, and the pool keeps the memory of {before.num_usable_blocks}")
    tiers = _tiers(config, layout, _rates(rates, cost), notes)
    shown = {
        "model": name,
        **({"like": like} if like else {}),
        **_shown(config),
        "num_usable_blocks": num_usable_blocks,
        **_shown_rates(tiers),
        **({"adapter_load_s": adapter_load_s} if config.enable_lora else {}),
    }
    shown |= {key: value for key, value in dataclasses.asdict(policies).items() if value != getattr(QUIRE, key)}
    setup = Setup(config, layout, num_usable_blocks, shown, notes, policies, tiers, adapter_load_s, **fleet)
    if setup.num_engines > 1 or setup.engine_paces or setup.hiccups_per_minute:
        shown |= {key: getattr(setup, name) for key, name in FLEET.items()}
    return setup


class Machine(NamedTuple):
    """The engines as a cost model needs them. ``expert_parallel``: number of engines that share experts, or 0."""

    model: ModelConfig
    tensor_parallel_size: int
    expert_parallel: int
    max_num_seqs: int | None


def resolve_machine(workload: Workload, given: Mapping[str, str]) -> Machine:
    values = _typed(given, workload)
    longest = max((call.num_prompt_tokens + call.num_output_tokens for call in workload.calls), default=2)
    model, _ = _model(values.pop("model", None), longest, values)
    sharing = values.get("data_parallel_size", 1) if values.get("enable_expert_parallel") else 0
    return Machine(model, values.get("tensor_parallel_size", 1), sharing, values.get("max_num_seqs"))


def _policy_fields() -> list[str]:
    return [field.name for field in dataclasses.fields(Policies)]


def _types() -> dict[str, Any]:
    types = {
        name: hint for name, hint in get_type_hints(EngineOptions, include_extras=True).items() if name not in INERT
    }
    numbers: dict[str, Any] = {"num_usable_blocks": int, **dict.fromkeys((*RATES, "adapter_load_s"), float)}
    hints = get_type_hints(Setup)
    numbers |= {key: hints[name] for key, name in FLEET.items()}
    return types | get_type_hints(Policies) | {"like": str} | numbers


def _typed(given: Mapping[str, str], workload: Workload) -> dict[str, Any]:
    """Return typed values: the user's override those of the engine to imitate, which override the trace's."""
    types = _types()
    wanted: dict[str, Any] = {}
    for key, text in given.items():
        name = key.replace("-", "_")
        _check_key(name, types)
        wanted[name] = text if name == "num_usable_blocks" else parse_setting(name, text, types[name])
    recorded = {key: value for key, value in workload.settings.items() if key not in INERT}
    for key in recorded.keys() - types.keys():
        raise ConfigError(f"{workload.source}: unknown setting {key!r}{did_you_mean(key, types)}")
    values = _preset(recorded) | recorded | _preset(wanted) | wanted
    if not 1 <= values.get("data_parallel_size", 1) <= MAX_ENGINES:
        number = values["data_parallel_size"]
        raise ConfigError(f"--set data_parallel_size must be between 1 and {MAX_ENGINES} (got {number})")
    _drop_other_sizes(values, wanted)
    if "model" in wanted and "encoder_cache_tokens" not in wanted:  # another one may read no images
        values.pop("encoder_cache_tokens", None)
    paces, hiccups = values.get("engine_paces", []), values.get("hiccups_per_minute", 0.0)
    if not all(0.01 <= pace <= 100 for pace in paces):
        raise ConfigError(f"--set engine_paces must be numbers from 0.01 to 100, as in 1,2.6 (got {paces})")
    if not 0 <= hiccups <= 60:
        raise ConfigError(f"--set hiccups_per_minute must be between 0 and 60 (got {hiccups})")
    if (paces or hiccups) and values.get("enable_expert_parallel"):
        raise ConfigError(
            "--set enable_expert_parallel: engines step together: remove engine_paces, hiccups_per_minute"
        )
    return values


def _preset(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the engine to imitate, if ``settings`` name one."""
    if "like" not in settings:
        return {}
    preset = find_preset(settings["like"])
    return {**preset.settings, "routing": preset.routing}


def _drop_other_sizes(values: dict[str, Any], wanted: Mapping[str, Any]) -> None:
    """Remove the trace's pool sizes if the user sets one of the three keys that determine it."""
    chosen = [key for key in SIZES if wanted.get(key) is not None]
    if len(chosen) > 1:
        raise ConfigError(f"--set {chosen[0]} and --set {chosen[1]} both set the size of the pool: choose one")
    for key in SIZES if chosen else ():
        if key not in chosen:
            values.pop(key, None)


def _check_key(name: str, types: Mapping[str, Any]) -> None:
    if name in INERT:
        raise ConfigError(f"--set {name} has no effect in a simulation: {INERT[name]}")
    if name not in types:
        foreign = FOREIGN_NAMES.get(name, "").removeprefix("--").replace("-", "_")
        near = f"; did you mean {foreign}?" if foreign in types else did_you_mean(name, types)
        near = f"; {NO_EQUIVALENT[name]}" if name in NO_EQUIVALENT else near
        raise ConfigError(f"--set {name}: unknown key{near or '; known: ' + ', '.join(types)}")


def _model(wanted: Any, longest: int, values: Mapping[str, Any]) -> tuple[ModelConfig, str]:
    """Return the model and its name; by default a common shape whose context is extended to the longest call."""
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
    """Return the settings that affect a run, by ``--set`` key."""
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
    if not layout.groups:
        return 1  # which no request needs
    if wanted == "infinite":
        return len(layout.groups) * max_blocks(workload.calls, config.block_size, config.max_num_seqs)
    if wanted is not None:
        number: int = parse_setting("num_usable_blocks", str(wanted), int)
        if not 1 <= number <= MAX_USABLE_BLOCKS:
            raise ConfigError(
                f"num_usable_blocks must be between 1 and {MAX_USABLE_BLOCKS}, or infinite (got {number})"
            )
        return number
    if config.num_blocks_override:
        return min(config.num_blocks_override, MAX_USABLE_BLOCKS)
    known = config.kv_cache_memory_bytes or (cost.kv_bytes if cost is not None else 0)
    block_bytes = layout.rank_block_bytes(config.tensor_parallel_size) * config.tensor_parallel_size
    pool = known or DEFAULT_KV_BYTES
    number = _fitting(pool - simulated_slots(config, layout, pool) * layout.slot_bytes, block_bytes)
    if not known:
        notes.append(f"num_usable_blocks is {number}, the default of {DEFAULT_KV_BYTES // 2**30} GiB")
    return number


def _fitting(num_bytes: int, block_bytes: int) -> int:
    """Return the usable blocks of a pool of this size, one of whose blocks is the null block."""
    number = num_bytes // block_bytes - 1
    if number < 1:
        raise ConfigError(f"{num_bytes} bytes are too few for one KV block of {block_bytes} bytes")
    return min(number, MAX_USABLE_BLOCKS)


def _rates(given: Mapping[str, float], cost: CostModel | None) -> CopyRates:
    """Return the rates of copies: GB/s by ``--set`` key, or else those of the cost model's chip and a usual disk."""
    for key, rate in given.items():
        if not 0 < rate < float("inf"):
            raise ConfigError(f"--set {key} must be above 0 (got {rate})")
    return dataclasses.replace(copy_rates(cost), **{RATES[key]: rate * 1e9 for key, rate in given.items()})


def _tiers(config: EngineConfig, layout: KVLayout, rates: CopyRates, notes: list[str]) -> Tiers:
    ranks = config.tensor_parallel_size
    size = page_bytes(layout, ranks)
    pages = {}
    for key in ("cpu_offload_bytes", "ssd_cache_bytes"):
        wanted = getattr(config, key)
        number = wanted // (size * ranks)
        if number > MAX_USABLE_BLOCKS:
            most = MAX_USABLE_BLOCKS * size * ranks
            raise ConfigError(f"--set {key} must be at most {most}, {MAX_USABLE_BLOCKS} blocks (got {wanted})")
        if wanted and not number:
            notes.append(f"{key} is too small: a block takes {size * ranks} bytes")
        pages[key] = number + 1 if number else 0
    return Tiers(pages["cpu_offload_bytes"], size, rates, pages["ssd_cache_bytes"], ranks)


def _shown_rates(tiers: Tiers) -> dict[str, float]:
    """Return the rates of the tiers with pages, by ``--set`` key."""
    present = {"host": tiers.num_host_pages, "disk": tiers.num_disk_pages}
    return {key: getattr(tiers.rates, name) / 1e9 for key, name in RATES.items() if present[name.partition("_")[0]]}


def max_blocks(calls: list[Call], block_size: int, max_num_seqs: int) -> int:
    """Return an upper bound of the blocks that ``calls`` fill, so that no block is evicted.

    The bound is the distinct contents plus the blocks of the ``max_num_seqs`` largest calls, because equal prompts that
    are computed concurrently have a copy each.
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
