"""Models with packed weights, and the logits that are compared with those of transformers."""

from pathlib import Path

import msgspec
import torch
from dense_attention import DenseBackend
from model_steps import Rows
from thread_ranks import ThreadRank

from quire.kernels.cpu.linear.linear import PackedLinear
from quire.protocol.model.checkpoint import stored_tensors, with_stored_format
from quire.protocol.model.model_config import load_model_config
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.linear import Linear
from quire.worker_proc.models.mlp import SparseMlp
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.startup.loader import load_weights

_LENGTHS = [21, 1, 6]


def build_packed(
    source: Path,
    parallel: ThreadRank | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    rounds: bool = False,
) -> Decoder:
    """Build the model of a folder or GGUF file, without its weights. ``rounds``: as its format rounds activations."""
    config = with_stored_format(source, stored_tensors(source), load_model_config(source))
    if config.weight_format is not None and not rounds:
        form = msgspec.structs.replace(config.weight_format, int8_activations=False, fp8_activations="")
        config = msgspec.structs.replace(config, weight_format=form)
    return build_model(config, dtype, device, parallel=parallel)


def load_packed(
    source: Path, parallel: ThreadRank | None = None, device: str = "cpu", *, rounds: bool = False
) -> Decoder:
    model = build_packed(source, parallel, device=device, rounds=rounds)
    load_weights(model, source, torch.float32, progress=False)
    model.prepack()
    return model


def resident_bytes(model: Decoder) -> int:
    """Return the bytes of all weights: parameters, and those in the layouts of the CPU library."""
    layers = [module._native for module in model.modules() if isinstance(module, Linear)]
    layers += [
        each for mlp in model.modules() if isinstance(mlp, SparseMlp) for pair in mlp.experts.packed for each in pair
    ]
    packed = {id(layer): layer.num_bytes for layer in layers if isinstance(layer, PackedLinear)}
    return sum(packed.values()) + sum(parameter.nbytes for parameter in model.parameters())


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 97, (length,), generator=generator) for length in _LENGTHS]


def logits_of(model: Decoder) -> torch.Tensor:
    """Return the logits of all tokens of ``prompts``, ``[tokens, vocabulary]``."""
    rows = Rows(model, _LENGTHS, DenseBackend()).step(dict(enumerate(prompts())))
    return torch.cat([rows[row] for row in sorted(rows)])
