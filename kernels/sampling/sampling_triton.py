"""The Triton kernels of ``sampling.sample``. Imports triton, so only that launcher imports it.

A key's *distance* is its number of float32 keys from the key of the best scaled logit, 0: int64, 0 for the best. A
*bracket* is the range of keys to which a selection has narrowed its result. The columns of a row's ``state``, int64:

    0 LOW: distance of the bracket's first key; finally, of the drawn key
    1 HIGH: distance after the bracket's last key
    2 SHIFT: a fine bin is 2**SHIFT keys wide; -1 if the selection has finished, or the row has no selection
    3 TARGET: the unit to find, of tokens (top-k) or of mass (top-p, draw)
    4 COUNT and 5 MASS: number and mass of the tokens before the bracket
    6 KEPT: mass of the tokens that the cuts so far keep
    7 INDEX: finally, the index of the drawn token among those with the drawn key

SELECTION is 0 for top-k, 1 for top-p and 2 for the draw. ANY_TOP_K and ANY_TOP_P are those of the launcher.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl

from quire.kernels.sampling.sampling_stats_triton import order_key


@triton.jit
def is_cut(row, top_k, top_p, ANY_TOP_K: tl.constexpr, ANY_TOP_P: tl.constexpr):
    """Whether the row has top-k or top-p, so that it is drawn in the order of its logits."""
    cut = False
    if ANY_TOP_K:
        cut = cut | (tl.load(top_k + row) > 0)
    if ANY_TOP_P:
        cut = cut | (tl.load(top_p + row) < 1.0)
    return cut


@triton.jit
def is_greedy(row, best, temperature):
    """Whether the row takes its best token: temperature 0, or logits that are not finite."""
    can_draw = (tl.abs(tl.load(best + row)) < float("inf")) & (tl.load(temperature + row) > 0.0)
    return not can_draw


@triton.jit
def load_scaled(logits, row, token, best, temperature, vocab, logits_stride):
    """Load logits minus the best one over the temperature, rounded as on the CPU; minus infinity past the row."""
    x = tl.load(logits + row * logits_stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    scaled = tl.div_rn(x - tl.load(best + row), tl.load(temperature + row))
    return tl.where(scaled == 0.0, 0.0, scaled)  # -0.0 becomes 0.0, so that both have the same key


@triton.jit
def mass_of(scaled, row, log_min_p):
    """Return the masses; those of tokens that min-p cuts are 0.

    They are integers, so that histograms can add them atomically: a sum has the same bits in any order.
    """
    mass = (tl.exp(scaled) * 1099511627776.0).to(tl.int64)  # 2**MASS_BITS
    return tl.where(scaled >= tl.load(log_min_p + row), mass, 0)


@triton.jit
def coarse_histogram_kernel(
    logits, best, temperature, top_k, top_p, log_min_p, state, histogram, vocab, logits_stride,
    ANY_TOP_K: tl.constexpr, ANY_TOP_P: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Program ``(r, c)`` adds chunk ``c`` to row ``r``'s histogram by scaled logit."""
    row = tl.program_id(0).to(tl.int64)
    if is_greedy(row, best, temperature):
        return
    if not is_cut(row, top_k, top_p, ANY_TOP_K, ANY_TOP_P):
        return
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    scaled = load_scaled(logits, row, token, best, temperature, vocab, logits_stride)
    mass = mass_of(scaled, row, log_min_p)
    bin = tl.minimum(scaled * -32.0, BINS - 1.0).to(tl.int32)
    counts = histogram + row * 2 * BINS + bin
    if ANY_TOP_K:
        has_top_k = tl.load(top_k + row) > 0
        tl.atomic_add(counts, tl.full([CHUNK], 1, tl.int64), mask=(token < vocab) & has_top_k, sem="relaxed")
    tl.atomic_add(counts + BINS, mass, mask=mass > 0, sem="relaxed")


