"""The Triton kernels of ``sampling_stats.row_statistics``. Only launchers and kernels import it."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl


@triton.jit
def order_key(x):
    """Map float32 to an int32 with the same order; -0.0 is below 0.0. Mapping the key's bits again restores them."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the bits of negative floats are in reverse order


@triton.jit
def chunk_statistics_kernel(
    logits, chunk_keys, chunk_tokens, chunk_sums, vocab, num_chunks, logits_stride,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Program ``(r, c)`` finds the best key of chunk ``c`` of row ``r``, its lowest index, and the sum of exp."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    in_row = token < vocab
    x = tl.load(logits + row * logits_stride + token, mask=in_row, other=float("-inf")).to(tl.float32)
    # Both zeros have the same key, and NaN has the highest.
    key = order_key(tl.where(x == 0.0, 0.0, x))
    key = tl.where(x == x, key, 0x7FFFFFFF)
    best = tl.max(key, 0)
    # Each chunk has at least one logit, so an index past the row is never the lowest of the best.
    tl.store(chunk_keys + row * num_chunks + chunk, best)
    tl.store(chunk_tokens + row * num_chunks + chunk, tl.min(tl.where(key == best, token, 0x7FFFFFFF), 0))
    maximum = tl.max(x, 0)
    # A chunk with only minus infinity sums to zero.
    sums = tl.sum(tl.exp(x - tl.where(tl.abs(maximum) < float("inf"), maximum, 0.0)), 0)
    tl.store(chunk_sums + row * num_chunks + chunk, sums)


@triton.jit
def row_statistics_kernel(
    chunk_keys, chunk_tokens, chunk_sums, tokens, best, bad, log_sum_exp, num_chunks,
    TILE_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program ``r`` merges the chunks of row ``r``."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, TILE_CHUNKS)
    in_row = chunk < num_chunks
    lowest: tl.constexpr = -0x80000000
    key = tl.load(chunk_keys + row * num_chunks + chunk, mask=in_row, other=lowest)
    token = tl.load(chunk_tokens + row * num_chunks + chunk, mask=in_row, other=0x7FFFFFFF)
    sums = tl.load(chunk_sums + row * num_chunks + chunk, mask=in_row, other=0.0)
    best_key = tl.max(key, 0)
    value = (best_key ^ ((best_key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    finite = tl.abs(value) < float("inf")
    tl.store(tokens + row, tl.min(tl.where(key == best_key, token, 0x7FFFFFFF), 0).to(tl.int64))
    tl.store(best + row, value)
    tl.store(bad + row, ~finite)
    maximum = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    has_any = in_row & (tl.abs(maximum) < float("inf"))
    shrink = tl.exp(tl.where(has_any, tl.minimum(maximum - tl.where(finite, value, 0.0), 0.0), 0.0))
    total = tl.sum(tl.where(has_any, sums * shrink, 0.0), 0)
    tl.store(log_sum_exp + row, value + tl.log(tl.where(finite, total, 1.0)))
