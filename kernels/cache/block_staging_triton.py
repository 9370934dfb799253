"""Triton kernel of ``block_staging``. Only its launchers may import it, because it imports triton."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl

from quire.kernels.cache.block_copy_triton import pointer_to


@triton.jit(do_not_specialize=["num_parts", "num_blocks"])
def block_staging_kernel(
    pointers, block_ids, staging, num_parts, num_blocks, words, part_stride, block_stride,
    INTO_BLOCKS: tl.constexpr, WORD_BYTES: tl.constexpr, TILE_WORDS: tl.constexpr,
):  # fmt: skip
    """Program ``(i, p, t)`` copies tile ``t`` of part ``p`` of block ``block_ids[i]``, which is at the same place of
    line ``i`` of ``staging``. A line without a valid id is not accessed."""
    HALVES: tl.constexpr = 2 if WORD_BYTES == 16 else 1
    line, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = tl.load(block_ids + line)
    if (block >= 0) & (block < num_blocks):
        cache = pointer_to(tl.load(pointers + part // num_parts), WORD_BYTES)
        # 64 bits wide: a cache can have more than 2**31 words.
        cache += (part % num_parts).to(tl.int64) * part_stride * HALVES + block * block_stride * HALVES
        staged = pointer_to(staging, WORD_BYTES) + (line * tl.num_programs(1) + part) * words * HALVES
        at = tl.program_id(2) * TILE_WORDS * HALVES + tl.arange(0, TILE_WORDS * HALVES)
        in_block = at < words * HALVES
        if INTO_BLOCKS:
            tl.store(cache + at, tl.load(staged + at, mask=in_block), mask=in_block)
        else:
            tl.store(staged + at, tl.load(cache + at, mask=in_block), mask=in_block)
