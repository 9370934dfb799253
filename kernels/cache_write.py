"""Cache write: put the keys and values of a step's tokens into their slots of the paged cache (layout NHD)."""

from typing import Any

import torch

from quire.kernels.checks import check_kv_cache, check_tensor
from quire.kernels.triton_runtime import require_launchable

CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

MAX_TILE_ELEMENTS = 1024
"""Elements of one token's key that a program copies; 128 threads then move 8 each, 16 bytes in half precision."""


def write_cache_reference(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """What ``write_cache`` does, in plain torch. The two agree exactly.

    Raises:
        IndexError: a slot lies behind the cache.
    """
    block_size = kv_cache.shape[2]
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    kv_cache[0, slots // block_size, slots % block_size] = key[written]
    kv_cache[1, slots // block_size, slots % block_size] = value[written]


def write_cache(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write keys and values into their slots, by the Triton kernel.

    Args:
        key, value: ``[num_tokens, num_kv_heads, head_dim]`` in the cache's dtype; heads and tokens may be strided,
            such as slices of one fused projection.
        kv_cache: float32, float16 or bfloat16 ``[2, num_blocks, block_size, num_kv_heads, head_dim]``; changed.
        slot_mapping: int64 ``[num_tokens]``, no slot twice; a negative slot is not written. A device cannot raise: a
            slot behind the cache is a caller's mistake that is not written either.

    Raises:
        ValueError: a tensor does not have the shape, dtype or place above.
        RuntimeError: Triton cannot launch here.
    """
    key_dims = {"num_tokens": None, "num_kv_heads": None, "head_dim": None}
    check_tensor("key", key, key_dims, CACHE_DTYPES, key.device)
    num_tokens, num_kv_heads, head_dim = key.shape
    value_dims = dict(zip(key_dims, key.shape, strict=True))
    check_tensor("value", value, value_dims, (key.dtype,), key.device)
    check_kv_cache(kv_cache, num_kv_heads, head_dim, like=key)
    check_tensor("slot_mapping", slot_mapping, {"num_tokens": num_tokens}, (torch.int64,), key.device)
    kernel = _kernel(key.device)
    if num_tokens == 0:
        return
    constants = launch_constants(num_kv_heads, head_dim, kv_cache.shape[2])
    kernel[(num_tokens, -(-num_kv_heads * head_dim // constants["TILE_ELEMENTS"]))](
        key,
        value,
        kv_cache,
        slot_mapping,
        kv_cache.shape[1] * kv_cache.shape[2],
        *key.stride()[:2],
        *value.stride()[:2],
        *kv_cache.stride()[:4],
        **constants,
    )


def launch_constants(num_kv_heads: int, head_dim: int, block_size: int) -> dict[str, int]:
    """What the kernel is compiled for; shared with the test that compiles it ahead."""
    elements = num_kv_heads * head_dim
    return {
        "ELEMENTS": elements,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "TILE_ELEMENTS": min(1 << (elements - 1).bit_length(), MAX_TILE_ELEMENTS),
    }


def _kernel(device: torch.device) -> Any:
    require_launchable(device.type)
    from quire.kernels.cache_write_triton import cache_write_kernel

    return cache_write_kernel
