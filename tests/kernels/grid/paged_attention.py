"""The paged attention kernel against its reference, and the backend that uses it; run by test_triton.py."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from quire.kernels.paged_attention import (
    TOLERANCES,
    QueryTiles,
    paged_attention,
    paged_attention_reference,
    plan_tiles,
)
from quire.worker_proc.attention.backend import AttentionSpec
from quire.worker_proc.attention.triton_backend import TritonBackend

if TYPE_CHECKING:
    from quire.worker_proc.attention.backend import AttentionBackend

ROWS = {
    "decode": ([1, 1, 1], [1, 17, 70]),
    "drafts": ([4, 1, 3], [9, 40, 3]),
    "prefill": ([33, 8], [33, 8]),
    "mixed": ([1, 37, 1, 5], [33, 37, 64, 50]),
    "two tiles of tokens": ([70, 1], [130, 9]),
    "empty row": ([1, 0, 2, 0], [5, 0, 2, 20]),
    "block ends": ([8, 16, 1, 1], [32, 16, 64, 65]),
}


def check_case(case: Any) -> None:
    batch, dtype = case.batch, case.query.dtype
    scale = case.query.shape[-1] ** -0.5
    step = (batch.block_table, batch.query_start_loc, batch.seq_lens)
    expected = paged_attention_reference(case.query, case.filled_cache, *step, scale)
    tiles = plan_tiles(batch.query_lens_cpu, case.query.device)
    result = paged_attention(case.query, case.filled_cache, *step, tiles, scale)
    assert expected.isfinite().all()
    torch.testing.assert_close(result, expected, **TOLERANCES[dtype])
    assert result[case.num_tokens :].count_nonzero() == 0


@pytest.mark.parametrize("block_size", [8, 32])  # the other tests use 16
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_rows(rows: tuple[list[int], list[int]], block_size: int, dtype: torch.dtype, make_case: Any) -> None:
    check_case(make_case(*rows, dtype, block_size=block_size))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(2, 2, 80), (8, 2, 80), (7, 1, 80), (6, 2, 80), (20, 1, 80), (8, 2, 16), (6, 2, 48), (7, 1, 128)],
)
def test_heads(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, make_case: Any) -> None:
    for rows in (ROWS["decode"], ([1, 11], [21, 40])):
        check_case(make_case(*rows, dtype, num_heads, num_kv_heads, head_dim))


@pytest.mark.parametrize("head_dim", [8, 256, 512])
def test_extreme_head_dims(head_dim: int, dtype: torch.dtype, make_case: Any) -> None:
    check_case(make_case([1, 20], [40, 20], dtype, head_dim=head_dim))


def test_tiles_in_any_order(dtype: torch.dtype, make_case: Any) -> None:
    # 8 tokens of 7 heads leave lanes over, which belong to the next tile: it must not matter which is stored last.
    case = make_case([20], [30], dtype, num_heads=7, num_kv_heads=1)
    batch, scale = case.batch, 0.2
    step = (batch.block_table, batch.query_start_loc, batch.seq_lens)
    table = torch.tensor([[0, 16], [0, 8], [0, 0]], dtype=torch.int32, device=case.query.device)
    result = paged_attention(case.query, case.filled_cache, *step, QueryTiles(table, 8, 20), scale)
    expected = paged_attention_reference(case.query, case.filled_cache, *step, scale)
    torch.testing.assert_close(result, expected, **TOLERANCES[dtype])


def test_padding_is_zero(dtype: torch.dtype, make_case: Any) -> None:
    check_case(make_case([1, 3], [30, 3], dtype, padding=4))


def test_large_scores_do_not_overflow(dtype: torch.dtype, make_case: Any) -> None:
    case = make_case([1, 20], [40, 60], dtype)
    batch = case.batch
    step = (batch.block_table, batch.query_start_loc, batch.seq_lens)
    tiles = plan_tiles(batch.query_lens_cpu, case.query.device)
    # exp of these scores is infinite in float32; only the differences to the largest are not.
    result = paged_attention(case.query * 1000, case.filled_cache, *step, tiles, 1.0)
    assert result.isfinite().all()


def test_no_tokens(make_case: Any) -> None:
    check_case(make_case([0], [5], torch.float32, padding=2))


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_backend(rows: tuple[list[int], list[int]], dtype: torch.dtype, make_case: Any) -> None:
    backend: AttentionBackend = TritonBackend()
    case = make_case(*rows, dtype, padding=2)
    batch, scale = case.batch, 0.2
    assert backend.kv_cache_shape(*case.kv_cache.shape[1:]) == case.kv_cache.shape
    plan = backend.plan(batch)
    result = backend.forward(case.query, case.key, case.value, case.kv_cache, plan, AttentionSpec(4, 2, 32, scale))
    torch.testing.assert_close(case.kv_cache, case.filled_cache, rtol=0, atol=0, equal_nan=True)
    expected = paged_attention_reference(
        case.query, case.filled_cache, batch.block_table, batch.query_start_loc, batch.seq_lens, scale
    )
    torch.testing.assert_close(result, expected, **TOLERANCES[dtype])


def test_backend_refuses_another_block_size(make_case: Any) -> None:
    case = make_case([1], [9], torch.float32, block_size=8)
    backend = TritonBackend()
    cache = torch.zeros(2, 2, 16, 2, 32, device=case.query.device)
    with pytest.raises(ValueError, match=r"kv_cache: dimension 2 \(block_size\) is 16, expected 8"):
        backend.forward(case.query, case.key, case.value, cache, backend.plan(case.batch), AttentionSpec(4, 2, 32, 1.0))


def test_tiles_must_fit_the_query(make_case: Any) -> None:
    case = make_case([1], [9], torch.float32)
    tiles = plan_tiles(np.array([5], dtype=np.int32), case.query.device)
    step = (case.batch.block_table, case.batch.query_start_loc, case.batch.seq_lens)
    with pytest.raises(ValueError, match=r"query: dimension 0 \(num_tokens\) is 1, but the tiles are of 5"):
        paged_attention(case.query, case.filled_cache, *step, tiles, 1.0)
