"""The accuracy loss of an 8-bit KV cache is bounded; with scales, tokens equal those of a simulation in torch."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from checkpoints import FAMILIES, TINY, make_checkpoint
from cpu_attention_cases import Ask, make_batch
from dense_attention import DenseBackend
from inprocess import InProcessEngine
from kv_scale_checkpoints import enlarge_keys, make_scaled
from tiers import thinned

from quire.protocol.model.model_config import load_model_config
from quire.worker_proc.attention.backend import AttentionSpec, StepBatch
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.model import Inputs
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.startup.loader import load_weights

PROMPTS = [[5 + i, *range(7, 30 + 3 * i)] for i in range(8)]

TOLERANCE = {"float8_e4m3fn": 0.12, "float8_e5m2": 0.25}
"""Root mean square difference of the best tokens' log probabilities: three and two bits of mantissa, on random weights
whose logits have a deviation of about 4."""


NATIVE = [pytest.param("1", id="native"), pytest.param("0", id="torch", marks=pytest.mark.full)]


def _best(
    folder: Path, kv_cache_dtype: str, native: str, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> npt.NDArray[np.float32]:
    """Return the best log probability after each prompt, whose last chunk reads the cache of the others."""
    monkeypatch.setenv("QUIRE_CPU_NATIVE", native)
    engine = InProcessEngine(folder, kv_cache_dtype=kv_cache_dtype, long_prefill_token_threshold=7, **settings)
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, max_tokens=1, logprobs=1)
    answers = engine.run()
    values = [np.frombuffer(answers[str(index)].logprobs[0], np.float32)[0] for index in range(len(PROMPTS))]
    return np.array(values, np.float32)


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("kv_cache_dtype", thinned(TOLERANCE, keep=1))
def test_log_probabilities_stay_close(
    kv_cache_dtype: str, native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama")
    exact = _best(tmp_path, "float32", native, monkeypatch)
    rounded = _best(tmp_path, kv_cache_dtype, native, monkeypatch)
    difference = float(np.sqrt(np.square(exact - rounded).mean()))
    assert 0 < difference < TOLERANCE[kv_cache_dtype]


@pytest.mark.parametrize("native", NATIVE)
def test_calculated_scales_lower_the_error_of_large_keys(
    native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama")
    enlarge_keys(tmp_path, 300.0)
    exact = _best(tmp_path, "float32", native, monkeypatch)
    clamped = _best(tmp_path, "float8_e4m3fn", native, monkeypatch)
    scaled = _best(tmp_path, "float8_e4m3fn", native, monkeypatch, calculate_kv_scales=True)
    errors = [float(np.abs(exact - rounded).mean()) for rounded in (scaled, clamped)]
    assert errors[0] < TOLERANCE["float8_e4m3fn"] and 4 * errors[0] < errors[1]
    again = _best(tmp_path, "float8_e4m3fn", native, monkeypatch, calculate_kv_scales=True)
    assert scaled.tobytes() == again.tobytes()


class SimulatedFp8(DenseBackend):
    """Attention over keys and values that are rounded to fp8, in a cache that is not fp8."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        plan: StepBatch,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        assert key is not None and value is not None and spec.k_scale is not None and spec.v_scale is not None
        pairs = ((key, spec.k_scale[:, None]), (value, spec.v_scale[:, None]))
        rounded = [(x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale for x, scale in pairs]
        return super().forward(query, *rounded, kv_cache, plan, spec)


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("family", thinned(["llama", "gemma2"], keep=1))
def test_greedy_tokens_with_scales_per_head_equal_a_simulation(
    family: str, native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CPU_NATIVE", native)
    layers = load_layers(family)
    scales = {f"{n}.self_attn.{half}_scale": torch.tensor([0.02, 3.0 + n]) for n in range(layers) for half in "kv"}
    make_scaled(tmp_path, scales, family)
    enlarge_keys(tmp_path, 30.0)
    engine = InProcessEngine(tmp_path, kv_cache_dtype="float8_e4m3fn", long_prefill_token_threshold=7)
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, max_tokens=12)
    answers = engine.run()
    model = build_model(load_model_config(tmp_path), torch.float32, "cpu")
    load_weights(model, tmp_path, torch.float32, progress=False)
    model.set_kv_scales({n: (torch.tensor([0.02, 3.0 + n]),) * 2 for n in range(layers)})
    for index, prompt in enumerate(PROMPTS):
        assert answers[str(index)].tokens == simulated_tokens(model, prompt, 12)


def load_layers(family: str) -> int:
    return int(FAMILIES[family][1].get("num_hidden_layers", TINY["num_hidden_layers"]))


@torch.inference_mode()
def simulated_tokens(model: Decoder, prompt: list[int], count: int) -> list[int]:
    """Return greedy tokens, from the whole text at every step."""
    config, dense, tokens = model.config, SimulatedFp8(), list(prompt)
    for _ in range(count):
        length = len(tokens)
        shape = dense.kv_cache_shape(2, length, model.attention_shape(0).num_kv_heads, config.head_dim)
        table = torch.ones(1, 1, dtype=torch.int32)
        windows = [config.window(layer) for layer in range(config.num_layers)]
        batches = [make_batch([(0, length)], table, length, Ask(window=window)) for window in windows]
        caches = [torch.zeros(shape) for _ in windows]
        hidden = model(Inputs(torch.tensor(tokens), torch.arange(length)), caches, batches, dense).hidden
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
