"""The Triton kernels of ``moe_routing``. Imports triton, so only the launchers import it."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl

from quire.kernels.sampling.sampling_stats_triton import order_key


@triton.jit
def route_kernel(
    logits, expert_ids, weights, num_tokens, num_experts, logits_stride,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, TILE_TOKENS: tl.constexpr, TILE_EXPERTS: tl.constexpr,
    TILE_TOP_K: tl.constexpr,
):  # fmt: skip
    """Program ``i`` routes the ``i``-th TILE_TOKENS tokens; TILE_EXPERTS covers all experts, TILE_TOP_K all choices."""
    token = tl.program_id(0).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    in_tokens = token < num_tokens
    expert = tl.arange(0, TILE_EXPERTS)
    mask = in_tokens[:, None] & (expert < num_experts)[None, :]
    source = logits + (token * logits_stride)[:, None] + expert[None, :]
    x = tl.load(source, mask=mask, other=float("-inf")).to(tl.float32)
    x = tl.where(in_tokens[:, None], x, 0.0)
    # Choose by integer keys instead of floats: they are ordered even with NaN, so every chosen id is valid.
    taken: tl.constexpr = -0x80000000
    keys = tl.where(x == x, order_key(tl.where(x == 0.0, 0.0, x)), 0x7FFFFFFF)
    keys = tl.where((expert < num_experts)[None, :], keys, taken)
    choice = tl.arange(0, TILE_TOP_K)
    ids = tl.zeros([TILE_TOKENS, TILE_TOP_K], tl.int32)
    chosen = tl.full([TILE_TOKENS, TILE_TOP_K], float("-inf"), tl.float32)
    for j in tl.static_range(TOP_K):
        best = tl.max(keys, 1)
        index = tl.min(tl.where(keys == best[:, None], expert[None, :], TILE_EXPERTS), 1)
        own = expert[None, :] == index[:, None]
        value = tl.sum(tl.where(own, x, 0.0), 1)
        ids = tl.where(choice[None, :] == j, index[:, None], ids)
        chosen = tl.where(choice[None, :] == j, value[:, None], chosen)
        keys = tl.where(own, taken, keys)
    scores = chosen if RENORMALISE else x
    # The maximum ignores NaN, but the sum becomes NaN.
    maximum = tl.max(tl.where(scores == scores, scores, float("-inf")), 1)[:, None]
    total = tl.sum(tl.exp(scores - maximum), 1)[:, None]
    target = (token * TOP_K)[:, None] + choice[None, :]
    mask = in_tokens[:, None] & (choice < TOP_K)[None, :]
    tl.store(expert_ids + target, ids, mask=mask)
    tl.store(weights + target, tl.exp(chosen - maximum) / total, mask=mask)


@triton.jit
def count_pairs_kernel(expert_ids, counts, num_pairs, SCAN_PAIRS: tl.constexpr):
    """Program ``e`` counts the pairs of expert ``e``.

    Each program reads all pairs, here and in ``place_pairs_kernel``. Atomic counters would read them once, but the
    order of pairs within an expert, and so the grouping into tiles, would differ between runs.
    """
    expert = tl.program_id(0)
    count = tl.zeros([SCAN_PAIRS], tl.int32)
    for start in range(0, num_pairs, SCAN_PAIRS):
        pair = start + tl.arange(0, SCAN_PAIRS)
        count += (tl.load(expert_ids + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(count, 0))


@triton.jit
def place_pairs_kernel(
    expert_ids, counts, pairs, tile_experts, num_pairs, num_experts,
    TILE_PAIRS: tl.constexpr, TILE_EXPERTS: tl.constexpr, SCAN_PAIRS: tl.constexpr,
):  # fmt: skip
    """Program ``e`` writes the pairs of expert ``e`` to its tiles, which follow those of lower experts."""
    expert = tl.program_id(0)
    other = tl.arange(0, TILE_EXPERTS)
    count = tl.load(counts + other, mask=other < num_experts, other=0)
    tiles = (count + TILE_PAIRS - 1) // TILE_PAIRS
    first_tile = tl.sum(tl.where(other < expert, tiles, 0), 0)
    num_tiles = tl.sum(tl.where(other == expert, tiles, 0), 0)
    for start in range(0, num_tiles, TILE_EXPERTS):
        tile = start + tl.arange(0, TILE_EXPERTS)
        tl.store(tile_experts + first_tile + tile, expert, mask=tile < num_tiles)
    place = first_tile * TILE_PAIRS
    for start in range(0, num_pairs, SCAN_PAIRS):
        pair = start + tl.arange(0, SCAN_PAIRS)
        own = (tl.load(expert_ids + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
        tl.store(pairs + place + tl.cumsum(own, 0) - own, pair, mask=own > 0)
        place += tl.sum(own, 0)
