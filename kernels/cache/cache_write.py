"""Cache write: put the keys and values of a step's tokens into their slots of the paged cache."""

from typing import Any

import torch

from quire.kernels.common.checks import check_kv_cache, check_scale, check_tensor
from quire.kernels.common.fp8 import FP8_DTYPES, as_bits, is_e5m2, to_fp8_reference
from quire.kernels.common.triton_runtime import require_launchable

ACTIVATION_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CACHE_DTYPES = (*ACTIVATION_DTYPES, *FP8_DTYPES)

MAX_TILE_ELEMENTS = 1024
"""Elements of one token's key that a program copies: 8 for each of 128 threads, 16 bytes in half precision."""

PROGRAM_ELEMENTS = 2048
"""Elements of keys that a program copies, of several tokens where one has fewer: two such loads in flight per thread,
and as many of values, for which memory takes its time to answer."""


def write_cache_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """What ``write_cache`` does, in plain torch. The two agree exactly.

    Raises:
        IndexError: a slot lies behind the cache.
    """
    cache = as_bits(kv_cache)
    block_size = cache.shape[2]
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    for part, tokens, scale in ((0, key, k_scale), (1, value, v_scale)):
        stored = as_bits(_as_stored(tokens[written], kv_cache.dtype, scale))
        cache[part, slots // block_size, slots % block_size] = stored


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write keys and values into their slots, by the Triton kernel.

    Args:
        key, value: float32, float16 or bfloat16 ``[num_tokens, num_kv_heads, head_dim]``; heads and tokens may be
            strided, such as slices of one fused projection.
        kv_cache: in one of ``CACHE_DTYPES``, ``[2, num_blocks, block_size, num_kv_heads, head_dim]``; changed.
        slot_mapping: int64 ``[num_tokens]``, no slot twice; a negative slot is not written. A device cannot raise: a
            slot behind the cache is a caller's mistake that is not written either.
        k_scale, v_scale: float32 ``[1]`` or ``[num_kv_heads]``, for a cache of 8-bit floats only: it holds the key
            divided by ``k_scale``, rounded to nearest, and at most its largest number. None: 1.

    Raises:
        ValueError: a tensor does not have the shape, dtype or place above.
        RuntimeError: Triton cannot launch here.
    """
    check_write(key, value, kv_cache, slot_mapping, k_scale, v_scale)
    kernel = _kernel(key.device)
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    constants = launch_constants(num_kv_heads, head_dim, kv_cache.shape[2]) | stored_constants(
        kv_cache, k_scale, v_scale
    )
    token_tiles = -(-num_tokens // constants["TILE_TOKENS"])
    kernel[(token_tiles, -(-num_kv_heads * head_dim // constants["TILE_ELEMENTS"]))](
        key, value, as_bits(kv_cache), k_scale, v_scale, slot_mapping, num_tokens,
        kv_cache.shape[1] * kv_cache.shape[2], *key.stride()[:2], *value.stride()[:2], *kv_cache.stride()[:4],
        **constants,
    )  # fmt: skip


def check_write(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Refuse what no cache write kernel takes.

    Raises:
        ValueError: a tensor does not have the shape, dtype or place that ``write_cache`` says.
    """
    key_dims = {"num_tokens": None, "num_kv_heads": None, "head_dim": None}
    check_tensor("key", key, key_dims, ACTIVATION_DTYPES, key.device)
    value_dims = dict(zip(key_dims, key.shape, strict=True))
    check_tensor("value", value, value_dims, (key.dtype,), key.device)
    check_target(key, kv_cache, slot_mapping, k_scale, v_scale)


def check_target(
    key: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Refuse a cache, slots or scales that keys of this shape and place cannot be written to.

    Raises:
        ValueError: one of them does not have the shape, dtype or place that ``write_cache`` says.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    check_kv_cache(kv_cache, num_kv_heads, head_dim, key, CACHE_DTYPES)
    check_tensor("slot_mapping", slot_mapping, {"num_tokens": num_tokens}, (torch.int64,), key.device)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and kv_cache.dtype not in FP8_DTYPES:
            raise ValueError(f"{name}: a cache of {kv_cache.dtype} is not scaled, expected None")
        check_scale(name, scale, num_kv_heads, key.device)


def launch_constants(num_kv_heads: int, head_dim: int, block_size: int) -> dict[str, int]:
    """What the kernel is compiled for, besides ``stored_constants``; shared with the test that compiles it ahead."""
    elements = num_kv_heads * head_dim
    tile_elements = min(1 << (elements - 1).bit_length(), MAX_TILE_ELEMENTS)
    return {
        "ELEMENTS": elements,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "TILE_TOKENS": PROGRAM_ELEMENTS // tile_elements,
        "TILE_ELEMENTS": tile_elements,
    }


def stored_constants(
    kv_cache: torch.Tensor | None, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> dict[str, int]:
    """The constants by which a kernel knows what a cache holds of a number; None: there is no cache."""
    return {
        "FP8": kv_cache is not None and kv_cache.dtype in FP8_DTYPES,
        "SCALED": k_scale is not None or v_scale is not None,
        "E5M2": kv_cache is not None and is_e5m2(kv_cache.dtype),
        "K_SCALE_PER_HEAD": k_scale is not None and len(k_scale) > 1,
        "V_SCALE_PER_HEAD": v_scale is not None and len(v_scale) > 1,
    }


def _as_stored(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """What a cache of ``dtype`` holds of ``x`` (``[num_tokens, num_kv_heads, head_dim]``)."""
    if dtype not in FP8_DTYPES:
        return x.to(dtype)
    divisor = 1.0 if scale is None else scale[:, None]
    return to_fp8_reference(x.float() / divisor, dtype)


def _kernel(device: torch.device) -> Any:
    require_launchable(device.type)
    from quire.kernels.cache.cache_write_triton import cache_write_kernel

    return cache_write_kernel
