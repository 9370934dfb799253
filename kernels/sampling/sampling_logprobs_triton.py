"""The Triton kernels of ``sampling_logprobs.top_logprobs``. Imports triton, so only that launcher imports it."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl

from quire.kernels.sampling.sampling_stats_triton import order_key


@triton.jit
def chunk_candidates_kernel(
    logits, tokens, candidate_keys, candidate_tokens, above, vocab, logits_stride,
    CHUNK: tl.constexpr, N: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Program ``(r, c)`` finds keys and ids of the N best of chunk ``c``, and counts its tokens above row ``r``'s."""
    row = tl.program_id(0).to(tl.int64)
    chunk = row * tl.num_programs(1) + tl.program_id(1)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    source = logits + row * logits_stride
    x = tl.load(source + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    own_token = tl.load(tokens + row)
    exists = (own_token >= 0) & (own_token < vocab)
    own = tl.load(source + own_token, mask=exists, other=float("inf")).to(tl.float32)
    tl.store(above + chunk, tl.sum((x > own).to(tl.int32), 0))
    taken: tl.constexpr = -0x80000000
    key = tl.where(x == x, order_key(tl.where(x == 0.0, 0.0, x)), 0x7FFFFFFF)
    key = tl.where(token < vocab, key, taken)
    place = tl.arange(0, TILE_N)
    keys = tl.full([TILE_N], taken, tl.int32)
    ids = tl.zeros([TILE_N], tl.int32)
    for i in range(N):
        best = tl.max(key, 0)
        index = tl.min(tl.where(key == best, token, 0x7FFFFFFF), 0)
        keys = tl.where(place == i, best, keys)
        ids = tl.where(place == i, index, ids)
        key = tl.where(token == index, taken, key)
    tl.store(candidate_keys + chunk * TILE_N + place, keys)
    tl.store(candidate_tokens + chunk * TILE_N + place, ids)


@triton.jit
def row_logprobs_kernel(
    logits, tokens, log_sum_exp, candidate_keys, candidate_tokens, above, token_ids, values, ranks, vocab,
    num_chunks, logits_stride,
    TILE_CHUNKS: tl.constexpr, N: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Program ``r`` merges the chunks' candidates. Padding has the lowest key and is never chosen."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.load(log_sum_exp + row)
    own_token = tl.load(tokens + row)
    exists = (own_token >= 0) & (own_token < vocab)
    own = tl.load(logits + row * logits_stride + own_token, mask=exists, other=float("nan")).to(tl.float32)
    tl.store(token_ids + row * (N + 1), own_token)
    tl.store(values + row * (N + 1), own - total)
    chunk = tl.arange(0, TILE_CHUNKS)
    counts = tl.load(above + row * num_chunks + chunk, mask=chunk < num_chunks, other=0)
    tl.store(ranks + row, tl.sum(counts, 0).to(tl.int64) + 1)
    taken: tl.constexpr = -0x80000000
    place = tl.arange(0, TILE_CHUNKS * TILE_N)
    mask = place < num_chunks * TILE_N
    key = tl.load(candidate_keys + row * num_chunks * TILE_N + place, mask=mask, other=taken)
    token = tl.load(candidate_tokens + row * num_chunks * TILE_N + place, mask=mask, other=0)
    for i in range(N):
        best = tl.max(key, 0)
        index = tl.min(tl.where(key == best, token, 0x7FFFFFFF), 0)
        value = (best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(token_ids + row * (N + 1) + 1 + i, index.to(tl.int64))
        tl.store(values + row * (N + 1) + 1 + i, value - total)
        key = tl.where(token == index, taken, key)
