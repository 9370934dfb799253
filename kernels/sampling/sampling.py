"""Sampling of one token per row with temperature, top-k, top-p and min-p, without a sort or a wait for the host.

**Mass.** A token's weight ``exp((logit - best) / temperature)`` is truncated to a multiple of 2**-40 of the best
token's weight; this multiple, an int64, is the token's mass. Sums of masses are exact in any order, so a row's token
does not depend on how the vocabulary is split into chunks. Unit ``t`` of the total mass belongs to exactly one token,
which is found without fixing the order of summation. Tokens with a weight below 2**-40 of the best are never drawn.

**Order.** Tokens are ordered by scaled logit, highest first, and of equal ones by the lower index. The cuts keep a
prefix of this order: the tokens whose scaled logit is at least ``log(min_p)`` (the others have no mass); of these the
first ``top_k``; and of these the tokens that have less than ``top_p`` of the mass before them. The order of the cuts is
vLLM's. The drawn token is the one with unit ``floor(noise * kept mass)``: counted in this order if the row has top-k or
top-p, otherwise in the vocabulary's order.

The reference, the GPU and the CPU's C++ (``cpu/sampling.cpp``) all follow this definition: the same seed gives the same
token. Their exponentials may differ in the last bits of a float32. So the token may differ if a cumulative mass is
within that error of ``top_p`` or the noise.

**Selection.** The k-th token, the last token of top-p and the drawn token are found by histograms instead of a sort.
The first histogram is over the scaled logit with 32 bins per unit. Three more are over successively finer bits of its
key with 1024 bins each, until a bin holds a single key (``sampling_triton.py``). Tokens with equal keys have equal
masses, so a division finds the token among them.
"""

from typing import Any

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.triton_runtime import require_launchable
from quire.kernels.sampling.sampling_stats import CHUNK, RowStatistics, check_logits, row_statistics, tile_chunks

MASS_BITS = 40
"""The masses of 2**20 logits sum to at most 2**60."""

BINS = 1024

LEVELS = 3
"""Number of fine histograms: a coarse bin holds at most 2**30 keys, and each level resolves ten bits."""

STATE_COLUMNS = 8
"""Columns of a row's state, defined in ``sampling_triton.py``."""

TOP_K, TOP_P, DRAW = range(3)


