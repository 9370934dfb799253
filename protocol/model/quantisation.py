"""A checkpoint's ``quantization_config``: which schemes are supported.

These are quantised linear layers (``weight_format.py``), gpt-oss's MXFP4 experts, and fp8 scales of the KV cache in the
forms of compressed-tensors (llm-compressor) and ModelOpt.
"""

from typing import Any

from quire.protocol.errors import ConfigError, printable
from quire.protocol.model.weight_format import SUPPORTED_METHODS, WeightFormat, parse_weight_format

KV_CACHE_METHODS = (None, "compressed-tensors", "modelopt")
KV_CACHE_SCHEME: dict[str, tuple[object, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": (None, "tensor", "attn_head"),
    "symmetric": (None, True),
    "dynamic": (None, False),
}
"""Supported values of the fields of ``kv_cache_scheme``; None: absent."""


def quant_method(raw: dict[str, Any]) -> Any:
    """Return the name of the quantisation method in ``config.json``, unchecked; None if there is none."""
    given = raw.get("quantization_config")
    return given.get("quant_method") if isinstance(given, dict) else given


def parse_quantisation(raw: dict[str, Any], architecture: str, where: str) -> tuple[WeightFormat | None, bool]:
    """Return the format of quantised linear layers, and whether the checkpoint is meant for an fp8 KV cache.

    Raises:
        ConfigError: the weights or the KV cache are quantised in a form that is not supported.
    """
    given, method = raw.get("quantization_config"), quant_method(raw)
    if not given:
        return None, False
    weights = parse_weight_format(raw, architecture, where)
    is_mxfp4 = method == "mxfp4" and architecture == "GptOssForCausalLM"
    is_cache_only = isinstance(given, dict) and method in KV_CACHE_METHODS and _has_plain_weights(given)
    if weights is None and not is_mxfp4 and not is_cache_only:
        raise ConfigError(
            f"{where}: quantization_config: method {printable(method)} is not supported for {architecture}; "
            f"supported: none, {', '.join(SUPPORTED_METHODS)}, and mxfp4 for GptOssForCausalLM"
        )
    return weights, isinstance(given, dict) and _has_fp8_scheme(given, f"{where}: quantization_config")


def _has_plain_weights(given: dict[str, Any]) -> bool:
    """Return whether only the KV cache, or attention beside it, is quantised."""
    if not (given.get("kv_cache_scheme") or given.get("kv_cache_quant_algo")) or given.get("quant_algo"):
        return False
    groups = given.get("config_groups") or {}
    return isinstance(groups, dict) and all(_is_attention_group(group) for group in groups.values())


def _is_attention_group(group: object) -> bool:
    targets = group.get("targets") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(targets, list) or group.get("weights"):
        return False
    return bool(targets) and all(
        isinstance(name, str) and name.endswith(("Attention", "self_attn", "self_attn$")) for name in targets
    )


def _has_fp8_scheme(given: dict[str, Any], where: str) -> bool:
    """Return whether the KV cache is quantised, to fp8; raise ConfigError if to anything else."""
    algorithm = given.get("kv_cache_quant_algo")
    if algorithm not in (None, "FP8"):
        raise ConfigError(f"{where}: kv_cache_quant_algo {printable(algorithm)} is not supported; supported: FP8")
    scheme = given.get("kv_cache_scheme")
    if scheme is None:
        return algorithm is not None
    if not isinstance(scheme, dict):
        raise ConfigError(f"{where}: kv_cache_scheme must be an object (got {printable(scheme)})")
    for field, supported in KV_CACHE_SCHEME.items():
        if scheme.get(field) not in supported:
            raise ConfigError(
                f"{where}: kv_cache_scheme: {field} {printable(scheme.get(field))} is not supported; supported: "
                f"num_bits 8, type float, strategy tensor or attn_head, symmetric, not dynamic"
            )
    return True
