"""Every family of encoders against transformers: the same hidden states, vectors and logits, alone and in a batch."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from encoder_checkpoints import ENCODER_CLASSES, EncoderRunner, save_encoder
from pooling_steps import Pooled, Rows, cosines
from safetensors.torch import load_file, save_file
from thread_ranks import on_ranks
from tiers import thinned

from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import load_model_config
from quire.protocol.model.weight_format import online_format
from quire.protocol.request.pooling_params import PoolingParams
from quire.worker_proc.models.registry import build_model

SEED = random.Random(3)
LENGTHS = (1, 40, 2, 17, 300, 63, 5, 130, 512, 33)
PROMPTS = [[SEED.randrange(6, 97) for _ in range(length)] for length in LENGTHS]
TOKENS = PoolingParams("token_embed", use_activation=False)
LOGITS = PoolingParams("classify", use_activation=False)

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in ENCODER_CLASSES} | {
    "bert relu": ("bert", {"hidden_act": "relu", "intermediate_size": 50, "hidden_size": 36, "layer_norm_eps": 1e-5}),
    "bert tanh approximation": ("bert", {"hidden_act": "gelu_new"}),
    "roberta one type": ("roberta", {"type_vocab_size": 1, "pad_token_id": 3}),
    "modernbert biases": (
        "modernbert",
        {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "hidden_activation": "silu"},
    ),
    "modernbert ropes": (
        "modernbert",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "local_attention": 64,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
}


def _hidden(model: Any, prompt: list[int], **inputs: Any) -> Rows:
    base = getattr(model, model.base_model_prefix, model)
    with torch.no_grad():
        hidden: Rows = base(input_ids=torch.tensor([prompt]), **inputs).last_hidden_state[0].numpy()
    return hidden


@pytest.mark.parametrize("name", thinned(VARIANTS, keep=2))
def test_hidden_states_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, settings = VARIANTS[name]
    model = save_encoder(tmp_path, family, **settings)
    runner = EncoderRunner(tmp_path)
    together = runner.pool([Pooled(prompt, TOKENS) for prompt in PROMPTS])
    for prompt, rows in zip(PROMPTS, together, strict=True):
        np.testing.assert_allclose(rows, _hidden(model, prompt), atol=1e-4)
    for prompt, rows in list(zip(PROMPTS, together, strict=True))[:4]:
        assert np.array_equal(runner.pool([Pooled(prompt, TOKENS)])[0], rows), "a row depends on its batch"


def test_padding_tokens_in_a_prompt_have_no_position_of_their_own(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "roberta")
    prompts = [[0, 5, 1, 6, 7, 2], [6, 1, 1, 9], [1], [8, 9]]
    for prompt, rows in zip(
        prompts, EncoderRunner(tmp_path).pool([Pooled(prompt, TOKENS) for prompt in prompts]), strict=True
    ):
        np.testing.assert_allclose(rows, _hidden(model, prompt), atol=1e-4)


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "modernbert"])
@pytest.mark.full
def test_a_checkpoint_with_a_head_for_masked_tokens_makes_vectors(family: str, tmp_path: Path) -> None:
    model = save_encoder(tmp_path, family, "ForMaskedLM")
    vectors = np.concatenate(EncoderRunner(tmp_path).pool([Pooled(prompt) for prompt in PROMPTS]))
    assert cosines(vectors, np.stack([_hidden(model, prompt).mean(0) for prompt in PROMPTS])).min() >= 0.9999
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


def test_a_folder_of_sentence_transformers_chooses_the_first_token(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "xlm-roberta")
    parts = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in parts]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    settings = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    vectors = np.concatenate(EncoderRunner(tmp_path).pool([Pooled(prompt) for prompt in PROMPTS[:4]]))
    assert cosines(vectors, np.stack([_hidden(model, prompt)[0] for prompt in PROMPTS[:4]])).min() >= 0.9999


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {"num_labels": 1}),
    "roberta": ("roberta", {"num_labels": 3}),
    "xlm-roberta": ("xlm-roberta", {"num_labels": 1}),
    "modernbert": ("modernbert", {"num_labels": 3, "classifier_bias": True, "norm_bias": True}),
    "modernbert mean": ("modernbert", {"num_labels": 1, "classifier_pooling": "mean", "classifier_activation": "relu"}),
}


@pytest.mark.parametrize("name", thinned(HEADS, keep=1))
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, settings = HEADS[name]
    model = save_encoder(tmp_path, family, "ForSequenceClassification", **settings)
    runner = EncoderRunner(tmp_path)
    logits = np.concatenate(runner.pool([Pooled(prompt, LOGITS) for prompt in PROMPTS]))
    with torch.no_grad():
        want = np.concatenate([model(input_ids=torch.tensor([prompt])).logits.numpy() for prompt in PROMPTS])
    np.testing.assert_allclose(logits, want, atol=1e-4)
    scores = np.concatenate(runner.pool([Pooled(prompt, PoolingParams("classify")) for prompt in PROMPTS]))
    wide = torch.from_numpy(want)
    np.testing.assert_allclose(scores, wide.sigmoid() if want.shape[1] == 1 else wide.softmax(1), atol=1e-4)


def test_the_second_text_of_a_pair_has_another_type(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    seconds = [0, 7, 1, 4, 0, 60, 2, 99]
    pairs = [
        Pooled(prompt, msgspec.structs.replace(LOGITS, second_text=second))
        for prompt, second in zip(PROMPTS, seconds, strict=False)
    ]
    want = []
    for prompt, second in zip(PROMPTS, seconds, strict=False):
        types = torch.tensor([[int(0 < second <= at) for at in range(len(prompt))]])
        with torch.no_grad():
            want.append(model(input_ids=torch.tensor([prompt]), token_type_ids=types).logits.numpy())
    np.testing.assert_allclose(np.concatenate(EncoderRunner(tmp_path).pool(pairs)), np.concatenate(want), atol=1e-4)


def test_a_part_of_a_prompt_is_refused(tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert")
    runner = EncoderRunner(tmp_path)
    with pytest.raises(ValueError, match=r"computes 7 of 40 tokens|computes whole rows"):
        runner.pool([Pooled(PROMPTS[1])], chunk=7)


def test_values_that_are_not_finite_name_their_request_alone(tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"][42] = 3e38
    save_file(tensors, tmp_path / "model.safetensors")
    runner = EncoderRunner(tmp_path)
    runner.pool([Pooled([7, 8]), Pooled([42, 42, 9]), Pooled([6])])
    assert [handle % 1000 for handle in runner.results[-1].bad] == [1]


def test_dummy_weights_run(tmp_path: Path) -> None:
    save_encoder(tmp_path, "modernbert")
    vectors = EncoderRunner(tmp_path, load_format="dummy").pool([Pooled(prompt) for prompt in PROMPTS[:3]])
    assert all(np.isfinite(vector).all() for vector in vectors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("encoder.layer.1.output.dense.weight"),
            r"layers\.1\.mlp\.down_proj\.weight is missing",
        ),
        (
            lambda tensors: tensors.update({"encoder.layer.0.attention.self.key.weight": torch.zeros(32, 31)}),
            r"attention\.self\.key\.weight has shape \[32, 31\]",
        ),
        (lambda tensors: tensors.update({"other.weight": torch.zeros(3)}), r"other\.weight is not part of the model"),
        (
            lambda tensors: tensors["embeddings.position_embeddings.weight"].fill_(float("nan")),
            r"position_embeddings\.weight has non-finite values",
        ),
    ],
    ids=["missing", "shape", "unknown", "nan"],
)
def test_a_damaged_checkpoint_names_the_tensor(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    save_encoder(tmp_path, "bert")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        EncoderRunner(tmp_path)


def test_ranks_and_quantised_weights_are_refused(tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert")
    model = load_model_config(tmp_path)
    with pytest.raises(ConfigError, match="tensor-parallel-size must be 1 for an encoder"):
        on_ranks(2, lambda rank: build_model(model, torch.float32, "cpu", parallel=rank))
    quantised = msgspec.structs.replace(model, weight_format=online_format("int8"))
    with pytest.raises(ConfigError, match="--quantization is not supported for an encoder"):
        build_model(quantised, torch.float32, "cpu")
