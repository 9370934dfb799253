"""Every family of encoders against transformers: the same hidden states, vectors and logits, alone and in a batch."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoder_checkpoints import ENCODER_CLASSES, EncoderRunner, save_encoder
from pooling_steps import Pooled, Rows, cosines
from safetensors.torch import load_file, save_file

from quire.protocol.errors import ConfigError
from quire.protocol.request.pooling_params import PoolingParams

SEED = random.Random(3)
LENGTHS = (1, 40, 2, 17, 300, 63, 5, 130, 512, 33)
PROMPTS = [[SEED.randrange(6, 97) for _ in range(length)] for length in LENGTHS]
TOKENS = PoolingParams("token_embed", use_activation=False)
VECTOR = PoolingParams("embed", use_activation=False)
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


@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, settings = VARIANTS[name]
    model = save_encoder(tmp_path, family, **settings)
    runner = EncoderRunner(tmp_path)
    together = runner.pool([Pooled(prompt, TOKENS) for prompt in PROMPTS])
    for prompt, rows in zip(PROMPTS, together, strict=True):
        np.testing.assert_allclose(rows, _hidden(model, prompt), atol=1e-4)
    for prompt, rows in list(zip(PROMPTS, together, strict=True))[:4]:
        assert np.array_equal(runner.pool([Pooled(prompt, TOKENS)])[0], rows), "a row depends on its batch"
