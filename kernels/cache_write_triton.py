"""The Triton kernel behind ``cache_write.write_cache``; imports triton, so only that launcher imports it."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and refuses most.

import triton
import triton.language as tl


@triton.jit
def cache_write_kernel(
    key,
    value,
    kv_cache,
    slot_mapping,
    num_slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    cache_kv_stride,
    cache_block_stride,
    cache_slot_stride,
    cache_head_stride,
    ELEMENTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ELEMENTS: tl.constexpr,
):
    """Program ``(t, i)`` copies the ``i``-th tile of token ``t``'s key and value; ELEMENTS is heads times head_dim."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if (slot < 0) | (slot >= num_slots):
        return
    element = tl.program_id(1) * TILE_ELEMENTS + tl.arange(0, TILE_ELEMENTS)
    in_token = element < ELEMENTS
    head = element // HEAD_DIM
    dim = element % HEAD_DIM
    k = tl.load(key + token * key_token_stride + head * key_head_stride + dim, mask=in_token)
    v = tl.load(value + token * value_token_stride + head * value_head_stride + dim, mask=in_token)
    # The slot is 64 bits wide, and so is all that is computed from it: a cache has more than 2**31 elements.
    key_slot = kv_cache + (slot // BLOCK_SIZE) * cache_block_stride + (slot % BLOCK_SIZE) * cache_slot_stride
    target = key_slot + head * cache_head_stride + dim
    tl.store(target, k, mask=in_token)
    tl.store(target + cache_kv_stride, v, mask=in_token)