@triton.jit
def fine_histogram_kernel(
    logits, best, temperature, log_min_p, state, histogram, vocab, logits_stride,
    CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Program ``(r, c)`` adds the tokens of chunk ``c`` in row ``r``'s bracket to its histogram by distance."""
    row = tl.program_id(0).to(tl.int64)
    shift = tl.load(state + row * 8 + 2)
    if shift < 0:
        return
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    scaled = load_scaled(logits, row, token, best, temperature, vocab, logits_stride)
    distance = -order_key(scaled).to(tl.int64)
    low = tl.load(state + row * 8)
    in_bracket = (token < vocab) & (distance >= low) & (distance < tl.load(state + row * 8 + 1))
    bin = (tl.where(in_bracket, distance - low, 0) >> shift).to(tl.int32)
    counts = histogram + row * 2 * BINS + bin
    tl.atomic_add(counts, tl.full([CHUNK], 1, tl.int64), mask=in_bracket, sem="relaxed")
    tl.atomic_add(counts + BINS, mass_of(scaled, row, log_min_p), mask=in_bracket, sem="relaxed")


@triton.jit
def begin_selection_kernel(
    histogram, best, temperature, state, top_k, top_p, noise, vocab,
    SELECTION: tl.constexpr, ANY_TOP_K: tl.constexpr, ANY_TOP_P: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Program ``r`` sets row ``r``'s TARGET, and its bracket to the coarse bin that contains the target."""
    row = tl.program_id(0).to(tl.int64)
    own = state + row * 8
    tl.store(own + 2, -1)
    if is_greedy(row, best, temperature):
        return
    if not is_cut(row, top_k, top_p, ANY_TOP_K, ANY_TOP_P):
        return
    bin = tl.arange(0, BINS)
    counts = tl.load(histogram + row * 2 * BINS + bin)
    masses = tl.load(histogram + row * 2 * BINS + BINS + bin)
    kept = tl.load(own + 6)
    if SELECTION == 0 or (SELECTION == 1 and not ANY_TOP_K):
        kept = tl.sum(masses, 0)
        tl.store(own + 6, kept)
    sizes = masses
    if SELECTION == 0:
        k = tl.load(top_k + row)
        if (k <= 0) | (k >= vocab):
            return
        sizes = counts
        target = (k - 1).to(tl.int64)
    elif SELECTION == 1:
        share = tl.load(top_p + row)
        if not (share < 1.0):
            return
        limit = share.to(tl.float64) * kept.to(tl.float64)
        whole = limit.to(tl.int64)
        # Tokens with less mass than the limit before them are kept: the last one contains unit ceil(limit) - 1.
        target = tl.where(whole.to(tl.float64) < limit, whole, whole - 1)
    else:
        target = (tl.load(noise + row) * kept.to(tl.float64)).to(tl.int64)
    if SELECTION > 0:
        target = tl.maximum(tl.minimum(target, kept - 1), 0)
    found = tl.minimum(tl.sum((tl.cumsum(sizes, 0) <= target).to(tl.int32), 0), BINS - 1)
    tl.store(own + 3, target)
    tl.store(own + 4, tl.sum(tl.where(bin < found, counts, 0), 0))
    tl.store(own + 5, tl.sum(tl.where(bin < found, masses, 0), 0))
    # Bin b covers magnitudes from b / 32 to (b + 1) / 32, whose bits are ascending; the best logit's distance is 0.
    low = (found.to(tl.float32) * 0.03125).to(tl.int32, bitcast=True).to(tl.int64) + 1
    high = ((found + 1).to(tl.float32) * 0.03125).to(tl.int32, bitcast=True).to(tl.int64) + 1
    low = tl.where(found == 0, 0, low)
    high = tl.where(found == BINS - 1, 0x7F800002, high)  # after minus infinity
    tl.store(own, low)
    tl.store(own + 1, high)
    # The first shift of 0, 10 and 20 at which BINS bins cover the bracket.
    width = (high - low + BINS - 1) // BINS
    tl.store(own + 2, tl.where(width > 1024, 20, tl.where(width > 1, 10, 0)).to(tl.int64))


@triton.jit
def narrow_kernel(histogram, state, SELECTION: tl.constexpr, BINS: tl.constexpr):
    """Program ``r`` narrows row ``r``'s bracket to the fine bin that contains TARGET, and clears the histogram.

    If the bin is a single key, the selection has finished.
    """
    row = tl.program_id(0).to(tl.int64)
    own = state + row * 8
    shift = tl.load(own + 2)
    if shift < 0:
        return
    bin = tl.arange(0, BINS)
    count_ptr = histogram + row * 2 * BINS + bin
    counts = tl.load(count_ptr)
    masses = tl.load(count_ptr + BINS)
    tl.store(count_ptr, tl.zeros([BINS], tl.int64))
    tl.store(count_ptr + BINS, tl.zeros([BINS], tl.int64))
    low = tl.load(own)
    target = tl.load(own + 3)
    count_before = tl.load(own + 4)
    mass_before = tl.load(own + 5)
    if SELECTION == 0:
        running = tl.cumsum(counts, 0) + count_before
    else:
        running = tl.cumsum(masses, 0) + mass_before
    found = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), BINS - 1)
    count_before += tl.sum(tl.where(bin < found, counts, 0), 0)
    mass_before += tl.sum(tl.where(bin < found, masses, 0), 0)
    low += found.to(tl.int64) << shift
    tl.store(own, low)
    tl.store(own + 1, low + (tl.full([], 1, tl.int64) << shift))
    tl.store(own + 2, tl.where(shift > 0, shift - 10, -1))
    tl.store(own + 4, count_before)
    tl.store(own + 5, mass_before)
    if shift == 0:
        count = tl.maximum(tl.sum(tl.where(bin == found, counts, 0), 0), 1)
        mass = tl.sum(tl.where(bin == found, masses, 0), 0) // count
        if SELECTION == 0:
            tl.store(own + 6, mass_before + (target + 1 - count_before) * mass)
        else:
            # Index among equal keys: all have the same mass, which is not 0 because it contains the target.
            equal = (target - mass_before) // tl.maximum(mass, 1)
            if SELECTION == 1:
                tl.store(own + 6, mass_before + (equal + 1) * mass)
            else:
                tl.store(own + 7, equal)


