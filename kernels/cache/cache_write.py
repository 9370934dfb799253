"""Cache write: store the keys and values of a step's tokens in their slots of the paged cache."""

from typing import Any

import torch

from quire.kernels.common.checks import check_kv_cache, check_scale, check_tensor
from quire.kernels.common.fp8 import FP8_DTYPES, as_bits, is_e5m2, to_fp8_reference
from quire.kernels.common.triton_runtime import require_launchable

ACTIVATION_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CACHE_DTYPES = (*ACTIVATION_DTYPES, *FP8_DTYPES)

MAX_TILE_ELEMENTS = 1024
"""Elements of one token's key per program: 8 for each of 128 threads, 16 bytes in half precision."""

PROGRAM_ELEMENTS = 2048
"""Elements of keys per program, from several tokens if one has fewer. Each thread then has two loads of keys and two of
values in flight, which hides part of the memory latency."""


def write_cache_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Compute ``write_cache`` in plain torch. The two agree exactly.

    Raises:
        IndexError: a slot is past the end of the cache.
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
    """Write keys and values to their slots with the Triton kernel.

    Args:
        key, value: float32, float16 or bfloat16 ``[num_tokens, num_kv_heads, head_dim]``; heads and tokens may be
            strided, such as slices of one fused projection.
        kv_cache: in one of ``CACHE_DTYPES``, ``[2, num_blocks, block_size, num_kv_heads, head_dim]``; modified.
        slot_mapping: int64 ``[num_tokens]`` without duplicates; tokens with a negative slot are not written. A kernel
            cannot raise: a slot past the end of the cache, an error of the caller, is not written either.
        k_scale, v_scale: float32 ``[1]`` or ``[num_kv_heads]``, only for an fp8 cache, which holds the key divided by
            ``k_scale``, rounded to nearest and clamped to its largest number. None means 1.

    Raises:
        ValueError: a tensor does not have the shape, dtype or device above.
        RuntimeError: Triton cannot launch in this process.
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
    """Check the arguments of ``write_cache``.

    Raises:
        ValueError: a tensor does not have the shape, dtype or device that ``write_cache`` requires.
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
    """Check the cache, slots and scales for keys of this shape and device.

    Raises:
        ValueError: one of them does not have the shape, dtype or device that ``write_cache`` requires.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    check_kv_cache(kv_cache, num_kv_heads, head_dim, key, CACHE_DTYPES)
    check_tensor("slot_mapping", slot_mapping, {"num_tokens": num_tokens}, (torch.int64,), key.device)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and kv_cache.dtype not in FP8_DTYPES:
            raise ValueError(f"{name}: a cache of {kv_cache.dtype} is not scaled, expected None")
        check_scale(name, scale, num_kv_heads, key.device)


def launch_constants(num_kv_heads: int, head_dim: int, block_size: int) -> dict[str, int]:
    """Return the kernel's compile-time constants besides ``stored_constants``.

    The ahead-of-time compilation test uses them too.
    """
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


def _kernel(device: torch.device) -> Any:
    require_launchable(device.type)
    from quire.kernels.cache.cache_write_triton import cache_write_kernel

    return cache_write_kernel
