"""Cache write: how the keys and values of a step's tokens are stored in their slots of the paged cache.

``fused_cache_write`` writes them; this is the reference, with the checks of what is written.
"""

import torch

from quire.kernels.common.checks import check_kv_cache, check_scale, check_tensor
from quire.kernels.common.fp8 import FP8_DTYPES, as_bits, is_e5m2, to_fp8_reference

ACTIVATION_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CACHE_DTYPES = (*ACTIVATION_DTYPES, *FP8_DTYPES)


def write_cache_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write keys and values to their slots in plain torch.

    Args:
        key, value: float32, float16 or bfloat16 ``[num_tokens, num_kv_heads, head_dim]``.
        kv_cache: in one of ``CACHE_DTYPES``, ``[2, num_blocks, block_size, num_kv_heads, head_dim]``; modified.
        slot_mapping: int64 ``[num_tokens]`` without duplicates; tokens with a negative slot are not written.
        k_scale, v_scale: float32 ``[1]`` or ``[num_kv_heads]``, only for an fp8 cache, which holds the key divided by
            ``k_scale``, rounded to nearest and clamped to its largest number. None means 1.

    Raises:
        IndexError: a slot is past the end of the cache.
    """
    cache = as_bits(kv_cache)
    block_size = cache.shape[2]
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    for part, tokens, scale in ((0, key, k_scale), (1, value, v_scale))[: len(cache)]:
        stored = as_bits(_as_stored(tokens[written], kv_cache.dtype, scale))
        cache[part, slots // block_size, slots % block_size] = stored


def check_target(
    key: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Check the cache, slots and scales for keys of this shape and device.

    Raises:
        ValueError: one of them does not have the shape, dtype or device that ``write_cache_reference`` requires.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    check_kv_cache(kv_cache, num_kv_heads, head_dim, key, CACHE_DTYPES, parts=len(kv_cache))
    check_tensor("slot_mapping", slot_mapping, {"num_tokens": num_tokens}, (torch.int64,), key.device)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and kv_cache.dtype not in FP8_DTYPES:
            raise ValueError(f"{name}: a cache of {kv_cache.dtype} is not scaled, expected None")
        check_scale(name, scale, num_kv_heads, key.device)


def stored_constants(
    kv_cache: torch.Tensor | None, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> dict[str, int]:
    """Return the compile-time constants of the conversion to the cache's dtype; ``kv_cache`` may be None."""
    return {
        "FP8": kv_cache is not None and kv_cache.dtype in FP8_DTYPES,
        "SCALED": k_scale is not None or v_scale is not None,
        "E5M2": kv_cache is not None and is_e5m2(kv_cache.dtype),
        "K_SCALE_PER_HEAD": k_scale is not None and len(k_scale) > 1,
        "V_SCALE_PER_HEAD": v_scale is not None and len(v_scale) > 1,
    }


def _as_stored(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """Return ``x`` (``[num_tokens, num_kv_heads, head_dim]``) as a cache of ``dtype`` stores it."""
    if dtype not in FP8_DTYPES:
        return x.to(dtype)
    divisor = 1.0 if scale is None else scale[:, None]
    return to_fp8_reference(x.float() / divisor, dtype)
