"""The memory plan: its numbers, its warning, and its error before any weight is read."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import StateTensor, kv_layout
from quire.protocol.model.latent_config import LatentConfig
from quire.protocol.model.model_config import ModelConfig
from quire.protocol.process import host_limits
from quire.protocol.wire.worker_messages import MemoryPlan
from quire.worker_proc.startup import memory
from quire.worker_proc.startup.memory import log_plan, plan_memory

MIB = 2**20
CPU = torch.device("cpu")
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
)
CONFIG = EngineConfig(model=MODEL, model_path="", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64)
LAYOUT = kv_layout(MODEL, 16, "float32")
BLOCK = 2 * 2 * 8 * 4 * 16 * 4  # K and V, heads, head_dim, bytes, tokens, layers


@pytest.fixture(autouse=True)
def _a_machine_of_four_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimpleNamespace(total=4096 * MIB, available=3000 * MIB)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(host_limits, "SELF", Path("/nonexistent"))


def plan(weights: int = 10 * MIB, **settings: Any) -> MemoryPlan:
    return plan_memory(msgspec.structs.replace(CONFIG, **settings), LAYOUT, weights, CPU)


def test_cpu_pool_of_a_small_context_is_one_gib() -> None:
    made = plan()
    assert LAYOUT.block_bytes == BLOCK
    assert (made.device, made.total, made.weights, made.block_size) == ("cpu", 4096 * MIB, 10 * MIB, 16)
    assert made.num_blocks == 1024 * MIB // BLOCK and made.kv_cache == made.num_blocks * BLOCK


def test_expanded_prompts_over_latents_are_reserved_on_a_cpu() -> None:
    """Of each head 100 numbers, of which 80 are projected from 32 in 4 layers; a scratch for 2**20 tokens of a head."""
    latent = LatentConfig(rank=32, rope_dim=20, nope_dim=30, value_dim=50)
    model = msgspec.structs.replace(MODEL, latent=latent, dtype="float32")
    sizes: dict[str, Any] = {"model": model, "dtype": "float32", "max_model_len": 2**20, "num_blocks_override": 8}
    added = plan(**sizes).activations - plan(**sizes, deterministic=True).activations
    assert added == 4 * (4 * 8 * 80 * 32 + (2**20 + 2 * 2048) * 100)


def test_engines_on_a_cpu_divide_the_default_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimpleNamespace(total=40000 * MIB, available=32000 * MIB)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: machine)
    long: dict[str, Any] = {"max_model_len": 2**17, "max_num_seqs": 256}
    one, four = plan(**long), plan(**long, data_parallel_size=4)
    assert abs(one.kv_cache - four.kv_cache - (32000 - 8000) * MIB // 2) < 2 * BLOCK
    fixed = plan(kv_cache_memory_bytes=10000 * MIB, data_parallel_size=4)
    assert fixed.kv_cache == 10000 * MIB // BLOCK * BLOCK


def test_slots_of_adapters_are_reserved_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    config = msgspec.structs.replace(CONFIG, enable_lora=True, max_loras=3)
    assert plan_memory(config, LAYOUT, 10 * MIB, CPU, adapter_bytes=5 * MIB) == plan()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 * MIB, 1000 * MIB))
    device = torch.device("cuda")
    without, with_slots = (plan_memory(config, LAYOUT, 10 * MIB, device, 0, size) for size in (0, 5 * MIB))
    assert (without.adapters, with_slots.adapters) == (0, 20 * MIB)
    assert without.kv_cache - with_slots.kv_cache == 20 * MIB // BLOCK * BLOCK
    named = r"LoRA adapters 4000 MiB \(lower --max-loras or --max-lora-rank\), KV cache"
    with pytest.raises(ConfigError, match=named):
        plan_memory(config, LAYOUT, 10 * MIB, device, 0, 1000 * MIB)


def test_pool_shrinks_to_the_memory_left_by_weights_and_activations() -> None:
    made = plan(weights=2500 * MIB)
    left = 3000 * MIB - 2500 * MIB - made.activations
    assert made.num_blocks == left // BLOCK and made.kv_cache <= left


def test_cpu_pool_is_half_of_what_is_left() -> None:
    made = plan(max_model_len=1_000_000)
    left = 3000 * MIB - 10 * MIB - made.activations
    assert made.num_blocks == int(left * 0.5) // BLOCK
    rank = plan(max_model_len=1_000_000, tensor_parallel_size=2)
    assert rank.num_blocks == 1024 * MIB // BLOCK, "half of its part is less than 1 GiB"


def test_memory_of_cached_blocks_outside_the_pool_is_not_for_the_pool() -> None:
    made = plan(max_model_len=1_000_000, cpu_offload_bytes=600 * MIB)
    left = 3000 * MIB - 10 * MIB - made.activations - 600 * MIB
    assert made.num_blocks == int(left * 0.5) // BLOCK


def test_cpu_pool_is_at_most_twice_what_all_requests_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CPU_LEAST", 0)
    assert plan().num_blocks == 2 * 4 * 256 // 16


def test_bytes_and_blocks_can_be_set() -> None:
    assert plan(kv_cache_memory_bytes=10 * BLOCK + 5).num_blocks == 10
    assert plan(num_blocks_override=10).num_blocks == 11, "the null block is added"
    assert plan(num_blocks_override=7, kv_cache_memory_bytes=100 * BLOCK).num_blocks == 8


STATES = msgspec.structs.replace(LAYOUT, states=[StateTensor("0", "recurrent 0", (MIB // 4 - 1,), "float32")])
"""Slots of a MiB."""


def plan_states(**settings: Any) -> MemoryPlan:
    return plan_memory(msgspec.structs.replace(CONFIG, **settings), STATES, 10 * MIB, CPU)


@pytest.mark.parametrize(
    "settings, slots, blocks",
    [
        ({"kv_cache_memory_bytes": 65 * MIB}, 13, 51 * MIB // BLOCK),
        ({"kv_cache_memory_bytes": 13 * MIB}, 8, 4 * MIB // BLOCK),  # two for each of four requests
        ({"kv_cache_memory_bytes": 8 * MIB}, 5, 2 * MIB // BLOCK),  # a quarter stays for blocks
        ({"kv_cache_memory_bytes": 2 * MIB + 2 * BLOCK}, 1, 2),
        ({"num_blocks_override": 64}, 8, 65),
        ({"num_blocks_override": 12800}, 20, 12801),
        ({"num_blocks_override": 64, "state_slots": 3}, 3, 65),
        ({"kv_cache_memory_bytes": 65 * MIB, "state_slots": 3}, 3, 61 * MIB // BLOCK),
        ({"kv_cache_memory_bytes": 78 * MIB, "num_speculative_tokens": 3}, 15, 50 * MIB // BLOCK),
        ({"kv_cache_memory_bytes": 28 * MIB, "num_speculative_tokens": 3}, 8, 7 * MIB // BLOCK),
        ({"kv_cache_memory_bytes": 12 * MIB, "num_speculative_tokens": 3}, 2, 3 * MIB // BLOCK),
    ],
)
def test_slots_of_states_are_a_part_of_the_pool(settings: dict[str, Any], slots: int, blocks: int) -> None:
    """Besides, there are slot 0, and as many as drafts of a step, in which no more requests run than have slots."""
    made = plan_states(**settings)
    drafts = min(4, slots) * settings.get("num_speculative_tokens", 0)
    assert (made.num_slots - 1, made.num_blocks, made.states) == (slots, blocks, (slots + 1 + drafts) * MIB)
    assert made.kv_cache == blocks * BLOCK and plan().states == plan().num_slots == 0


@pytest.mark.parametrize("settings", [{"kv_cache_memory_bytes": 2 * MIB + BLOCK}, {"state_slots": 10**6}])
def test_less_memory_than_a_slot_and_a_block_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"recurrent states \d+ MiB \(lower --state-slots or --max-num-seqs\)"):
        plan_states(**settings)


def test_activations_cover_logits_and_mlp() -> None:
    """Logits of all rows, or the MLP of all tokens."""
    assert plan(max_num_seqs=64).activations >= 64 * 1000 * 4
    assert plan(max_num_batched_tokens=8192).activations >= 8192 * 2 * 128 * 4


@pytest.mark.parametrize(
    "settings",
    [
        {"weights": 2999 * MIB + MIB // 2, "max_num_batched_tokens": 8192},
        {"weights": 5000 * MIB},
        {"kv_cache_memory_bytes": 3000 * MIB},
        {"kv_cache_memory_bytes": BLOCK},
        {"num_blocks_override": 10**6},
    ],
)
def test_error_has_the_numbers_if_memory_does_not_suffice(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(**settings)
    text = str(caught.value)
    assert "memory does not suffice: weights" in text and "3000 MiB are usable" in text
    assert "--kv-cache-memory-bytes" in text and "\n" not in text


def test_plan_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "quire"):
        log_plan(plan(num_blocks_override=32), 256)
    (record,) = caplog.records
    assert "memory plan device=cpu weights_mib=10 " in record.message
    assert record.message.endswith("num_blocks=32 block_size=16")


@pytest.mark.parametrize(("blocks", "warned"), [(15, True), (16, False), (17, False)])
def test_warns_if_the_pool_is_smaller_than_the_context(
    blocks: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "quire"):
        log_plan(plan(num_blocks_override=blocks), 256)
    assert len(caplog.records) == warned
    if warned:
        assert "finish reason length tokens=240 max_model_len=256" in caplog.text


def test_gpu_pool_is_the_remaining_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.torch.cuda, "mem_get_info", lambda device: (900 * MIB, 1000 * MIB))
    made = plan_memory(CONFIG, LAYOUT, 300 * MIB, torch.device("cuda", 0))
    # 90 % of the memory, less the memory in use, weights and activations.
    assert made.num_blocks == (900 * MIB - 100 * MIB - 300 * MIB - made.activations) // BLOCK
