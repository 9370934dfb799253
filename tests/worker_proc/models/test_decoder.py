"""Architectures, shapes, dtypes and rotary table of a decoder."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_steps import Rows

from quire.protocol.model.model_config import load_model_config
from quire.worker_proc.attention.cpu import CpuBackend
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.startup.loader import load_weights

Factory = Callable[..., tuple[Path, Any]]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def _load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    model = build_model(load_model_config(folder), dtype, "cpu")
    load_weights(model, folder, dtype, progress=False)
    return model


def test_bfloat16_is_close_to_float32(checkpoint_factory: Factory) -> None:
    folder, _ = checkpoint_factory("qwen3", dtype=torch.bfloat16)
    prompt = torch.arange(20)
    low, high = _load(folder, torch.bfloat16), _load(folder)
    assert all(p.dtype is torch.bfloat16 for p in low.parameters())
    rows = Rows(low, [20], CpuBackend())
    exact = Rows(high, [20], CpuBackend()).step({0: prompt})[0]
    error = (rows.step({0: prompt})[0] - exact).abs().mean() / exact.abs().mean()
    assert error < 0.05


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("native", ["1", "0"])
def test_logits_of_bfloat16_weights_are_not_rounded(
    tied: bool, native: str, checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They equal the float32 product of the widened head and hidden states: rounding would make ties."""
    monkeypatch.setenv("QUIRE_CPU_NATIVE", native)
    folder, _ = checkpoint_factory("llama", dtype=torch.bfloat16, tie_word_embeddings=tied)
    hidden = torch.randn(9, 32, generator=torch.Generator().manual_seed(5)).bfloat16()
    model = _load(folder, torch.bfloat16)
    expected = hidden.float() @ model.lm_head.weight.float().T
    for prepack in (False, True):
        if prepack:
            model.prepack()
        logits = model.logits(hidden)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        assert float((logits.bfloat16() == logits).float().mean()) < 0.1


def test_meta_model_takes_no_memory_and_has_weight_slots(checkpoint_factory: Factory) -> None:
    folder, reference = checkpoint_factory("qwen2")
    model = build_model(load_model_config(folder), torch.float32, "meta")
    shapes = {name: slot.shape for name, slot in model.weight_slots().items()}
    assert shapes == {name: tuple(weight.shape) for name, weight in reference.named_parameters()}


def test_rotary_table_covers_the_engines_longest_request(checkpoint_factory: Factory) -> None:
    folder, _ = checkpoint_factory("llama")
    config = load_model_config(folder)
    assert build_model(config, torch.float32, "cpu").rope.shape == (2, 256, 8)
    assert build_model(config, torch.float32, "cpu", max_position=32).rope.shape == (2, 32, 8)
