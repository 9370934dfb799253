"""``--set``: parsing, rejected values and keys, and precedence."""

import json
from pathlib import Path
from typing import Any

import pytest
from replay_workloads import workload

from quire.bench.measure.shapes import SHAPES
from quire.launch.config.options import EngineOptions
from quire.protocol.errors import ConfigError
from quire.replay.core.policies import QUIRE
from quire.replay.costs.cost import ConstantCost
from quire.replay.simulate.setting_values import parse_setting
from quire.replay.simulate.setup import INERT, Setup, make_setup, max_blocks, resolve_machine
from quire.replay.workload.workload import Call, ContentIds

CALLS = [Call(0, "a", 0.0, 300, 20), Call(1, "b", 1.0, 90, 10)]


class MachineWithMemory(ConstantCost):
    def __init__(self, kv_bytes: int) -> None:
        super().__init__(1)
        self._kv_bytes = kv_bytes

    @property
    def kv_bytes(self) -> int:
        return self._kv_bytes


def setup_of(settings: dict[str, Any] | None = None, cost: ConstantCost | None = None, **given: str) -> Setup:
    return make_setup(workload(CALLS, settings=settings or {}), given, cost)


def error_of(**given: str) -> str:
    with pytest.raises(ConfigError) as caught:
        setup_of(**given)
    return str(caught.value)


def test_defaults_are_for_a_gpu_and_the_longest_call() -> None:
    made = setup_of()
    assert (made.config.max_num_seqs, made.config.max_num_batched_tokens, made.config.block_size) == (256, 8192, 16)
    assert made.config.max_model_len == 320
    assert made.policies == QUIRE
    assert any("320, the longest call" in note for note in made.notes)
    assert made.shown["num_usable_blocks"] == made.num_usable_blocks > 10_000
    assert made.shown["model"] == "llama-3.1-8b"


@pytest.mark.parametrize(
    ("base", "changes", "blocks"),
    [
        ({}, {"block-size": "32"}, 49),
        ({}, {"block_size": "8"}, 201),
        ({}, {"kv_cache_dtype": "fp8"}, 201),
        ({}, {"tensor_parallel_size": "2"}, 100),
        ({}, {"max_num_seqs": "3"}, 100),
        ({}, {"block_size": "32", "num_usable_blocks": "100"}, 100),
        ({"num_usable_blocks": "200"}, {"block_size": "32"}, 99),
        ({"block_size": "32"}, {"block_size": "64"}, 24),
        ({"num_usable_blocks": "200"}, {"block_size": "32", "num-usable-blocks": "150"}, 150),
    ],
)
def test_a_pool_keeps_its_bytes(base: dict[str, str], changes: dict[str, str], blocks: int) -> None:
    """The trace has 100 blocks of 16 tokens, and the null block."""
    recorded = workload(CALLS, settings={"num_usable_blocks": 100, "block_size": 16})
    made = make_setup(recorded, changes, None, base)
    before = int(base.get("num_usable_blocks", 100))
    assert made.num_usable_blocks == made.shown["num_usable_blocks"] == blocks
    if "block_size" not in base and not any("num" in key for key in changes) and blocks != before:
        assert any(f"the pool keeps the memory of {before}" in note for note in made.notes)


