"""Scales of an fp8 KV cache: names and shapes in checkpoints, parts of ranks, and calculation at start."""

import json
import logging
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from cpu_attention_cases import Ask, make_batch
from dense_attention import DenseBackend
from kv_scale_checkpoints import SCHEME, declare, enlarge_keys, make_scaled
from thread_ranks import ThreadRank, on_ranks
from tiers import thinned

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.model_config import load_model_config
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.model import Inputs
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.startup import kv_scales
from quire.worker_proc.startup.kv_scales import KVScales, calculate_kv_scales, checkpoint_kv_scales, set_kv_scales
from quire.worker_proc.startup.loader import load_weights
from quire.worker_proc.startup.setup import make_runner

FP8 = "float8_e4m3fn"
ONE = torch.ones(())


def pair(key: str, value: str, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return scales of both layers; those of layer 1 are twice as large."""
    return {f"{n}.self_attn.{key}": a * (n + 1) for n in (0, 1)} | {
        f"{n}.self_attn.{value}": b * (n + 1) for n in (0, 1)
    }


def config_of(folder: Path, **settings: Any) -> EngineConfig:
    model = load_model_config(folder)
    return EngineConfig(model=model, model_path=str(folder), max_model_len=64, kv_cache_dtype=FP8, **settings)


def read(folder: Path) -> KVScales | None:
    return checkpoint_kv_scales(config_of(folder), FP8)


def load(folder: Path, rank: Any = None) -> Decoder:
    model = build_model(load_model_config(folder), torch.float32, "cpu", parallel=rank)
    load_weights(model, folder, torch.float32, progress=False)
    return model


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 1, 1)], ids=str)
def test_names_and_shapes(key: str, value: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    a, b = torch.full(shape, 0.5), torch.full(shape, 3.0)
    a.view(-1)[-1] = 0.25
    make_scaled(tmp_path, pair(key, value, a.bfloat16(), b) | {"0.self_attn.q_scale": ONE})
    scales = read(tmp_path)
    assert scales is not None and list(scales) == [0, 1]
    for layer in (0, 1):
        torch.testing.assert_close(scales[layer], (a.view(-1) * (layer + 1), b.view(-1) * (layer + 1)))
    load(tmp_path)


def test_one_tensor_for_keys_and_values(tmp_path: Path) -> None:
    make_scaled(tmp_path, {"0.self_attn.kv_scale": ONE * 2, "1.self_attn.attn.kv_scale": ONE * 3})
    assert read(tmp_path) == {0: (ONE * 2, ONE * 2), 1: (ONE * 3, ONE * 3)}


def test_layer_that_reads_an_earlier_layers_cache_has_its_scales(tmp_path: Path) -> None:
    scales = {f"{n}.self_attn.{half}_scale": ONE * (n + 1) for n in (0, 1, 2) for half in "kv"}
    folder = make_scaled(tmp_path, scales, num_hidden_layers=3)
    declare_field(folder, num_kv_shared_layers=1)
    found = read(folder)
    assert found is not None and list(found) == [0, 1]
    model = load(folder)
    model.set_kv_scales(found)
    assert [float(spec.k_scale[0]) for spec in specs(model)] == [1, 2, 2]


def declare_field(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def specs(model: Decoder) -> list[Any]:
    return [layer.attention.spec for layer in model.layers]  # type: ignore[union-attr]


@pytest.mark.parametrize(("size", "expected"), [(1, [[1, 2]]), (2, [[1], [2]]), (4, [[1], [1], [2], [2]])])
def test_scales_per_head_follow_the_heads_of_the_rank(size: int, expected: list[list[float]], tmp_path: Path) -> None:
    make_scaled(tmp_path, pair("k_scale", "v_scale", torch.tensor([1.0, 2.0]), ONE * 5))
    found = read(tmp_path)
    assert found is not None
    for rank, own in enumerate(expected):
        model = load(tmp_path, ThreadRank(rank, [None] * size, threading.Barrier(1)))
        model.set_kv_scales(found)
        assert specs(model)[0].k_scale.tolist() == own
        assert specs(model)[0].v_scale.tolist() == [5] * len(own)


BAD = {
    "zero": (ONE * 0, "a scale must be positive and finite (got 0.0)"),
    "negative": (torch.tensor([1.0, -2.0]), "a scale must be positive and finite (got -2.0)"),
    "infinite": (ONE * float("inf"), "a scale must be positive and finite (got inf)"),
    "NaN": (torch.tensor([float("nan")]), "a scale must be positive and finite (got nan)"),
    "of another number of heads": (
        torch.ones(3),
        "has shape [3]; supported: [] and [1] for all heads, [2] and [2, 1, 1] per head",
    ),
    "of a head's size": (torch.ones(2, 8), "has shape [2, 8]; supported: []"),
    "empty": (torch.ones(0), "has shape [0]; supported: []"),
}


@pytest.mark.parametrize("bad", BAD)
def test_invalid_scale_is_refused(bad: str, tmp_path: Path) -> None:
    scale, message = BAD[bad]
    make_scaled(tmp_path, pair("k_scale", "v_scale", ONE, ONE) | {"1.self_attn.v_scale": scale})
    with pytest.raises(ConfigError) as raised:
        read(tmp_path)
    assert f"model.safetensors: tensor model.layers.1.self_attn.v_scale{' ' if 'shape' in message else ': '}" in str(
        raised.value
    )
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_missing_and_duplicate_scales_are_refused(tmp_path: Path) -> None:
    scales = pair("k_scale", "v_scale", ONE, ONE)
    make_scaled(
        tmp_path / "few", {name: scale for name, scale in scales.items() if not name.startswith("1.self_attn.v")}
    )
    with pytest.raises(ConfigError, match=r"tensor model\.layers\.1\.self_attn\.v_scale is missing, but other layers"):
        read(tmp_path / "few")
    make_scaled(tmp_path / "many", scales | {"0.self_attn.kv_scale": ONE})
    with pytest.raises(ConfigError, match="are both the scale of the same layer's KV cache"):
        read(tmp_path / "many")


def test_scales_of_a_cache_that_is_not_fp8_are_not_read(tmp_path: Path) -> None:
    make_scaled(tmp_path, pair("k_scale", "v_scale", ONE * 0, ONE))
    assert checkpoint_kv_scales(config_of(tmp_path), "float32") is None


def test_scales_per_head_need_a_backend_that_has_them(tmp_path: Path) -> None:
    per_head = {0: (torch.tensor([1.0, 2.0]), torch.ones(1))}
    assert kv_scales.have_head_scales(per_head)
    assert not kv_scales.have_head_scales({0: (torch.ones(2), torch.ones(1))}) and not kv_scales.have_head_scales(None)


@pytest.mark.parametrize("family", thinned(["llama", "gemma3", "gpt_oss", "qwen3_moe"], keep=2))
def test_calculated_scales_leave_room_for_the_largest_key_and_value(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, family)
    model = load(tmp_path)
    seen: list[tuple[float, float]] = []
    power_of_two = kv_scales._power_of_two

    def recorded(number: float) -> float:
        seen.append((number, power_of_two(number)))
        return seen[-1][1]

    monkeypatch.setattr(kv_scales, "_power_of_two", recorded)
    scales = calculate_kv_scales(model, torch.float8_e4m3fn, 64)
    assert len(seen) == 2 * len(scales) == 2 * model.config.num_layers
    for number, scale in seen:
        assert 0 < number <= scale < 2 * number and torch.tensor(scale).frexp().mantissa == 0.5


def test_calculated_scales_are_the_same_again_and_on_every_rank(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    enlarge_keys(tmp_path, 300.0)
    wanted = calculate_kv_scales(load(tmp_path), torch.float8_e4m3fn, 64)
    assert float(wanted[0][0]) > 1
    assert calculate_kv_scales(load(tmp_path), torch.float8_e4m3fn, 64) == wanted
    for size in (2, 4):
        every = on_ranks(size, lambda rank: calculate_kv_scales(load(tmp_path, rank), torch.float8_e4m3fn, 64))
        assert every == [wanted] * size


@pytest.mark.parametrize(("family", "chunk"), thinned([("gemma2", 0), ("gpt_oss", 0), ("qwen3", 24)], keep=1))
def test_calibration_computes_what_the_engine_computes(family: str, chunk: int, tmp_path: Path) -> None:
    """Windows, chunks, sinks and soft caps; keys of the last layer depend on attention in all others."""
    make_checkpoint(tmp_path, family)
    model, dense = load(tmp_path), DenseBackend()
    model.config = msgspec.structs.replace(model.config, chunks=[chunk] * model.config.num_layers)
    shape = (kv_scales.CALIBRATION_ROWS, 64)
    rows = torch.from_numpy(np.random.default_rng(0).integers(model.config.vocab_size, size=shape))
    table = torch.ones(1, 1, dtype=torch.int32)
    largest = torch.zeros(model.config.num_layers, 2)
    for tokens in rows:
        caches = [
            torch.zeros(dense.kv_cache_shape(2, 64, model.attention_shape(0).num_kv_heads, model.config.head_dim))
            for _ in model.layers
        ]
        batches = [
            make_batch([(0, 64)], table, 64, Ask(window=model.config.window(n), chunk=chunk))
            for n in range(len(model.layers))
        ]
        model(Inputs(tokens, torch.arange(64)), caches, batches, dense)
        largest = torch.maximum(largest, torch.stack([cache.abs().amax((1, 2, 3, 4)) for cache in caches]))
    wanted = 2 ** (largest * 2 / 448).log2().ceil()
    scales = calculate_kv_scales(model, torch.float8_e4m3fn, 64)
    assert [[float(k), float(v)] for k, v in scales.values()] == wanted.tolist()


def test_keys_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    enlarge_keys(tmp_path, 1e37)
    model = load(tmp_path)
    model.layers[1].attention.qkv.weight.data.mul_(1e38)  # type: ignore[union-attr,operator]
    with pytest.raises(ConfigError, match="--calculate-kv-scales: keys or values of layer 1 are not finite"):
        calculate_kv_scales(model, torch.float8_e4m3fn, 64)


@pytest.mark.parametrize(("scaled", "calculate", "message"), [
    (False, False, 'fp8 KV cache without scales: larger keys and values are clamped largest=448'),
    (False, True, "KV cache scales source=calculated per_head=False"),
    (True, True, "KV cache scales source=checkpoint per_head=True"),
], ids=["none", "calculated", "checkpoint"])  # fmt: skip
def test_start_logs_the_source_of_the_scales_once(
    scaled: bool, calculate: bool, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scales = pair("k_scale", "v_scale", torch.tensor([1.0, 2.0]), ONE) if scaled else {}
    make_scaled(tmp_path, scales)
    declare(tmp_path, quant_method="compressed-tensors", kv_cache_scheme=SCHEME)
    config = config_of(tmp_path, calculate_kv_scales=calculate, num_blocks_override=8)
    with caplog.at_level(logging.INFO, "quire"):
        runner, _ = make_runner(config, kv_layout(config.model, config.block_size, FP8))
    lines = [record.getMessage() for record in caplog.records if "scales" in record.getMessage()]
    assert len(lines) == 1 and lines[0].startswith(message)
    assert (specs(runner.forward.model)[0].k_scale is None) == (not scaled and not calculate)


def test_cache_that_is_not_fp8_has_no_scales(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    model = load(tmp_path)
    set_kv_scales(model, None, config_of(tmp_path, calculate_kv_scales=True), "bfloat16")
    assert specs(model)[0].k_scale is None
