"""One token per row by temperature, top-k, top-p and min-p, without a sort and without a word from the host.

**Mass.** A token's weight ``exp((logit - best) / temperature)`` is cut to whole 2**-40ths of the best one's: its
mass, an int64. So sums of masses are exact in any order, a row's token does not depend on how the vocabulary is cut
into chunks, and "the token that holds unit ``t`` of the mass" is a selection that needs no order of summation. Weights
below 2**-40 of the best are 0: such a token is never drawn.

**Order.** Scaled logits, best first; of equals the lower index. All that the cuts keep is a first part of this order:
the first ``top_k``; of those every token while the mass before it is below ``top_p`` of theirs; and of those every one
whose scaled logit is at least ``log(min_p)``. The draw is the token that holds unit ``floor(noise * kept mass)``: in
this order where the row has a top-k or a top-p, and in the order of the vocabulary where it has neither.

So draw the reference, the GPU and the CPU's C++ (``cpu/sampling.cpp``): the same seed gives the same token. Their
exponentials may differ in the last bits of a float32: a token whose share of the sum ends within that of ``top_p`` or
the noise may fall to the other side.

**Selection.** The k-th token, the last of top-p and the drawn one are each found by histograms, not by a sort: first by
the scaled logit, 32 bins to the unit, and then three times by ever finer bits of its key, 1024 bins each, until a bin
holds a single key (``sampling_triton.py``). Equal keys have equal masses, so that a division tells which of them.
"""

from typing import Any

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.triton_runtime import require_launchable
from quire.kernels.sampling.sampling_stats import CHUNK, RowStatistics, check_logits, row_statistics, tile_chunks

MASS_BITS = 40
"""A row of 2**20 logits then sums up to 2**60 at most."""

BINS = 1024

LEVELS = 3
"""A coarse bin holds at most 2**30 keys, and each level takes ten bits of them."""

STATE_COLUMNS = 8
"""``sampling_triton.py`` says what they are."""

TOP_K, TOP_P, DRAW = range(3)


def sample_reference(
    logits: torch.Tensor,
    noise: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """What ``sample`` chooses, by a sort; int64 ``[num_rows]``. Rows that cannot be sampled are not looked at."""
    wide = logits.float()
    masses, order = _kept_masses(_scaled(wide, temperature), top_k, top_p, min_p)
    running = masses.cumsum(-1)
    target = (noise * running[:, -1]).long().clamp(max=running[:, -1] - 1)
    chosen = (running <= target[:, None]).sum(-1, keepdim=True).clamp(max=wide.shape[1] - 1)
    best = (wide == wide.amax(-1, keepdim=True)).int().argmax(-1)
    return torch.where(temperature > 0, order.gather(-1, chosen)[:, 0], best)


def sampled_logits(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Float32 ``[num_rows, vocab]``, whose softmax is the distribution that ``sample`` draws from.

    Scaled logits, minus infinity for what is never drawn. Rows with temperature 0 are as they were.
    """
    wide = logits.float()
    scaled = _scaled(wide, temperature)
    masses, order = _kept_masses(scaled, top_k, top_p, min_p)
    drawn = torch.zeros_like(masses, dtype=torch.bool).scatter_(-1, order, masses > 0)
    return torch.where((temperature > 0)[:, None], scaled.masked_fill(~drawn, -torch.inf), wide)


def _scaled(wide: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Logits below the best one, over the temperature: however small that is, nothing overflows upwards."""
    below = wide - wide.amax(-1, keepdim=True)
    # -0.0 less 0.0 is -0.0, and both zeros are equal.
    return below / torch.where(temperature > 0, temperature, 1.0)[:, None] + 0.0


def _kept_masses(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masses in the order of the draw, 0 for what the cuts leave out; and the tokens in that order."""
    rows, vocab = scaled.shape
    masses = (scaled.exp() * 2.0**MASS_BITS).long()
    rank = torch.arange(vocab, device=scaled.device)
    cut = (top_k > 0) | (top_p < 1)
    order = rank.expand(rows, vocab)
    if bool(cut.any()):
        bits = scaled.view(torch.int32)
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        order = torch.where(cut[:, None], keys.sort(dim=-1, descending=True, stable=True).indices, order)
    ordered = masses.gather(-1, order)
    ordered[(rank >= torch.where(top_k > 0, top_k, vocab)[:, None]) & cut[:, None]] = 0
    before = ordered.cumsum(-1) - ordered
    limit = top_p.double() * ordered.sum(-1)
    ordered[(before >= limit[:, None]) & (top_p < 1)[:, None]] = 0
    ordered[scaled.gather(-1, order) < min_p.log()[:, None]] = 0
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
    """Choose one token per row, by Triton kernels. Fit for a CUDA graph: the launches follow from shapes and flags.

    Args:
        logits: float32, float16 or bfloat16 ``[num_rows, vocab]``, rows may be strided; not changed.
        noise: float64 ``[num_rows]`` in [0, 1), such as ``sampling_noise.uniform`` makes.
        temperature: float32 ``[num_rows]``; 0: the row takes its best token.
        top_k: int32 ``[num_rows]``; 0: no such cut.
        top_p: float32 ``[num_rows]``; 1: no such cut.
        min_p: float32 ``[num_rows]`` in [0, 1]; 0: no such cut.
        any_top_k, any_top_p: False: the caller knows that no row has the cut, which saves launches. A row that has it
            nevertheless is sampled as if it had not.
        statistics: of the same logits, where the caller has them already.

    Returns:
        int64 ``[num_rows]``. Rows whose statistics say ``bad`` have their best token there.

    Raises:
        ValueError: a tensor does not have the shape, dtype or place above.
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
    """Leave in the state of each row with a cut which key, and which of its equals, is drawn."""
    logits, best, temperature, top_k, top_p, _, state = row_arguments
    num_rows, vocab = logits.shape
    # Counts and masses; a narrowing clears the fine ones behind it.
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
            kernels.fine_histogram_kernel[chunks](logits, best, temperature, state, fine, *strides, **tile)
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
