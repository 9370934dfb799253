"""Variants of the sampling kernels to compile ahead of time."""

from collections.abc import Iterator
from typing import Any

from kernel_variant import Variant

from quire.kernels.sampling import (
    sampling,
    sampling_logprobs,
    sampling_logprobs_triton,
    sampling_noise_triton,
    sampling_stats,
    sampling_stats_triton,
    sampling_triton,
)
from quire.kernels.sampling.sampling_noise import TILE_ROWS

TYPES = {
    "logits": "*bf16",
    "top_k": "*i32",
    "chunk_keys": "*i32",
    "chunk_tokens": "*i32",
    **dict.fromkeys(("candidate_keys", "candidate_tokens", "above"), "*i32"),
    "bad": "*i1",
    "positions": "*i32",
    **dict.fromkeys(("best", "temperature", "top_p", "log_min_p", "chunk_sums", "log_sum_exp", "values"), "*fp32"),
    **dict.fromkeys(("state", "histogram", "sums", "seeds", "tokens", "best_tokens", "token_ids", "ranks"), "*i64"),
    "noise": "*fp64",
}


def variant(name: str, kernel: Any, constants: dict[str, int], num_warps: int = 8) -> Variant:
    return Variant(name, kernel, TYPES, constants, {"num_warps": num_warps})


def variants() -> Iterator[Variant]:
    chunk, bins = {"CHUNK": sampling_stats.CHUNK}, {"BINS": sampling.BINS}
    chunks = {"TILE_CHUNKS": sampling_stats.tile_chunks(1 << 18)}
    cuts = {"ANY_TOP_K": 1, "ANY_TOP_P": 1}
    yield variant("sampling noise", sampling_noise_triton.uniform_kernel, {"TILE_ROWS": TILE_ROWS}, 4)
    yield variant("sampling chunk statistics bf16", sampling_stats_triton.chunk_statistics_kernel, chunk)
    yield variant("sampling row statistics", sampling_stats_triton.row_statistics_kernel, chunks, 4)
    yield variant("sampling coarse bf16", sampling_triton.coarse_histogram_kernel, chunk | bins | cuts)
    yield variant("sampling fine bf16", sampling_triton.fine_histogram_kernel, chunk | bins)
    which = bins | {"SELECTION": sampling.DRAW}
    yield variant("sampling begin", sampling_triton.begin_selection_kernel, which | cuts, 4)
    yield variant("sampling narrow", sampling_triton.narrow_kernel, which, 4)
    yield variant("sampling pick bf16", sampling_triton.pick_token_kernel, chunk | chunks | cuts)
    logprobs = sampling_logprobs.launch_constants(20)
    num_warps = logprobs.pop("num_warps")
    candidates, rows = sampling_logprobs_triton.chunk_candidates_kernel, sampling_logprobs_triton.row_logprobs_kernel
    yield variant("sampling candidates bf16", candidates, logprobs | chunk, num_warps)
    yield variant("sampling logprobs bf16", rows, logprobs | chunks, num_warps)
