"""Scales of an fp8 KV cache: from the checkpoint, or calculated at start.

An fp8 cache holds keys and values divided by the scales of their layer, so that they fit the range of the format.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from quire.kernels.attention.attention_work import first_key
from quire.kernels.common.fp8 import FP8_DTYPES
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.checkpoint import StoredTensor, stored_tensors
from quire.protocol.model.model_config import ModelConfig
from quire.protocol.process.log import event_logger
from quire.worker_proc.attention.backend import AttentionSpec, Rotary
from quire.worker_proc.attention.cpu_torch import attend_explicitly
from quire.worker_proc.attention.prologue import normalise_and_rotate
from quire.worker_proc.models.checkpoint_names import kv_scale_of
from quire.worker_proc.models.model import Inputs, Model
from quire.worker_proc.startup.loader import OpenFiles

log = event_logger("worker")

KVScales = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Scales of keys and values per layer that owns a cache: float32 ``[1]`` or ``[num_kv_heads]``, of all ranks, on the
host."""

Reach = tuple[int, int]
"""A layer's window and the tokens of its chunks, as in ``first_key``."""

HEADROOM = 2.0
"""Calculated scales leave room for keys and values this many times as large as those of the calibration tokens. vLLM
divided the largest key by 200 and the largest value by 100, which leaves 2.2 and 4.5 times."""

CALIBRATION_ROWS = 4
CALIBRATION_TOKENS = 128
"""Tokens per row, if the context is not shorter."""


def checkpoint_kv_scales(config: EngineConfig, cache_dtype: str) -> KVScales | None:
    """Read the checkpoint's scales; None if the cache is not fp8 or the checkpoint has none.

    Raises:
        ConfigError: a scale is missing for some layers, duplicate, of the wrong shape, not finite or not positive.
    """
    if getattr(torch, cache_dtype) not in FP8_DTYPES or config.load_format == "dummy":
        return None
    folder = Path(config.model_path)
    found = _find(stored_tensors(folder), config.model)
    if not found:
        return None
    scales: dict[tuple[int, str], torch.Tensor] = {}
    with OpenFiles() as files:
        for place, tensor in found.items():
            scales[place] = _checked(tensor, files.get(tensor), config.model.kv_shape(place[0])[0])
    for layer in _owners(config.model):
        for half in "kv":
            if (layer, half) not in scales:
                raise ConfigError(
                    f"{folder}: tensor model.layers.{layer}.self_attn.{half}_scale is missing, but other layers have "
                    f"scales of the KV cache: use a checkpoint with all of them, or no fp8 --kv-cache-dtype"
                )
    return {layer: (scales[layer, "k"], scales[layer, "v"]) for layer in _owners(config.model)}


def have_head_scales(scales: KVScales | None) -> bool:
    """Return whether the heads of a layer have different scales."""
    return any(len(set(half.tolist())) > 1 for pair in (scales or {}).values() for half in pair)


def set_kv_scales(model: Model, scales: KVScales | None, config: EngineConfig, cache_dtype: str) -> None:
    """Set the scales of a loaded model, calculated if the checkpoint has none and the settings ask for it."""
    dtype: torch.dtype = getattr(torch, cache_dtype)
    if dtype not in FP8_DTYPES:
        return
    source = "checkpoint"
    if scales is None and config.calculate_kv_scales:
        scales, source = calculate_kv_scales(model, dtype, config.max_model_len), "calculated"
    if scales is None:
        log.warning(
            "fp8 KV cache without scales: larger keys and values are clamped",
            largest=torch.finfo(dtype).max,
            remedy="--calculate-kv-scales, or a checkpoint with scales",
        )
        return
    model.set_kv_scales(scales)
    keys, values = (torch.cat(halves) for halves in zip(*scales.values(), strict=True))
    log.info(
        "KV cache scales",
        source=source,
        per_head=have_head_scales(scales),
        keys=f"{float(keys.min()):.3g} to {float(keys.max()):.3g}",
        values=f"{float(values.min()):.3g} to {float(values.max()):.3g}",
    )


def calculate_kv_scales(model: Model, dtype: torch.dtype, max_model_len: int) -> KVScales:
    """Return one scale for the keys and one for the values of each layer, from a few rows of fixed random tokens.

    A scale is ``HEADROOM * largest / finfo(dtype).max``, rounded up to a power of two. One scale for all heads, which
    every attention backend supports, suffices: fp8 numbers far below the largest are as precise as those near it. The
    power of two hides last-bit differences of sums, which depend on the number of ranks; and as a divisor it changes no
    mantissa. The same ranks calculate the same scales again after a restart.

    Raises:
        ConfigError: keys or values are not finite.
    """
    owners, parallel = _owners(model.config), model.build.parallel
    with torch.inference_mode():
        largest = _largest(model, owners, min(CALIBRATION_TOKENS, max_model_len))
        largest = parallel.all_gather(largest).view(len(owners), parallel.size, 2).amax(1).cpu()
    scales: KVScales = {}
    for layer, pair in zip(owners, largest, strict=True):
        if not pair.isfinite().all():
            raise ConfigError(
                f"--calculate-kv-scales: keys or values of layer {layer} are not finite: use no fp8 --kv-cache-dtype"
            )
        key, value = (_power_of_two(float(half) * HEADROOM / torch.finfo(dtype).max) for half in pair)
        scales[layer] = torch.tensor([key]), torch.tensor([value])
    return scales


