"""The Triton kernel of ``penalties.launch_penalties``. Imports triton, so only that launcher imports it."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl


@triton.jit
def penalties_kernel(
    logits, counts, slots, repetition, frequency, presence, offsets, drafts, vocab, num_slots, logits_stride,
    counts_stride,
    PROMPT_BIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program ``(p, t)`` penalises tile ``t`` of position ``p``; only logits that change are written."""
    position = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + position).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    in_row = token < vocab
    held = tl.load(counts + slot * counts_stride + token, mask=in_row, other=0)
    answer = held & (PROMPT_BIT - 1)
    own_drafts = drafts + position
    for distance in range(tl.load(offsets + position).to(tl.int32)):
        answer += (token == tl.load(own_drafts - distance - 1)).to(tl.int32)
    target = logits + position * logits_stride + token
    known = in_row & (((held & PROMPT_BIT) != 0) | (answer > 0))
    x = tl.load(target, mask=known, other=0.0)
    factor = tl.zeros([TILE], tl.float32) + tl.load(repetition + position)
    x = tl.where(x > 0.0, tl.div_rn(x, factor), x * factor)
    penalty = tl.load(frequency + position) * answer.to(tl.float32) + tl.load(presence + position)
    tl.store(target, tl.where(answer > 0, x - penalty, x), mask=known)
