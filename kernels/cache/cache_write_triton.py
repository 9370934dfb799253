"""Triton kernel of ``cache_write.write_cache``. Only launchers and their kernels may import it: it imports triton."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl

from quire.kernels.common.fp8_triton import encode_fp8


@triton.jit
def divisor_of(scale, head, PER_HEAD: tl.constexpr):
    """Return the divisor of numbers stored in the cache: one number, or with PER_HEAD one per ``head``.

    ``scale`` is a pointer, or None for 1. It is read for every ``head``, so all of them must exist.
    """
    if scale is None:
        return 1.0
    else:
        return tl.load(scale + head) if PER_HEAD else tl.load(scale)


@triton.jit
def as_stored(x, divisor, FP8: tl.constexpr, SCALED: tl.constexpr, E5M2: tl.constexpr):
    """Return ``x`` as the cache stores it: encoded as bytes if FP8, otherwise unchanged, for ``tl.store`` to cast."""
    if FP8:
        x = x.to(tl.float32)
        if SCALED:
            # Triton's `/` is not rounded as IEEE requires: the content would depend on the kernel that wrote it.
            x = tl.div_rn(x, tl.broadcast_to(divisor, x.shape))
        x = encode_fp8(x, E5M2)
    return x


# This changes from step to step; without do_not_specialize Triton compiles variants for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_tokens"])
def cache_write_kernel(
    key, value, kv_cache, k_scale, v_scale, slot_mapping, num_tokens, num_slots, key_token_stride, key_head_stride,
    value_token_stride, value_head_stride, cache_kv_stride, cache_block_stride, cache_slot_stride,
    cache_head_stride,
    ELEMENTS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_TOKENS: tl.constexpr,
    TILE_ELEMENTS: tl.constexpr, FP8: tl.constexpr, SCALED: tl.constexpr, E5M2: tl.constexpr,
    K_SCALE_PER_HEAD: tl.constexpr, V_SCALE_PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Program ``(i, j)`` writes the ``j``-th part of the keys and values of the ``i``-th TILE_TOKENS tokens.

    ELEMENTS is heads times head_dim. ``kv_cache`` has the layout NHD (given by its strides), and holds bytes if FP8.
    """
    token = tl.program_id(0) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    is_token = token < num_tokens
    slot = tl.load(slot_mapping + token, mask=is_token, other=-1)
    element = tl.program_id(1) * TILE_ELEMENTS + tl.arange(0, TILE_ELEMENTS)
    in_token = element < ELEMENTS
    # Elements past the last count as head 0, because a scale is read for them too.
    head = tl.where(in_token, element // HEAD_DIM, 0)[None, :]
    dim = (element % HEAD_DIM)[None, :]

    # Loaded even for negative slots, so that these loads do not wait for the load of the slot.
    wide_token = token.to(tl.int64)[:, None]
    loaded = is_token[:, None] & in_token[None, :]
    k = tl.load(key + wide_token * key_token_stride + head * key_head_stride + dim, mask=loaded)
    v = tl.load(value + wide_token * value_token_stride + head * value_head_stride + dim, mask=loaded)

    # The slot and everything computed from it is 64 bits wide: a cache can have more than 2**31 elements.
    place = (slot // BLOCK_SIZE) * cache_block_stride + (slot % BLOCK_SIZE) * cache_slot_stride
    target = kv_cache + place[:, None] + head * cache_head_stride + dim
    written = ((slot >= 0) & (slot < num_slots))[:, None] & in_token[None, :]
    k_divisor = divisor_of(k_scale, head, K_SCALE_PER_HEAD)
    v_divisor = divisor_of(v_scale, head, V_SCALE_PER_HEAD)
    tl.store(target, as_stored(k, k_divisor, FP8, SCALED, E5M2), mask=written)
    tl.store(target + cache_kv_stride, as_stored(v, v_divisor, FP8, SCALED, E5M2), mask=written)
