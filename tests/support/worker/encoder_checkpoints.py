"""Tiny random encoders, saved by transformers, and a runner that serves them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from pooling_steps import Pooled, PoolingRunner

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.worker_messages import NewRequestData

TINY_ENCODER: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 520,
    "pad_token_id": 1,
}
ENCODER_CLASSES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "modernbert": "ModernBert",
}
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "bert": {"pad_token_id": 0},
    "modernbert": {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3, "local_attention": 10},
}


def save_encoder(folder: Path, family: str, head: str = "Model", **settings: Any) -> Any:
    """Save a random encoder with the class ``head`` of its family, and return it. No weight or bias is trivial."""
    import transformers

    name = ENCODER_CLASSES[family]
    config = getattr(transformers, f"{name}Config")(**TINY_ENCODER | OWN_SETTINGS.get(family, {}) | settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}{head}")(config).eval()
        with torch.no_grad():
            for key, weight in model.named_parameters():
                is_norm = key.endswith(("norm.weight", "LayerNorm.weight"))
                weight.add_(torch.randn(weight.shape) * (0.2 if is_norm or key.endswith("bias") else 0.1))
    model.save_pretrained(folder)
    return model


class EncoderRunner(PoolingRunner):
    """A ``PoolingRunner`` whose requests have no blocks."""

    def adding(self, requests: dict[int, Pooled]) -> dict[str, Any]:
        new = []
        for handle, request in requests.items():
            length, sampling = len(request.prompt), SamplingParams()
            new.append(NewRequestData(handle, f"r{handle}", length, length, 0, [], sampling, 7, pooling=request.params))
        tokens = [token for request in requests.values() for token in request.prompt]
        return {"removed": self._take_leaving(), "new_requests": new, "token_ids": np.array(tokens, np.int32)}