class _WholeRow:
    """``LayerAttention`` of one row without context; cache of a layer: all its keys and values, unquantised."""

    def attend(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, plan: Reach, spec: AttentionSpec, rotary: Rotary | None
    ) -> torch.Tensor:
        """Compute attention; ``kv_cache`` is ``[2, num_tokens, num_kv_heads, head_dim]``, ``plan`` its reach."""
        tokens, heads, kv_heads = len(qkv), spec.num_heads, spec.num_kv_heads
        query = normalise_and_rotate(qkv[:, : heads + kv_heads], spec, rotary)
        if qkv.shape[1] > heads:
            kv_cache[0], kv_cache[1] = query[:, heads:], qkv[:, heads + kv_heads :]
            query = query[:, :heads]
        own = np.arange(tokens)
        hidden = torch.from_numpy((own > own[:, None]) | (own < first_key(own, *plan)[:, None])).to(qkv.device)
        grouped = query.reshape(tokens, kv_heads, -1, spec.head_dim).permute(1, 2, 0, 3)
        keys, values = kv_cache.transpose(1, 2).unsqueeze(2)
        out = attend_explicitly(grouped, keys, values, hidden, spec)
        return out.permute(2, 0, 1, 3).reshape(tokens, heads, spec.head_dim)


def _largest(model: Model, owners: list[int], length: int) -> torch.Tensor:
    """Return this rank's largest absolute key and value per layer, float32 ``[len(owners), 2]``."""
    config, build = model.config, model.build
    shapes = {layer: model.attention_shape(layer) for layer in owners}
    caches = {
        layer: torch.empty(2, length, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype, device=build.device)
        for layer, shape in shapes.items()
    }
    sources = [config.cache_source(layer) for layer in range(config.num_layers)]
    reaches = [(config.window(layer), config.chunk(layer)) for layer in range(config.num_layers)]
    positions = torch.arange(length, device=build.device)
    largest = torch.zeros(len(owners), 2, device=build.device)
    rows = np.random.default_rng(0).integers(config.vocab_size, size=(CALIBRATION_ROWS, length))
    for tokens in torch.from_numpy(rows).to(build.device):
        given = Inputs(tokens, positions, states=model.new_states(length, one_row=True))
        model(given, [caches[source] for source in sources], reaches, _WholeRow())
        found = torch.stack([caches[layer].float().abs().amax((1, 2, 3)) for layer in owners])
        largest = torch.maximum(largest, found)
    return largest


def _power_of_two(number: float) -> float:
    """Return the next power of two, and 1 for 0."""
    if number == 0.0:
        return 1.0
    mantissa, exponent = math.frexp(number)
    return math.ldexp(1.0, max(exponent - (mantissa == 0.5), -126))


def _owners(model: ModelConfig) -> list[int]:
    return [layer for layer in range(model.num_layers) if model.cache_source(layer) == layer]


def _find(stored: Mapping[str, StoredTensor], model: ModelConfig) -> dict[tuple[int, str], StoredTensor]:
    """Return the stored scales by layer, and ``k`` or ``v``; without layers that read an earlier layer's cache."""
    owners = set(_owners(model))
    found: dict[tuple[int, str], StoredTensor] = {}
    for name, tensor in stored.items():
        layer, halves = kv_scale_of(name) or (-1, "")
        for half in halves if layer in owners else "":
            if (layer, half) in found:
                other = found[layer, half]
                raise ConfigError(
                    f"{tensor.file}: tensor {tensor.name} and tensor {other.name} of {other.file} are both the scale "
                    f"of the same layer's KV cache"
                )
            found[layer, half] = tensor
    return found


def _checked(tensor: StoredTensor, scale: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return a scale as float32 ``[1]`` or ``[num_kv_heads]``."""
    if tensor.shape not in ((), (1,), (num_kv_heads,), (num_kv_heads, 1, 1)):
        raise ConfigError(
            f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}; supported: [] and [1] for all heads, "
            f"[{num_kv_heads}] and [{num_kv_heads}, 1, 1] per head"
        )
    scale = scale.reshape(-1).float()
    wrong = [number for number in scale.tolist() if not 0 < number < math.inf]
    if wrong:
        raise ConfigError(f"{tensor.file}: tensor {tensor.name}: a scale must be positive and finite (got {wrong[0]})")
    return scale