def test_parses_settings_to_the_types_of_their_fields() -> None:
    made = setup_of(
        **{"block-size": "32", "enable_prefix_caching": "no", "watermark": "0.1", "scheduling_policy": "priority"}
    )
    assert made.config.block_size == made.layout.groups[0].block_size == 32
    assert not made.config.enable_prefix_caching
    assert made.config.watermark == 0.1
    assert made.shown["scheduling_policy"] == "priority"
    hints = {"a": int | None, "b": list[str] | None, "c": dict[str, Any] | None}
    assert parse_setting("a", "null", hints["a"]) is None
    assert parse_setting("b", "x:Y, z:W", hints["b"]) == ["x:Y", "z:W"]
    assert parse_setting("b", '["x"]', hints["b"]) == ["x"]
    assert parse_setting("c", '{"method": "ngram"}', hints["c"]) == {"method": "ngram"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"block_sizes": "16"}, "did you mean block_size?"),
        ({"page_size": "16"}, "did you mean block_size?"),
        ({"zzzzz": "1"}, "known: "),
        ({"block_size": "sixteen"}, "block_size must be a whole number"),
        ({"max_num_batched_tokens": "4kb"}, "--set max_num_batched_tokens must be a number of tokens such as"),
        ({"block_size": "0"}, "--block-size must be from 1 to 1024, not 0"),
        ({"watermark": "nan"}, "--watermark must be from 0 to 0.5"),
        ({"scheduling_policy": "lifo"}, "must be one of fcfs, priority, program, continuum"),
        ({"enable_prefix_caching": "maybe"}, "must be true or false"),
        ({"load_format": "dummy"}, "has no effect in a simulation"),
        ({"speculative_config": "{}"}, "makes no drafts"),
        ({"num_usable_blocks": "0"}, "num_usable_blocks must be between 1 and"),
        ({"num_usable_blocks": "many"}, "num_usable_blocks must be a whole number"),
        ({"num_usable_blocks": "99999999999"}, "num_usable_blocks must be between 1 and"),
        ({"num_usable_blocks": "9", "kv_cache_memory_bytes": "9"}, "both set the size of the pool"),
        ({"kv_cache_memory_bytes": "9"}, "9 bytes are too few for one KV block"),
        ({"model": "llama-3.1-9b"}, "did you mean llama-3.1-8b?"),
        ({"like": "vlm-0.19"}, "unknown engine"),
        ({"tensor_parallel_size": "7"}, "does not divide this model"),
        ({"cpu_offload_bytes": "1GiB", "enable_prefix_caching": "no"}, "--cpu-offload-bytes needs --enable-prefix"),
        ({"cpu_offload_bytes": "1GiB", "host_gb_per_s": "0"}, "host_gb_per_s must be above 0 (got 0.0)"),
        ({"cpu_offload_bytes": "1000TiB", "model": "tiny"}, "--set cpu_offload_bytes must be at most"),
        ({"engine_paces": "1,0"}, "engine_paces must be numbers from 0.01 to 100, as in 1,2.6 (got [1.0, 0.0])"),
        ({"engine_paces": "fast"}, "engine_paces must be JSON (got 'fast')"),
        ({"hiccups_per_minute": "nan"}, "hiccups_per_minute must be between 0 and 60 (got nan)"),
        ({"hiccups_per_minute": "1", "enable_expert_parallel": "yes"}, "engines step together: remove"),
    ],
)
def test_rejects_invalid_settings_with_a_hint(given: dict[str, str], words: str) -> None:
    assert words in error_of(**given)


def test_rejects_flags_without_effect() -> None:
    assert set(INERT) <= set(EngineOptions.__struct_fields__)
    for name in sorted(INERT):
        assert INERT[name] in error_of(**{name: "1"})


def test_user_settings_override_preset_then_trace_then_defaults() -> None:
    recorded = {"block_size": 8, "num_usable_blocks": 500, "max_num_seqs": 4, "seed": 3, "max_prefill_share": 0.25}
    assert setup_of(recorded).config.block_size == 8
    assert setup_of(recorded).num_usable_blocks == 500
    assert setup_of(recorded, block_size="32").config.block_size == 32
    assert setup_of(recorded, num_gpu_blocks_override="77").num_usable_blocks == 77
    assert setup_of(recorded).config.max_prefill_share == 0.25
    assert setup_of(recorded, like="vllm-0.19").config.max_prefill_share == 1.0
    assert setup_of(recorded, like="vllm-0.19", max_prefill_share="0.75").config.max_prefill_share == 0.75
    assert setup_of({"like": "vllm-0.19"} | recorded).config.max_prefill_share == 0.25
    with pytest.raises(ConfigError, match="nowhere: unknown setting 'blok_size'"):
        setup_of({"blok_size": 8})