def sample_reference(
    logits: torch.Tensor,
    noise: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Reference of ``sample``, by a sort; int64 ``[num_rows]``. Undefined for rows whose logits are not finite."""
    wide = logits.float()
    any_cut = bool(((top_k > 0) | (top_p < 1)).any())
    masses, order = _kept_masses(_scaled(wide, temperature), top_k, top_p, min_p, any_cut)
    running = masses.cumsum(-1)
    target = (noise * running[:, -1]).long().clamp(max=running[:, -1] - 1)
    chosen = (running <= target[:, None]).sum(-1, keepdim=True).clamp(max=wide.shape[1] - 1)
    best = (wide == wide.amax(-1, keepdim=True)).int().argmax(-1)
    return torch.where(temperature > 0, order.gather(-1, chosen)[:, 0], best)


def sampled_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    any_cut: bool = True,
) -> torch.Tensor:
    """Return float32 ``[num_rows, vocab]`` logits whose softmax is the distribution that ``sample`` draws from.

    These are scaled logits, with minus infinity for tokens that are never drawn. Rows with temperature 0 are unchanged.

    Args:
        any_cut: False if the caller knows that no row has top-k or top-p, which saves a sort.
    """
    wide = logits.float()
    scaled = _scaled(wide, temperature)
    masses, order = _kept_masses(scaled, top_k, top_p, min_p, any_cut)
    drawn = torch.zeros_like(masses, dtype=torch.bool).scatter_(-1, order, masses > 0)
    return torch.where((temperature > 0)[:, None], scaled.masked_fill(~drawn, -torch.inf), wide)


def _scaled(wide: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Subtract the best logit and divide by the temperature: no result overflows, however small the temperature."""
    below = wide - wide.amax(-1, keepdim=True)
    # Adding 0.0 turns -0.0 into 0.0, so that both have the same key.
    return below / torch.where(temperature > 0, temperature, 1.0)[:, None] + 0.0


def _kept_masses(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, any_cut: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the masses in the order of the draw, 0 for tokens that are cut, and the tokens in that order."""
    rows, vocab = scaled.shape
    masses = torch.where(scaled < min_p.log()[:, None], 0, (scaled.exp() * 2.0**MASS_BITS).long())
    rank = torch.arange(vocab, device=scaled.device)
    cut = (top_k > 0) | (top_p < 1)
    order = rank.expand(rows, vocab)
    if any_cut:
        bits = scaled.view(torch.int32)
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        order = torch.where(cut[:, None], keys.sort(dim=-1, descending=True, stable=True).indices, order)
    ordered = masses.gather(-1, order)
    ordered.masked_fill_((rank >= torch.where(top_k > 0, top_k, vocab)[:, None]) & cut[:, None], 0)
    before = ordered.cumsum(-1) - ordered
    limit = top_p.double() * ordered.sum(-1)
    ordered.masked_fill_((before >= limit[:, None]) & (top_p < 1)[:, None], 0)
    return ordered, order


def sample(
    logits: torch.Tensor,
    noise: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    any_top_k: bool = True,
    any_top_p: bool = True,
    statistics: RowStatistics | None = None,
) -> torch.Tensor:
    """Sample one token per row, by Triton kernels.

    Can be captured in a CUDA graph: the launches depend only on shapes and flags.

    Args:
        logits: float32, float16 or bfloat16 ``[num_rows, vocab]``, rows may be strided; not changed.
        noise: float64 ``[num_rows]`` in [0, 1), such as ``sampling_noise.uniform`` makes.
        temperature: float32 ``[num_rows]``; 0 for the best token.
        top_k: int32 ``[num_rows]``; 0 for no cut.
        top_p: float32 ``[num_rows]``; 1 for no cut.
        min_p: float32 ``[num_rows]`` in [0, 1]; 0 for no cut.
        any_top_k, any_top_p: False if the caller knows that no row has this cut, which saves launches. The cut is
            ignored in a row that has it.
        statistics: statistics of the same logits, if the caller has them already.

    Returns:
        int64 ``[num_rows]``. The best token in rows whose statistics are ``bad``.

    Raises:
        ValueError: a tensor does not have this shape, dtype or device.
        RuntimeError: Triton cannot launch here.
    """
    check_logits(logits)
    num_rows = logits.shape[0]
    parameters = {"noise": noise, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for name, tensor in parameters.items():
        dtype = {"noise": torch.float64, "top_k": torch.int32}.get(name, torch.float32)
        check_tensor(name, tensor, {"num_rows": num_rows}, (dtype,), logits.device)
    kernels = _kernels(logits.device)
    if num_rows == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    statistics = row_statistics(logits) if statistics is None else statistics
    state = torch.zeros(num_rows, STATE_COLUMNS, dtype=torch.int64, device=logits.device)
    row_arguments = (logits, statistics.best, temperature, top_k, top_p, min_p.log(), state)
    cuts = {"ANY_TOP_K": int(any_top_k), "ANY_TOP_P": int(any_top_p)}
    if any_top_k or any_top_p:
        _select(kernels, row_arguments, noise, cuts)
    return _draw(kernels, row_arguments, noise, statistics.tokens, cuts)


def _select(kernels: Any, row_arguments: tuple[torch.Tensor, ...], noise: torch.Tensor, cuts: dict[str, int]) -> None:
    """Find the drawn key of each row with a cut, and the index among tokens with this key; both go to its state."""
    logits, best, temperature, top_k, top_p, log_min_p, state = row_arguments
    num_rows, vocab = logits.shape
    # Histograms of counts and masses; ``narrow_kernel`` clears the fine ones after reading them.
    coarse, fine = torch.zeros(2, num_rows, 2, BINS, dtype=torch.int64, device=logits.device)
    chunks = (num_rows, -(-vocab // CHUNK))
    strides = (vocab, logits.stride(0))
    tile = {"CHUNK": CHUNK, "BINS": BINS, "num_warps": 8}
    kernels.coarse_histogram_kernel[chunks](*row_arguments, coarse, *strides, **cuts, **tile)
    for selection in (TOP_K, TOP_P, DRAW):
        if (selection == TOP_K and not cuts["ANY_TOP_K"]) or (selection == TOP_P and not cuts["ANY_TOP_P"]):
            continue
        which = {"SELECTION": selection, "BINS": BINS}
        kernels.begin_selection_kernel[(num_rows,)](
            coarse, best, temperature, state, top_k, top_p, noise, vocab, **which, **cuts
        )
        for _ in range(LEVELS):
            kernels.fine_histogram_kernel[chunks](logits, best, temperature, log_min_p, state, fine, *strides, **tile)
            kernels.narrow_kernel[(num_rows,)](fine, state, **which)


def _draw(
    kernels: Any,
    row_arguments: tuple[torch.Tensor, ...],
    noise: torch.Tensor,
    best_tokens: torch.Tensor,
    cuts: dict[str, int],
) -> torch.Tensor:
    logits = row_arguments[0]
    num_rows, vocab = logits.shape
    num_chunks = -(-vocab // CHUNK)
    sums = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=logits.device)
    strides = (vocab, logits.stride(0))
    kernels.chunk_weights_kernel[(num_rows, num_chunks)](
        *row_arguments, sums, *strides, **cuts, CHUNK=CHUNK, num_warps=8
    )
    tokens = torch.empty_like(best_tokens)
    kernels.pick_token_kernel[(num_rows,)](
        *row_arguments, sums, noise, best_tokens, tokens, *strides,
        **cuts, CHUNK=CHUNK, TILE_CHUNKS=tile_chunks(vocab), num_warps=8,
    )  # fmt: skip
    return tokens


def _kernels(device: torch.device) -> Any:
    require_launchable(device.type)
    from quire.kernels.sampling import sampling_triton

    return sampling_triton