@triton.jit
def weights_of(scaled, row, cut, log_min_p, state):
    """Return the tokens' weights for the final pick: masses that min-p keeps or, in cut rows, 1 for the drawn key."""
    distance = -order_key(scaled).to(tl.int64)
    equal = (distance == tl.load(state + row * 8)).to(tl.int64)
    return tl.where(cut, equal, mass_of(scaled, row, log_min_p))


@triton.jit
def chunk_weights_kernel(
    logits, best, temperature, top_k, top_p, log_min_p, state, sums, vocab, logits_stride,
    ANY_TOP_K: tl.constexpr, ANY_TOP_P: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program ``(r, c)`` adds up the weights of chunk ``c`` of row ``r``."""
    row = tl.program_id(0).to(tl.int64)
    if is_greedy(row, best, temperature):
        return
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    scaled = load_scaled(logits, row, token, best, temperature, vocab, logits_stride)
    cut = is_cut(row, top_k, top_p, ANY_TOP_K, ANY_TOP_P)
    weights = weights_of(scaled, row, cut, log_min_p, state)
    tl.store(sums + row * tl.num_programs(1) + tl.program_id(1), tl.sum(weights, 0))


@triton.jit
def pick_token_kernel(
    logits, best, temperature, top_k, top_p, log_min_p, state, sums, noise, best_tokens, tokens, vocab,
    logits_stride,
    ANY_TOP_K: tl.constexpr, ANY_TOP_P: tl.constexpr, CHUNK: tl.constexpr, TILE_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program ``r`` picks the first token, in vocabulary order, at which the cumulative weight exceeds the target."""
    row = tl.program_id(0).to(tl.int64)
    if is_greedy(row, best, temperature):
        tl.store(tokens + row, tl.load(best_tokens + row))
        return
    num_chunks = (vocab + CHUNK - 1) // CHUNK
    chunk = tl.arange(0, TILE_CHUNKS)
    chunk_sums = tl.load(sums + row * num_chunks + chunk, mask=chunk < num_chunks, other=0)
    cut = is_cut(row, top_k, top_p, ANY_TOP_K, ANY_TOP_P)
    total = tl.sum(chunk_sums, 0)
    target = (tl.load(noise + row) * total.to(tl.float64)).to(tl.int64)
    target = tl.where(cut, tl.load(state + row * 8 + 7), target)
    target = tl.maximum(tl.minimum(target, total - 1), 0)
    found = tl.minimum(tl.sum((tl.cumsum(chunk_sums, 0) <= target).to(tl.int32), 0), num_chunks - 1)
    target -= tl.sum(tl.where(chunk < found, chunk_sums, 0), 0)
    token = found * CHUNK + tl.arange(0, CHUNK)
    scaled = load_scaled(logits, row, token, best, temperature, vocab, logits_stride)
    weights = weights_of(scaled, row, cut, log_min_p, state)
    first = tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
    tl.store(tokens + row, tl.minimum(found * CHUNK + first, vocab - 1).to(tl.int64))
