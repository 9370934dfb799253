"""Plans made on the device compared with plans made on the host, and attention with them; run by test_triton.py."""

from typing import Any

import numpy as np
import pytest
import torch

from quire.kernels.attention.attention_decode import DecodeBuffers, allocate_decode, plan_decode
from quire.kernels.attention.attention_plan import AttentionPlan, plan_prefix
from quire.kernels.attention.attention_tiles import AttentionShape
from quire.kernels.attention.attention_work import Visible, cut_tiles, tile_rows
from quire.kernels.attention.paged_attention import TOLERANCES, paged_attention_reference, prepare_attention

SHAPE = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)

# Query lengths and sequence lengths; both are 0 for a graph's padding rows.
BATCHES = {
    "one long row": ([1], [5000]),
    "long among short": ([1, 1, 0, 1, 1, 0], [300, 200, 0, 9000, 1, 0]),
    "drafts": ([4, 1, 0, 3], [900, 130, 0, 5]),
    "uniform": ([1] * 20, [700] * 20),
    "nothing": ([0, 0], [0, 0]),
}
LOCAL = [{}, {"window": 200}, {"chunk": 200}]


def rows_on(device: torch.device, query_lens: list[int], seq_lens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.tensor(np.cumsum([0, *query_lens]), dtype=torch.int32, device=device)
    return starts, torch.tensor(seq_lens, dtype=torch.int32, device=device)


def expected_tables(
    buffers: DecodeBuffers, batch: tuple[list[int], list[int]], visible: Visible, prefix: Any
) -> tuple[list[list[int]], list[list[int]]]:
    lens, seqs = (np.array(values, dtype=np.int64) for values in batch)
    tokens = buffers.limits.tile_tokens
    tiles = tile_rows(lens, seqs, np.flatnonzero(lens), tokens, visible)
    num_prefix, first_slot = (prefix.num_partials, prefix.num_slots) if prefix else (0, 0)
    work = cut_tiles(tiles, buffers.limits.cut, tokens, num_prefix, first_slot)
    assert first_slot + work.num_slots <= len(buffers.scratch.acc)
    # The first slot of a token without pieces is undefined.
    merges = [[t, first if n > num_prefix else -1, n, stride] for t, first, n, stride in work.merges.tolist()]
    return work.pieces.tolist(), merges


def check_plan(plan: AttentionPlan, expected: tuple[list[list[int]], list[list[int]]]) -> None:
    pieces, merges = plan.sections[-1].pieces.tolist(), plan.merges.tolist()
    assert [piece for piece in pieces if piece[3] > piece[2]] == expected[0]
    own = [[t, first if n > plan.num_prefix else -1, n, stride] for t, first, n, stride in merges if n]
    assert own == expected[1]


@pytest.mark.parametrize("local", LOCAL, ids=str)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_equals_the_host_plan(batch: tuple[list[int], list[int]], local: dict[str, int], device: torch.device) -> None:
    buffers = allocate_decode(SHAPE, 20, device, max_query_len=4, programs=12)
    # The content of an earlier step must have no effect.
    buffers.pieces.fill_(77)
    buffers.merges.fill_(77)
    plan = plan_decode(buffers, *rows_on(device, *batch), **local)
    check_plan(plan, expected_tables(buffers, batch, Visible(**local), None))


def test_equals_the_host_plan_with_a_common_prefix(device: torch.device) -> None:
    batch = ([1, 2, 0, 1, 3], [144, 3000, 0, 500, 146])
    prefix = plan_prefix(SHAPE, 10, 144, device, programs=12)
    buffers = allocate_decode(SHAPE, 20, device, max_query_len=4, programs=12, max_prefix=prefix)
    plan = plan_decode(buffers, *rows_on(device, *batch), prefix=prefix)
    check_plan(plan, expected_tables(buffers, batch, Visible(prefix_len=144), prefix))
    assert plan.positions is not None
    assert plan.positions[:7].tolist() == [143, 2998, 2999, 499, 143, 144, 145]


def test_row_with_too_many_tokens_gets_no_work(device: torch.device) -> None:
    buffers = allocate_decode(SHAPE, 4, device, programs=8)
    plan = plan_decode(buffers, *rows_on(device, [2, 1], [9, 9]))
    assert [piece[:4] for piece in plan.sections[0].pieces.tolist() if piece[3] > piece[2]] == [[1, 0, 0, 9]]


@pytest.mark.parametrize("local", [{}, {"window": 150}, {"chunk": 130}], ids=str)
def test_attention_with_plans_of_several_steps(
    local: dict[str, int], main_dtype: torch.dtype, make_case: Any, device: torch.device
) -> None:
    shape = AttentionShape(2, 1, 32, main_dtype)
    buffers = allocate_decode(shape, 6, device, max_query_len=2, programs=3, min_piece=128)
    buffers.scratch.acc.fill_(torch.nan)
    for batch in (([1, 2, 0, 1], [40, 290, 0, 1]), ([1, 1, 1, 0, 0], [260, 17, 270, 0, 0])):
        case = make_case(*batch, main_dtype, 2, 1, padding=3, **local)
        step = (case.batch.block_table, case.batch.query_start_loc, case.batch.seq_lens)
        plan = plan_decode(buffers, *step[1:], **local)
        attend = prepare_attention(case.query, case.filled_cache, *step, plan, 0.2)
        result = attend(case.query, case.filled_cache)
        expected = paged_attention_reference(case.query, case.filled_cache, *step, 0.2, **local)
        torch.testing.assert_close(result, expected, **TOLERANCES[main_dtype])
        assert result[case.num_tokens :].count_nonzero() == 0


def test_attention_with_a_common_prefix(main_dtype: torch.dtype, make_case: Any, device: torch.device) -> None:
    case = make_case([1, 1, 1], [129, 300, 140], main_dtype, 2, 1, prefix_len=128)
    shape = AttentionShape(2, 1, 32, main_dtype)
    prefix = plan_prefix(shape, 3, 128, device)
    buffers = allocate_decode(shape, 3, device, programs=4, min_piece=128, max_prefix=prefix)
    step = (case.batch.block_table, case.batch.query_start_loc, case.batch.seq_lens)
    plan = plan_decode(buffers, *step[1:], prefix=prefix)
    attend = prepare_attention(case.query, case.filled_cache, *step, plan, 0.2)
    result = attend(case.query, case.filled_cache)
    expected = paged_attention_reference(case.query, case.filled_cache, *step, 0.2)
    torch.testing.assert_close(result, expected, **TOLERANCES[main_dtype])
