"""Triton kernel of ``block_copy``. Only its launchers may import it, because it imports triton."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl


@triton.jit
def pointer_to(address, WORD_BYTES: tl.constexpr):
    """Return an address as a pointer to words; to halves of words of 16 bytes, which are accessed in pairs."""
    if WORD_BYTES == 16:
        pointer = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
    elif WORD_BYTES == 8:
        pointer = address.to(tl.pointer_type(tl.int64))
    elif WORD_BYTES == 4:
        pointer = address.to(tl.pointer_type(tl.int32))
    elif WORD_BYTES == 2:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.int8))
    return pointer


@triton.jit(do_not_specialize=["num_parts"])
def block_copy_kernel(
    pointers, work, num_parts, words, part_stride, block_stride,
    COLUMNS: tl.constexpr, WORD_BYTES: tl.constexpr, TILE_WORDS: tl.constexpr,
):  # fmt: skip
    """Program ``(i, p, t)`` copies tile ``t`` of the block in line ``i`` of ``work``, in part ``p`` of all caches'
    parts.

    A line is a source and a target block, or, with one COLUMN, a block to zero. No program reads what another writes.
    """
    HALVES: tl.constexpr = 2 if WORD_BYTES == 16 else 1
    part = tl.program_id(1)
    cache = pointer_to(tl.load(pointers + part // num_parts), WORD_BYTES)
    # Block ids and everything computed from them is 64 bits wide: a cache can have more than 2**31 words.
    cache += (part % num_parts).to(tl.int64) * part_stride * HALVES
    line = work + tl.program_id(0) * COLUMNS
    target = tl.load(line + COLUMNS - 1)
    at = tl.program_id(2) * TILE_WORDS * HALVES + tl.arange(0, TILE_WORDS * HALVES)
    in_block = at < words * HALVES
    if COLUMNS == 2:
        source = tl.load(line)
        value = tl.load(cache + source * block_stride * HALVES + at, mask=in_block)
        tl.store(cache + target * block_stride * HALVES + at, value, mask=in_block)
    else:
        tl.store(cache + target * block_stride * HALVES + at, 0, mask=in_block)
