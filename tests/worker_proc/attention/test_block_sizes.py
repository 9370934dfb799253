"""Blocks of the pool that differ from those of the attention kernels: smaller kernel blocks, and larger ones."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_flash_attn
import pytest
import torch
from inprocess import InProcessEngine
from tiers import thinned

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import KVGroup, KVLayout
from quire.protocol.model.model_config import ModelConfig
from quire.worker_proc.attention import cpu
from quire.worker_proc.attention.backend import AttentionBackend
from quire.worker_proc.attention.choose import fit_block_size
from quire.worker_proc.attention.cpu import CpuBackend
from quire.worker_proc.attention.flash_attn_backend import FlashAttn2, FlashAttn3, FlashAttnBackend
from quire.worker_proc.attention.supports import Supports
from quire.worker_proc.batch.kv_cache import kernel_block_size
from quire.worker_proc.device.device import ComputeDtypes
from quire.worker_proc.models.ops import TorchOps
from quire.worker_proc.startup import setup

Factory = Callable[..., tuple[Path, Any]]
NEW_TOKENS = 10


def engine_tokens(folder: Path, **settings: Any) -> tuple[InProcessEngine, list[list[int]]]:
    """Return the engine and its greedy tokens for prompts with common prefixes, then for one of them again."""
    rng = random.Random(2)
    start = [rng.randrange(97) for _ in range(70)]
    engine = InProcessEngine(folder, max_model_len=128, max_num_seqs=4, **settings)
    for index, length in enumerate((3, 17, 40, 40, 70, 90)):
        tail = [rng.randrange(97) for _ in range(length)]
        engine.add(str(index), (start[: length - 5] + tail)[:length], max_tokens=NEW_TOKENS)
    tokens = [answer.tokens for answer in engine.run().values()]
    engine.add("again", start[:65] + tail[:25], max_tokens=NEW_TOKENS)
    again = engine.run()["again"]
    assert again.num_cached_tokens == 64 // engine.scheduler.kv.block_size * engine.scheduler.kv.block_size
    return engine, [*tokens, again.tokens]


# ---- kernel blocks smaller than the pool's


@pytest.mark.parametrize("family", thinned(["gemma2", "llama"], keep=1))
def test_tokens_do_not_depend_on_the_kernels_blocks(
    family: str, checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = checkpoint_factory(family)
    _, expected = engine_tokens(folder, block_size=16)
    for kernel, settings in {
        8: {"block_size": 32},
        16: {"block_size": 64, "async_scheduling": False},
        4: {"block_size": 16, "num_blocks_override": 24, "long_prefill_token_threshold": 7},  # tight
    }.items():
        monkeypatch.setattr(cpu, "NATIVE", Supports(block_sizes=(kernel,)))
        monkeypatch.setattr(cpu, "TORCH", Supports(block_sizes=(kernel,)))
        engine, found = engine_tokens(folder, **settings)
        assert found == expected, kernel
        for table in engine.runner.tables.tables:
            assert table.block_size == kernel and table.ratio == settings["block_size"] // kernel
        assert {cache.shape[3] for cache in engine.runner.forward.kv_caches} == {kernel}


@pytest.mark.full
def test_torch_operators_on_a_cpu_divide_large_blocks(
    checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = checkpoint_factory("llama")
    _, expected = engine_tokens(folder, block_size=16)
    monkeypatch.setattr(cpu, "find_native", lambda: "no compiler")
    engine, found = engine_tokens(folder, block_size=64)
    assert found == expected
    assert [(table.block_size, table.ratio) for table in engine.runner.tables.tables] == [(32, 2)]


def test_draft_model_with_smaller_kernel_blocks(checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = checkpoint_factory("llama")
    _, expected = engine_tokens(folder, block_size=16)
    monkeypatch.setattr(cpu, "NATIVE", Supports(block_sizes=(8,)))
    monkeypatch.setattr(cpu, "TORCH", Supports(block_sizes=(8,)))
    config = InProcessEngine(folder).config
    own = {"method": "draft_model", "model": config.model, "model_path": str(folder)}
    engine, found = engine_tokens(folder, block_size=32, num_speculative_tokens=2, speculative=own)
    assert found == expected
    statistics = engine.statistics()
    assert statistics.num_accepted_tokens > statistics.num_draft_tokens * 0.9 > 0  # a draft model equal to the model


# ---- kernel blocks larger than the pool's


def flash_attn_engine(
    library: FlashAttn2 | FlashAttn3, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[InProcessEngine, list[list[int]]]:
    """Run the engine on a CPU with the fake of a GPU's library."""
    backend = FlashAttnBackend(library)
    backend.needs_host_lengths = True  # steps without Triton kernels
    with monkeypatch.context() as patched:
        patched.setattr(setup, "pick_backend", lambda *_, **__: backend)
        patched.setattr(setup, "pick_ops", lambda *_: TorchOps())
        patched.setattr(setup, "_compute_dtypes", lambda *_: ComputeDtypes(torch.float16, torch.float16))
        return engine_tokens(folder, block_size=16, kv_cache_dtype="float16", dtype="float16", num_blocks_override=40)


