"""Paged attention without triton: the reference, the work list's properties, and the launchers' argument checks."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from quire.kernels.attention.attention_decode import allocate_decode, plan_decode
from quire.kernels.attention.attention_plan import plan_attention, plan_prefix
from quire.kernels.attention.attention_tiles import (
    DECODE,
    FIXED,
    KEY_ALIGN,
    MAX_HEAD_DIM,
    PREFILL,
    AttentionShape,
    tiles_of,
)
from quire.kernels.attention.attention_work import (
    NO_SLOT,
    CutRule,
    QueryTiles,
    Visible,
    cut_tiles,
    prefix_pieces,
    round_up,
    tile_rows,
)
from quire.kernels.attention.paged_attention import QUERY_DTYPES, paged_attention_reference, prepare_attention
from quire.kernels.cache.cache_write import write_cache_reference

CPU = torch.device("cpu")
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)


@pytest.mark.parametrize("query_len", [1, 5, 13])
@pytest.mark.parametrize("local", [{}, {"window": 4}, {"chunk": 5}], ids=str)
@pytest.mark.parametrize("image", [range(0), range(5, 10)], ids=str)
def test_reference_equals_dense_attention(query_len: int, local: dict[str, int], image: range) -> None:
    rng = torch.Generator().manual_seed(0)
    seq_len, num_heads, num_kv_heads, head_dim, block_size = 13, 6, 2, 8, 4
    blocks = torch.tensor([3, 1, 5, 2])
    cache = torch.full((2, 6, block_size, num_kv_heads, head_dim), torch.nan, dtype=torch.float64)
    key, value = torch.randn(2, seq_len, num_kv_heads, head_dim, generator=rng, dtype=torch.float64)
    position = torch.arange(seq_len)
    write_cache_reference(key, value, cache, blocks[position // block_size] * block_size + position % block_size)
    query = torch.randn(query_len, num_heads, head_dim, generator=rng, dtype=torch.float64)
    starts, lens = torch.tensor([0, query_len]), torch.tensor([seq_len])
    last = torch.tensor([image[-1] if at in image else at for at in range(seq_len)])
    step = (query, cache, blocks[None].int(), starts, lens)
    result = paged_attention_reference(*step, 0.3, last_keys=last[-query_len:], **local)
    mask = position <= last[:, None]
    if "window" in local:
        mask &= position > position[:, None] - local["window"]
    if "chunk" in local:
        mask &= position // local["chunk"] == position[:, None] // local["chunk"]
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in (query, key, value)),
        attn_mask=mask[seq_len - query_len :],
        scale=0.3,
        enable_gqa=True,
    )
    torch.testing.assert_close(result, dense[0].transpose(0, 1))


def test_reference_of_worked_examples() -> None:
    # One query of 1 over keys 1 and 3 with values 10 and 20: scores s * 1 and s * 3.
    cache = torch.tensor([[1.0, 3.0], [10.0, 20.0]]).view(2, 1, 2, 1, 1)
    step = (torch.ones(1, 1, 1), cache, torch.zeros(1, 1).int(), torch.tensor([0, 1]), torch.tensor([2]))

    def softmax(*scores: float) -> torch.Tensor:
        return torch.tensor(scores).softmax(0)[:2] @ torch.tensor([10.0, 20.0])

    def attend(scale: float, **options: Any) -> torch.Tensor:
        return paged_attention_reference(*step, scale, **options).view(())

    one = torch.ones(1)
    torch.testing.assert_close(attend(0.5), softmax(0.5, 1.5))
    torch.testing.assert_close(attend(0.5, sinks=one * 2), softmax(0.5, 1.5, 2.0))
    capped = [2 * float(torch.tanh(torch.tensor(s / 2))) for s in (0.5, 1.5)]
    torch.testing.assert_close(attend(0.5, soft_cap=2.0), softmax(*capped))
    torch.testing.assert_close(attend(0.5, k_scale=one * 2, v_scale=one * 3), 3 * softmax(1.0, 3.0))


def test_reference_does_not_read_left_of_the_window() -> None:
    cache = torch.zeros(2, 1, 4, 1, 1)
    table = torch.tensor([[99, 99, 0]], dtype=torch.int32)
    step = (torch.ones(1, 1, 1), cache, table, torch.tensor([0, 1]), torch.tensor([10]))
    assert paged_attention_reference(*step, 1.0, window=2).isfinite().all()
    assert paged_attention_reference(*step, 1.0, chunk=4).isfinite().all()
    for too_far in ({"window": 3}, {"chunk": 7}):
        with pytest.raises(IndexError):
            paged_attention_reference(*step, 1.0, **too_far)


LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9000)), min_size=1, max_size=12)
LOCAL = st.sampled_from([Visible(), Visible(window=700), Visible(chunk=700), Visible(prefix_len=272)])


def check_pieces(tiles: QueryTiles, pieces: np.ndarray[Any, Any]) -> dict[tuple[int, int], list[list[int]]]:
    """Check that each tile's pieces, in order, cover its visible keys exactly once; return the pieces by tile."""
    found: dict[tuple[int, int], list[list[int]]] = {}
    for row, first_token, *rest in pieces.tolist():
        found.setdefault((row, first_token), []).append(rest)
    for row, token, first, end in zip(tiles.row, tiles.first_token, tiles.first_key, tiles.end_key, strict=True):
        own = found.get((row, token), [])
        assert [a for a, _, _ in own] == [first, *(b for _, b, _ in own[:-1])][: len(own)]
        assert (own[-1][1] == end) if own else (end <= first)
        assert all(start < stop for start, stop, _ in own)
        assert all(start % KEY_ALIGN == 0 for start, _, _ in own[1:])
    return found


