"""The Triton kernel of ``token_bitmask.launch_token_bitmask``. Imports triton, so only that launcher imports it."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl


# The number of positions varies between steps, and Triton would compile another version for multiples of 16.
@triton.jit(do_not_specialize=["num_positions"])
def token_bitmask_kernel(
    logits, rows, words, num_positions, vocab, num_words, logits_stride, words_stride, TILE: tl.constexpr
):
    """Program ``(m, t)`` applies mask ``m`` to the tokens of tile ``t``, without reading logits."""
    mask_index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + mask_index)
    if (row < 0) | (row >= num_positions):
        return
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    word = token // 32
    bits = tl.load(words + mask_index * words_stride + word, mask=word < num_words, other=0)
    allowed = ((bits >> (token % 32)) & 1) != 0
    forbidden = tl.full([TILE], float("-inf"), tl.float32)
    tl.store(logits + row * logits_stride + token, forbidden, mask=(token < vocab) & ~allowed)