def test_pool_gets_the_blocks_that_flash_attn_2_reads(
    checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = checkpoint_factory("gemma2")
    fake_flash_attn.install(monkeypatch)
    _, expected = flash_attn_engine(FlashAttn3(), folder, monkeypatch)
    engine, found = flash_attn_engine(FlashAttn2(), folder, monkeypatch)
    assert found == expected
    assert engine.scheduler.kv.block_size == 256


# ---- the choice


def config_of(block_size: int) -> EngineConfig:
    model = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=8,
    )  # fmt: skip
    return EngineConfig(model=model, model_path="", max_model_len=128, block_size=block_size)


def layout_of(block_size: int) -> KVLayout:
    return KVLayout([KVGroup("full_attention", block_size, [0])], num_kv_heads=1, head_dim=8, dtype="float16")


def backend_with(**sizes: Any) -> AttentionBackend:
    backend = CpuBackend(native=False)
    backend.supports = Supports(**sizes)
    return backend


@pytest.mark.parametrize(
    ("supported", "block_size", "fitting"),
    [
        ({}, 16, 16),
        ({}, 17, 17),
        ({"block_multiple": 256}, 16, 256),
        ({"block_multiple": 256}, 300, 512),
        ({"block_multiple": 256}, 512, 512),
        ({"block_sizes": (64, 16), "block_multiple": 0}, 24, 32),
        ({"block_sizes": (64, 16), "block_multiple": 0}, 8, 16),
    ],
    ids=str,
)
def test_next_size_that_the_kernels_read(
    supported: dict[str, Any], block_size: int, fitting: int, caplog: pytest.LogCaptureFixture
) -> None:
    backend = backend_with(**supported)
    assert fit_block_size(config_of(block_size), layout_of(block_size), [backend]) == fitting
    lines = [record.message for record in caplog.records]
    if fitting == block_size:
        assert not lines
    else:
        assert len(lines) == 1 and f"wanted={block_size} block_size={fitting}" in lines[0]
        assert "multiples of" in lines[0]


def test_size_that_suits_a_model_and_its_draft_model() -> None:
    backends = [backend_with(block_multiple=48), backend_with(block_sizes=(32,), block_multiple=0)]
    assert fit_block_size(config_of(16), layout_of(16), backends) == 96


def test_size_that_no_kernel_reads_is_an_error() -> None:
    with pytest.raises(ConfigError) as error:
        fit_block_size(config_of(1010), layout_of(1010), [backend_with(block_sizes=(96, 48), block_multiple=0)])
    assert str(error.value) == (
        "--block-size 1010: the attention kernels read blocks of multiples of 96 or multiples of 48 tokens (cpu), and "
        "none of these sizes is between 1010 and 1024: lower --block-size"
    )
    with pytest.raises(ValueError, match="the kernels of cpu cannot read blocks of 16 tokens"):
        kernel_block_size(16, backend_with(block_multiple=256))


def test_kernel_block_of_a_pools_block() -> None:
    either = Supports(block_sizes=(32, 16))
    assert [either.kernel_block_size(size) for size in (16, 32, 48, 64, 1000)] == [16, 32, 16, 32, 1000]
    assert [Supports(block_multiple=256).kernel_block_size(size) for size in (16, 256, 768)] == [None, 256, 768]