@settings(deadline=None, max_examples=examples(60))
@given(LENGTHS, LOCAL, st.integers(1, 40), st.sampled_from([1, 8, 64]), st.sampled_from([128, 256]))
def test_pieces_partition_the_visible_keys(
    rows: list[tuple[int, int]], visible: Visible, capacity: int, tile_tokens: int, min_piece: int
) -> None:
    lens = np.array([query_len for query_len, _ in rows])
    seqs = lens + np.array([context for _, context in rows])
    tiles = tile_rows(lens, seqs, np.arange(len(rows)), tile_tokens, visible)
    assert tiles.num_tokens.sum() == lens.sum()
    num_prefix = int(visible.prefix_len > 0)
    work = cut_tiles(tiles, CutRule(capacity, min_piece), tile_tokens, num_prefix, first_slot=7)
    found = check_pieces(tiles, work.pieces)

    # Bounds: at most tiles + capacity pieces, and none longer than 1.5 times its share.
    assert len(work.pieces) <= len(tiles.row) + capacity
    total = int((tiles.end_key - tiles.first_key // KEY_ALIGN * KEY_ALIGN).clip(0).sum())
    share = max(min_piece, round_up(-(-total // capacity)))
    assert (work.pieces[:, 3] - work.pieces[:, 2]).max(initial=0) <= round_up(1.5 * share)

    # No slot is used twice, and a merge has exactly the slots of its token's pieces.
    slots = work.pieces[:, 4]
    assert (slots == NO_SLOT).sum() == sum(len(own) == 1 for own in found.values()) * (1 - num_prefix)
    used = [7 + i * tile_tokens for i in range((slots != NO_SLOT).sum())]
    assert slots[slots != NO_SLOT].tolist() == used
    assert work.num_slots == len(used) * tile_tokens
    merged = {}
    for token, slot, count, stride in work.merges.tolist():
        merged[token] = [slot + i * stride for i in range(count - num_prefix)]
    expected = {}
    start_of_row = np.cumsum(lens) - lens
    for row, first, count in zip(tiles.row, tiles.first_token, tiles.num_tokens, strict=True):
        own = found.get((row, first), [])
        if len(own) > 1 or num_prefix:
            expected |= {start_of_row[row] + first + i: [slot + i for *_, slot in own] for i in range(count)}
    assert merged == expected


def test_long_rows_are_cut_and_equal_rows_stay_whole() -> None:
    def pieces_of(seqs: list[int]) -> list[int]:
        lens = np.ones(len(seqs), dtype=np.int64)
        tiles = tile_rows(lens, np.array(seqs), np.arange(len(seqs)), 1, Visible())
        return np.bincount(cut_tiles(tiles, CutRule(66), 1).pieces[:, 0]).tolist()

    assert pieces_of([4096] * 64) == [1] * 64
    assert pieces_of([4096] * 1000) == [1] * 1000
    assert pieces_of([32768]) == [64]
    assert pieces_of([128]) == [1]
    assert pieces_of([4096, 131072, *([4096] * 31)]) == [1, 32, *([1] * 31)]


@settings(deadline=None, max_examples=examples(30))
@given(LENGTHS, st.sampled_from([Visible(), Visible(window=700), Visible(chunk=700)]))
def test_fixed_pieces_end_at_multiples(rows: list[tuple[int, int]], visible: Visible) -> None:
    lens = np.array([query_len for query_len, _ in rows])
    seqs = lens + np.array([context for _, context in rows])
    tiles = tile_rows(lens, seqs, np.arange(len(rows)), 64, visible)
    work = cut_tiles(tiles, CutRule(1, fixed_split=512), 64)
    check_pieces(tiles, work.pieces)
    for key_start, key_end in work.pieces[:, 2:4]:
        assert key_start // 512 == (key_end - 1) // 512


@settings(deadline=None, max_examples=examples(50))
@given(st.integers(1, 200), st.sampled_from([16, 272, 5000]), st.sampled_from([1, 8, 64]), st.integers(1, 30))
def test_a_prefix_pass_covers_every_token_and_key(num_tokens: int, prefix_len: int, tile: int, capacity: int) -> None:
    pieces, num_partials = prefix_pieces(num_tokens, prefix_len, tile, CutRule(capacity))
    assert len(pieces) == -(-num_tokens // tile) * num_partials
    for first in range(0, num_tokens, tile):
        own = pieces[pieces[:, 1] == first]
        assert own[:, 2].tolist() == [0, *own[:-1, 3]]
        assert own[-1, 3] == prefix_len
        assert own[:, 4].tolist() == [first + i * num_tokens for i in range(num_partials)]


@pytest.mark.parametrize("dtype", QUERY_DTYPES)
@pytest.mark.parametrize("capability", [0, 80, 90, 100])
def test_every_shape_has_tiles(dtype: torch.dtype, capability: int) -> None:
    for head_dim in (1, 64, 80, 128, 256, MAX_HEAD_DIM):
        for group in (1, 7, 71):
            shape = AttentionShape(2 * group, 2, head_dim, dtype)
            fixed = {tiles_of(shape, "fixed", tokens, capability) for tokens in (1, 8, 64)}
            assert len(fixed) == 1
            assert tiles_of(shape, "decode", 1, capability).lanes >= 16
    for tiles in (*DECODE.values(), *PREFILL.values(), *FIXED.values()):
        assert KEY_ALIGN % tiles.keys == 0
        assert tiles.keys >= 16


def lengths(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def test_mixed_step_has_a_decode_and_a_prefill_launch() -> None:
    plan = plan_attention(lengths(1, 0, 200, 3), lengths(500, 5, 300, 7), SHAPE, CPU)
    assert [(section.regime, section.tile_tokens) for section in plan.sections] == [("decode", 4), ("prefill", 64)]
    assert plan.num_tokens == 204
    assert plan_attention(lengths(), lengths(), SHAPE, CPU).sections == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": -1}, "window -1, .* negative"),
        ({"window": 4, "chunk": 8}, "window 4, chunk 8: at most one may be given"),
        ({"common_prefix_len": 16, "window": 4}, "common_prefix_len: 16 cannot be combined with window 4"),
        ({"fixed_split": 100}, "fixed_split: 100 is not a multiple of 128"),
        ({"min_piece": 64}, "min_piece: 64 is not a positive multiple of 128"),
    ],
)
def test_plan_rejects_contradicting_options(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_attention(lengths(1), lengths(9), SHAPE, CPU, **options)


def test_plan_rejects_lengths_and_buffers_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="query_lens: row"):
        plan_attention(lengths(2), lengths(1), SHAPE, CPU)
    with pytest.raises(ValueError, match="common_prefix_len: 16 exceeds a row's 9 keys"):
        plan_attention(lengths(1, 1), lengths(20, 9), SHAPE, CPU, common_prefix_len=16)
    with pytest.raises(ValueError, match=r"max_rows: 0 is not in \[1, 8192\]"):
        allocate_decode(SHAPE, 0, CPU)
    buffers = allocate_decode(SHAPE, 2, CPU)
    starts, seqs = torch.arange(4, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"seq_lens: dimension 0 \(num_rows\) is 3, above the buffers' 2"):
        plan_decode(buffers, starts, seqs)
    with pytest.raises(ValueError, match="prefix: 2 partial results do not fit buffers for 0"):
        plan_decode(buffers, starts[:3], seqs[:2], prefix=plan_prefix(SHAPE, 2, 128, CPU))


def test_launcher_rejects_wrong_tensors() -> None:
    query, cache = torch.zeros(5, 4, 16), torch.zeros(2, 3, 8, 2, 16)
    rows = {
        "block_table": torch.zeros(2, 4, dtype=torch.int32),
        "query_start_loc": torch.zeros(3, dtype=torch.int32),
        "seq_lens": torch.zeros(2, dtype=torch.int32),
    }
    plan = plan_attention(lengths(5, 0), lengths(5, 0), SHAPE, CPU)

    def rejects(message: str, **changed: Any) -> None:
        arguments = {"query": query, "kv_cache": cache, "plan": plan, "scale": 1.0} | rows | changed
        with pytest.raises(ValueError, match=message):
            prepare_attention(**arguments)

    rejects(r"query: dimension 1 \(num_heads\) is 3, not a multiple of 2 KV heads", query=query[:, :3])
    rejects(r"query: dimension 2 \(head_dim\) is 600, not in \[1, 512\]", query=torch.zeros(5, 4, 600))
    rejects(r"kv_cache: dimension 4 \(head_dim\) is 8, expected 16", kv_cache=cache[..., :8])
    rejects("kv_cache: dtype is torch.float16", kv_cache=cache.half())
    rejects("plan: shape is AttentionShape", kv_cache=cache.view(2, 3, 4, 4, 16))
    rejects(r"block_table: dimension 0 \(num_rows\) is 1, expected 2", block_table=rows["block_table"][:1])
    rejects(r"query: dimension 0 \(num_tokens\) is 4, but the plan is for 5", query=query[:4])
    rejects(r"sinks: dimension 0 \(num_heads\) is 3, expected 4", sinks=torch.zeros(3))
    rejects("sinks: dtype is torch.float16", sinks=torch.zeros(4).half())
    rejects("k_scale, v_scale: a cache of torch.float32 has no scales", v_scale=torch.ones(1))
    rejects("k_scale: dimension 0", kv_cache=cache.to(torch.float8_e5m2), k_scale=torch.ones(3))
    three = {"query_start_loc": torch.zeros(4, dtype=torch.int32), "seq_lens": torch.zeros(3, dtype=torch.int32)}
    rejects(r"\(num_rows\) is 3, but the plan is for 2", block_table=torch.zeros(3, 4, dtype=torch.int32), **three)
    prefixed = plan_attention(lengths(5, 0), lengths(9, 9), SHAPE, CPU, common_prefix_len=8, num_tokens=6)
    rejects(r"query: dimension 0 \(num_tokens\) is 5, but the prefix is planned for 6", plan=prefixed)
