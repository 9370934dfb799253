"""Shapes, dtypes, inputs and outputs of a decoder, and its rotary table."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_steps import Rows
from thread_ranks import ThreadRank, on_ranks
from tiers import thinned

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


def _load(folder: Path, dtype: torch.dtype = torch.float32, parallel: ThreadRank | None = None) -> Decoder:
    model = build_model(load_model_config(folder), dtype, "cpu", parallel=parallel)
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


@pytest.mark.parametrize("family", thinned(["gemma3", "llama", "olmo2", "gpt_oss"], keep=2))
def test_given_embeddings_and_inputs_of_layers_equal_transformers(family: str, checkpoint_factory: Factory) -> None:
    """On one and two ranks, in two steps. Gemma multiplies the rows of its table, and not those that are given."""
    folder, reference = checkpoint_factory(family)
    prompt, places, layers = torch.arange(30, 50), torch.tensor([1, 2, 7]), (1, 0)
    vectors = torch.randn(3, reference.config.hidden_size, generator=torch.Generator().manual_seed(1))
    embedded = reference.get_input_embeddings()(prompt[None]).clone()
    embedded[0, 5 + places] = vectors
    expected = reference(inputs_embeds=embedded, output_hidden_states=True)
    assert not torch.equal(expected.logits, reference(prompt[None]).logits)

    def on_rank(parallel: ThreadRank) -> None:
        rows = Rows(_load(folder, parallel=parallel), [20], CpuBackend())
        rows.run({0: prompt[:5]})
        outputs = rows.run({0: prompt[5:]}, given_embeddings=(places, vectors), auxiliary_layers=layers)
        for layer, entered in zip(layers, outputs.auxiliary, strict=True):
            torch.testing.assert_close(entered, expected.hidden_states[layer][0, 5:], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(rows.model.logits(outputs.hidden), expected.logits[0, 5:], atol=2e-4, rtol=2e-4)

    for size in (1, 2):
        on_ranks(size, on_rank)


def test_inputs_of_a_layer_that_does_not_exist_are_an_error(checkpoint_factory: Factory) -> None:
    rows = Rows(_load(checkpoint_factory("llama")[0]), [3], CpuBackend())
    with pytest.raises(KeyError, match="9"):
        rows.run({0: torch.arange(3)}, auxiliary_layers=(0, 9))