def test_host_memory_of_any_device_and_size() -> None:
    """A block of 16 tokens of this shape has 2 MiB; a page has a header besides."""
    made = setup_of(cpu_offload_bytes="600GiB")
    assert made.tiers.page_bytes == 2**21 + 4096
    assert made.tiers.num_host_pages == 1 + 600 * 2**30 // (2**21 + 4096)
    assert made.shown["host_gb_per_s"] == 25 and made.config.cpu_offload_bytes == 600 * 2**30
    split = setup_of(cpu_offload_bytes="600GiB", tensor_parallel_size="2", host_gb_per_s="50").tiers
    assert split.page_bytes == 2**20 + 4096 and split.rates.host == 50e9
    assert split.num_host_pages == 1 + 600 * 2**30 // (2**21 + 8192)
    small = setup_of(cpu_offload_bytes="2MiB")
    assert (
        not small.tiers.num_host_pages and "cpu_offload_bytes is too small: a block takes 2101248 bytes" in small.notes
    )
    assert "host_gb_per_s" not in small.shown
    disk = setup_of(ssd_cache_bytes="1TiB", disk_read_gb_per_s="3")
    assert (disk.tiers.num_host_pages, disk.tiers.num_disk_pages) == (0, 1 + 2**40 // (2**21 + 4096))
    assert (disk.shown["disk_read_gb_per_s"], disk.shown["disk_write_gb_per_s"]) == (3, 4)


def test_sets_policies_singly_or_by_preset() -> None:
    made = setup_of(like="vllm-0.19")
    assert not made.policies.uncached_blocks_first and made.shown["like"] == "vllm-0.19"
    assert made.shown["uncached_blocks_first"] is False
    assert setup_of(like="vllm-0.19", uncached_blocks_first="true").policies.uncached_blocks_first
    assert "uncached_blocks_first" not in setup_of().shown


def test_pool_size_follows_the_machine_memory() -> None:
    block_bytes = setup_of().layout.block_bytes
    assert setup_of(cost=MachineWithMemory(block_bytes * 101)).num_usable_blocks == 100
    assert setup_of(kv_cache_memory_bytes=f"{block_bytes * 51}").num_usable_blocks == 50
    assert setup_of(kv_cache_memory_bytes="4GiB").num_usable_blocks == 2**32 // block_bytes - 1
    assert setup_of(cost=MachineWithMemory(block_bytes * 101), num_usable_blocks="7").num_usable_blocks == 7
    half = setup_of(cost=MachineWithMemory(block_bytes * 101), kv_cache_dtype="fp8")
    assert half.num_usable_blocks == 201
    assert not [note for note in half.notes if "usable" in note]
    more_ranks_than_heads = setup_of(cost=MachineWithMemory(block_bytes * 102), tensor_parallel_size="16")
    assert more_ranks_than_heads.num_usable_blocks == 50


def test_infinite_pool_holds_every_block_of_the_workload() -> None:
    calls = [Call(i, f"{i}", 0.0, 64, 33, ContentIds([0, 1, 2, 10 + i], 16)) for i in range(5)]
    # 3 shared blocks, 5 last blocks of prompts, 10 of answers, and the blocks that one call, or all, hold at a time
    assert max_blocks(calls, 16, 1) == 3 + 5 + 10 + 7
    assert max_blocks(calls, 16, 256) == 5 * 7
    assert make_setup(workload(calls), {"num_usable_blocks": "infinite"}, None).num_usable_blocks == 35


def test_finds_model_by_name_file_or_trace(tmp_path: Path) -> None:
    assert setup_of(model="tiny").config.model is SHAPES["tiny"]
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32}
    raw |= {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(raw))
    for given in (tmp_path, file):
        made = setup_of(model=str(given))
        assert made.config.model.hidden_size == 32 and made.shown["model"] == str(given)
    assert setup_of({"model": SHAPES["tiny"]}).config.model is SHAPES["tiny"]
    machine = resolve_machine(workload(CALLS), {"model": "tiny", "tensor_parallel_size": "2", "max_num_seqs": "9"})
    assert machine == (SHAPES["tiny"], 2, 0, 9)
    sharing = {"enable_expert_parallel": "true", "data_parallel_size": "3"}
    assert resolve_machine(workload(CALLS), sharing)[1:] == (1, 3, None)


def test_named_model_limits_the_length_of_calls() -> None:
    long = workload([Call(0, "a", 0.0, 5000, 20)])
    assert make_setup(long, {"model": "tiny"}, None).config.max_model_len == 2048
    assert make_setup(long, {}, None).config.max_model_len == 5020
    with pytest.raises(ConfigError, match="--max-model-len must be from 2 to 2048"):
        make_setup(long, {"model": "tiny", "max_model_len": "4096"}, None)
