"""The attention kernels compared with their reference, and the Triton backend; run by test_triton.py."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from quire.kernels.attention.attention_plan import AttentionPlan, plan_attention
from quire.kernels.attention.attention_tiles import AttentionShape
from quire.kernels.attention.paged_attention import TOLERANCES, paged_attention_reference, prepare_attention
from quire.kernels.cache.cache_write import write_cache_reference
from quire.kernels.common.fp8 import FP8_DTYPES, as_bits
from quire.worker_proc.attention import triton_backend
from quire.worker_proc.attention.backend import AttentionSpec, SharedPrefix
from quire.worker_proc.attention.triton_backend import TritonBackend

if TYPE_CHECKING:
    from quire.worker_proc.attention.backend import AttentionBackend

ROWS = {
    "decode": ([1, 1, 1], [1, 17, 70]),
    "drafts": ([4, 1, 3], [9, 40, 3]),
    "prefill": ([33, 9], [33, 9]),
    "mixed": ([1, 37, 1, 5], [33, 37, 64, 50]),
    "two tiles of tokens": ([70, 1], [130, 9]),
    "empty row": ([1, 0, 2, 0], [5, 0, 2, 20]),
    "block ends": ([8, 16, 1, 1], [32, 16, 64, 65]),
}
LONG = ([1, 3, 9, 0], [260, 200, 300, 3])
"""With ``min_piece`` 128 and room for that many programs, every row but the last is cut into pieces."""

CUT = {"programs": 16, "min_piece": 128}


def interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def rows_of(case: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return case.batch.block_table, case.batch.query_start_loc, case.batch.seq_lens


def plan_case(case: Any, **options: Any) -> AttentionPlan:
    num_tokens, num_heads, head_dim = case.query.shape
    num_kv_heads = case.kv_cache.shape[3]
    batch = case.batch
    return plan_attention(
        batch.query_lens_cpu,
        batch.seq_lens_cpu,
        AttentionShape(num_heads, num_kv_heads, head_dim, case.query.dtype),
        case.query.device,
        window=batch.window,
        chunk=batch.chunk,
        num_tokens=num_tokens,
        last_keys=batch.last_keys,
        **options,
    )


def paged_attention(query: torch.Tensor, kv_cache: torch.Tensor, *step: Any, **options: Any) -> torch.Tensor:
    attend = prepare_attention(query, kv_cache, *step, **options)
    options.pop("soft_cap", None)
    return attend(query, as_bits(kv_cache), **options)


def check_case(case: Any, plan_options: dict[str, Any] | None = None, **options: Any) -> None:
    batch = case.batch
    scale = case.query.shape[-1] ** -0.5
    step = (case.query, case.filled_cache, *rows_of(case))
    plan = plan_case(case, **(plan_options or {}))
    of_plan = {"window": batch.window, "chunk": batch.chunk, "last_keys": plan.last_keys}
    expected = paged_attention_reference(*step, scale, **of_plan, **options)
    result = paged_attention(*step, plan, scale, **options)
    assert expected.isfinite().all()
    torch.testing.assert_close(result, expected, **TOLERANCES[case.query.dtype])
    assert result[case.num_tokens :].count_nonzero() == 0


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_rows(rows: tuple[list[int], list[int]], dtype: torch.dtype, make_case: Any) -> None:
    check_case(make_case(*rows, dtype))


@pytest.mark.parametrize("block_size", [1, 5, 8, 32, 48, 256])  # the other tests use 16
def test_block_sizes(block_size: int, main_dtype: torch.dtype, make_case: Any) -> None:
    check_case(make_case([1, 12, 3], [70, 80, 33], main_dtype, block_size=block_size))


def test_other_layers_between_blocks(dtype: torch.dtype, make_case: Any) -> None:
    """The blocks of packed caches are further apart than their size; NaN lies between them."""
    case = make_case([1, 12, 3], [70, 80, 33], dtype)
    cache = case.filled_cache
    packed = torch.full((*cache.shape[:2], 3 * cache[0, 0].numel()), float("nan"), dtype=dtype, device=cache.device)
    own = packed.as_strided(cache.shape, (*packed.stride()[:2], *cache.stride()[2:]), cache[0, 0].numel())
    own.copy_(cache)
    scale = case.query.shape[-1] ** -0.5
    step = case.query, *rows_of(case), plan_case(case), scale
    torch.testing.assert_close(paged_attention(step[0], own, *step[1:]), paged_attention(step[0], cache, *step[1:]))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(2, 2, 80), (8, 2, 64), (7, 1, 96), (20, 1, 80), (8, 2, 16), (6, 2, 48), (7, 1, 128), (2, 1, 192), (33, 1, 8)],
)
def test_heads(num_heads: int, num_kv_heads: int, head_dim: int, main_dtype: torch.dtype, make_case: Any) -> None:
    check_case(make_case([1, 2, 11], [1, 30, 40], main_dtype, num_heads, num_kv_heads, head_dim))


@pytest.mark.parametrize("head_dim", [8, 256, 512])
def test_extreme_head_dims(head_dim: int, dtype: torch.dtype, make_case: Any) -> None:
    check_case(make_case([1, 20], [40, 20], dtype, head_dim=head_dim))


def test_rows_in_pieces(dtype: torch.dtype, make_case: Any) -> None:
    case = make_case(*LONG, dtype, 6, 2, padding=2)
    plan = plan_case(case, **CUT)
    assert [len(section.pieces) for section in plan.sections] == [4, 2]
    assert len(plan.merges) == 13
    check_case(case, CUT)


def options_of(case: Any, *names: str) -> dict[str, Any]:
    num_heads, device = case.query.shape[1], case.query.device
    values = torch.linspace(0.1, 2.0, num_heads, device=device)
    options = {"soft_cap": 1.5, "sinks": values * 2 - 1}
    return {name: options[name] for name in names}


@pytest.mark.parametrize("plan_options", [{}, CUT, {"fixed_split": 128}], ids=["whole", "pieces", "fixed"])
@pytest.mark.parametrize(
    ("local", "names"),
    [
        ({"window": 1}, ()),
        ({"window": 150}, ("sinks", "soft_cap")),
        ({"chunk": 90}, ("sinks", "soft_cap")),
        ({"images": ((197, 200), (290, 298))}, ()),
        ({"window": 5, "images": ((197, 200), (290, 298))}, ("sinks",)),
        ({}, ("soft_cap", "sinks")),
    ],
    ids=str,
)
def test_features(
    local: dict[str, Any], names: tuple[str, ...], plan_options: Any, main_dtype: torch.dtype, make_case: Any
) -> None:
    case = make_case(*LONG, main_dtype, 2, 1, 16, **local)
    check_case(case, plan_options, **options_of(case, *names))


@pytest.mark.parametrize("plan_options", [{}, CUT, {"fixed_split": 128}], ids=["whole", "pieces", "fixed"])
@pytest.mark.parametrize(("num_heads", "rank", "rope"), [(3, 16, 4), (5, 40, 24), (20, 512, 64)])
def test_latents(
    num_heads: int, rank: int, rope: int, plan_options: Any, main_dtype: torch.dtype, make_case: Any
) -> None:
    """One key for all heads, whose last numbers are the value."""
    rows = LONG if rank < 512 else ([1, 3], [140, 20])
    case = make_case(*rows, main_dtype, num_heads, 1, rank + rope, padding=2)
    case = dataclasses.replace(case, filled_cache=case.filled_cache[:1])
    shape = AttentionShape(num_heads, 1, rank + rope, main_dtype, rank)
    batch = case.batch
    plan = plan_attention(
        batch.query_lens_cpu, batch.seq_lens_cpu, shape, case.query.device, num_tokens=len(case.query), **plan_options
    )
    step = (case.query, case.filled_cache, *rows_of(case))
    expected = paged_attention_reference(*step, (rank + rope) ** -0.5, value_dim=rank)
    attend = prepare_attention(*step, plan, (rank + rope) ** -0.5, value_dim=rank)
    result = attend(case.query, case.filled_cache)
    assert result.shape == (len(case.query), num_heads, rank) and expected.isfinite().all()
    torch.testing.assert_close(result, expected, **TOLERANCES[main_dtype])


@pytest.mark.parametrize("images", [(), ((30, 60), (70, 170))], ids=["text", "images"])
@pytest.mark.parametrize("local", [{"window": 16}, {"window": 65}, {"chunk": 16}, {"chunk": 100}, {}], ids=str)
def test_windows_chunks_and_images_of_long_prompts(local: dict[str, int], images: Any, make_case: Any) -> None:
    # In each tile, the keys at both ends are visible to some of its tokens, and those in the middle to all.
    check_case(make_case([150], [190], torch.float32, 2, 1, 16, images=images, **local))


def test_rows_around_borders_of_chunks(main_dtype: torch.dtype, make_case: Any) -> None:
    """Decodes, drafts, prompts and their parts that end before, at or after a border, or contain several."""
    rows = ([1, 1, 1, 19, 20, 21, 45, 3], [20, 21, 22, 19, 20, 21, 65, 42])
    for cache_dtype in (None, torch.float8_e4m3fn):
        check_case(make_case(*rows, main_dtype, 2, 1, 16, chunk=20, cache_dtype=cache_dtype), CUT)


@pytest.mark.parametrize("cache_dtype", [None, *FP8_DTYPES], ids=str)
def test_caches(cache_dtype: torch.dtype | None, main_dtype: torch.dtype, make_case: Any) -> None:
    case = make_case([1, 12], [70, 40], main_dtype, cache_dtype=cache_dtype, images=((30, 38),))
    if cache_dtype is None:
        check_case(case)
        return
    device = case.query.device
    per_head = {"k_scale": torch.tensor([0.3, 1.7], device=device), "v_scale": torch.tensor([0.8], device=device)}
    check_case(case, CUT, **per_head)
    check_case(case)


def test_large_scores_do_not_overflow(dtype: torch.dtype, make_case: Any) -> None:
    case = make_case([1, 20], [40, 60], dtype)
    step = (case.filled_cache, *rows_of(case), plan_case(case))
    # exp of these scores is infinite in float32; exp of their differences to the largest is finite.
    for options in ({}, options_of(case, "soft_cap"), {"sinks": torch.full((4,), 1e4, device=case.query.device)}):
        assert paged_attention(case.query * 1000, *step, 1.0, **options).isfinite().all()


def test_padding_is_zero(dtype: torch.dtype, make_case: Any) -> None:
    check_case(make_case([1, 3], [30, 3], dtype, padding=4))


def test_no_tokens(make_case: Any) -> None:
    check_case(make_case([0], [5], torch.float32, padding=2))


@pytest.mark.parametrize("prefix_len", [48, 256])
def test_common_prefix_gives_the_same_result(prefix_len: int, main_dtype: torch.dtype, make_case: Any) -> None:
    rows = ([1, 3, 12, 0], [prefix_len + 1, 300, 290, 280])
    case = make_case(*rows, main_dtype, 2, 1, 16, prefix_len=prefix_len, padding=1)
    options = options_of(case, "soft_cap", "sinks")
    check_case(case, CUT | {"common_prefix_len": prefix_len}, **options)


def test_prompt_may_begin_inside_the_common_prefix(make_case: Any) -> None:
    case = make_case([20, 1], [70, 90], torch.float32, 2, 1, 16, prefix_len=64)
    check_case(case, {"common_prefix_len": 64})


def attend_rows(case: Any, rows: list[tuple[int, int, int]], **options: Any) -> list[torch.Tensor]:
    """Compute rows of ``case``, cut to ``(row, query_len, seq_len)``, with a fixed split; return each row's result."""
    table, starts, _ = rows_of(case)
    ends = starts.tolist()[1:]
    drop = [int(case.batch.seq_lens_cpu[row]) - seq_len for row, _, seq_len in rows]
    query = torch.cat([case.query[ends[r] - d - n : ends[r] - d] for (r, n, _), d in zip(rows, drop, strict=True)])
    lens = torch.tensor([n for _, n, _ in rows], dtype=torch.int32)
    seqs = torch.tensor([seq_len for *_, seq_len in rows], dtype=torch.int32)
    shape = AttentionShape(query.shape[1], case.filled_cache.shape[3], query.shape[2], query.dtype)
    local = {"window": case.batch.window, "chunk": case.batch.chunk}
    starts = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0)).to(query.device)
    plan = plan_attention(lens.numpy(), seqs.numpy(), shape, query.device, fixed_split=128, **local)
    step = (case.filled_cache, table[[row for row, *_ in rows]], starts, seqs.to(query.device))
    out = paged_attention(query, *step, plan, 0.2, **options)
    return list(out.split(lens.tolist()))


@pytest.fixture
def products_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the rounding of a product's rows independent of their position, as on tensor cores but not in NumPy."""
    if not interpreted():
        return
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("products_alike")
@pytest.mark.parametrize(("local", "name"), [({}, "sinks"), ({"window": 140}, "soft_cap"), ({"chunk": 99}, "")])
def test_fixed_split_result_depends_on_the_row_alone(
    local: dict[str, int], name: str, main_dtype: torch.dtype, make_case: Any
) -> None:
    # The queries are row 0's last tokens, computed at once, in chunks and one by one.
    case = make_case([40, 7], [280, 150], main_dtype, 2, 1, 16, **local)
    options = options_of(case, name) if name else {}
    whole, drafts = attend_rows(case, [(0, 40, 280), (1, 7, 150)], **options)
    chunked = [attend_rows(case, [(0, n, end)], **options)[0] for n, end in ((9, 249), (28, 277), (3, 280))]
    assert torch.equal(torch.cat(chunked), whole)
    for token in (0, 39):
        others = attend_rows(case, [(1, 5, 148), (0, 1, 241 + token)], **options)
        assert torch.equal(others[0], drafts[:5])
        assert torch.equal(others[1], whole[token : token + 1])


def projection(case: Any) -> torch.Tensor:
    """A layer's projection with the case's queries, keys and values."""
    return torch.cat([case.query, case.key, case.value], 1)


@pytest.mark.parametrize("rows", [ROWS["mixed"], ROWS["empty row"]], ids=["mixed", "empty row"])
def test_backend(rows: tuple[list[int], list[int]], dtype: torch.dtype, make_case: Any) -> None:
    backend: AttentionBackend = TritonBackend()
    case = make_case(*rows, dtype, padding=2, window=20)
    batch, scale = case.batch, 0.2
    assert backend.kv_cache_shape(*case.kv_cache.shape[1:]) == case.kv_cache.shape
    plan = backend.plan(batch)
    spec = AttentionSpec(4, 2, 32, scale, **options_of(case, "soft_cap", "sinks"))
    result = backend.attend(projection(case), case.kv_cache, plan, spec, None)
    torch.testing.assert_close(case.kv_cache, case.filled_cache, rtol=0, atol=0, equal_nan=True)
    expected = paged_attention_reference(
        case.query,
        case.filled_cache,
        *rows_of(case),
        scale,
        window=20,
        soft_cap=spec.soft_cap,
        sinks=spec.sinks,
    )
    torch.testing.assert_close(result, expected, **TOLERANCES[dtype])
    # A layer that reads another layer's cache writes nothing and gives the same result.
    before = case.kv_cache.clone()
    again = backend.attend(case.query, case.kv_cache, plan, spec, None)
    assert torch.equal(again, result)
    torch.testing.assert_close(case.kv_cache, before, rtol=0, atol=0, equal_nan=True)


def test_backend_with_scaled_cache(dtype: torch.dtype, make_case: Any) -> None:
    case = make_case([1, 12], [70, 40], dtype, cache_dtype=torch.float8_e4m3fn)
    k_scale, v_scale = (torch.tensor([scale], device=case.query.device) for scale in (0.5, 0.25))
    expected_cache = case.kv_cache.clone()
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    write_cache_reference(case.key, case.value, expected_cache, case.batch.slot_mapping, **scales)
    backend = TritonBackend()
    spec = AttentionSpec(4, 2, 32, 0.2, k_scale=k_scale.repeat(2), v_scale=v_scale.repeat(2))
    result = backend.attend(projection(case), case.kv_cache, backend.plan(case.batch), spec, None)
    assert torch.equal(as_bits(case.kv_cache), as_bits(expected_cache))
    expected = paged_attention_reference(case.query, expected_cache, *rows_of(case), 0.2, **scales)
    torch.testing.assert_close(result, expected, **TOLERANCES[dtype])


def test_backend_plans_decoding_on_the_device(make_case: Any) -> None:
    case = make_case([1, 1, 0], [70, 9, 0], torch.float32, padding=1)
    backend = TritonBackend(max_rows=4)
    assert not backend.needs_host_lengths
    spec = AttentionSpec(4, 2, 32, 0.2)
    results = [
        backend.attend(projection(case), case.kv_cache, plan, spec, None)
        for plan in (backend.plan(case.batch), backend.plan_decode(case.batch))
    ]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("num_sharing", [3, 2], ids=["all rows", "some rows"])
def test_backend_with_a_shared_prefix(num_sharing: int, make_case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "MIN_SHARED_READS", 64)
    case = make_case([1, 12, 1], [70, 90, 66], torch.float32, block_size=16, prefix_len=64)
    backend = TritonBackend()
    batch = dataclasses.replace(case.batch, prefixes=(SharedPrefix(np.arange(num_sharing), 64),))
    plan = backend.plan(batch)
    result = backend.attend(projection(case), case.kv_cache, plan, AttentionSpec(4, 2, 32, 0.2), None)
    expected = paged_attention_reference(case.query, case.filled_cache, *rows_of(case), 0.2)
    torch.testing.assert_close(result, expected, **TOLERANCES[torch.float32])
    prefix = plan.of_layer(AttentionShape(4, 2, 32, torch.float32), len(case.query)).visible.prefix_len
    assert prefix == (64 if num_sharing == 3 else 0)


def test_deterministic_backend_plans_on_the_host(make_case: Any) -> None:
    case = make_case([1], [9], torch.float32)
    backend = TritonBackend(max_rows=4, deterministic=True)
    assert backend.needs_host_lengths
    plan = backend.plan(case.batch).of_layer(AttentionShape(4, 2, 32, torch.float32), 1)
    assert plan.fixed_split > 0
    with pytest.raises(NotImplementedError, match="plan_decode needs max_rows"):
        backend.plan_decode(case.batch)


def test_backend_rejects_another_block_size(make_case: Any) -> None:
    case = make_case([1], [9], torch.float32, block_size=8)
    backend = TritonBackend()
    cache = torch.zeros(2, 2, 16, 2, 32, device=case.query.device)
    with pytest.raises(ValueError, match=r"kv_cache: dimension 2 \(block_size\) is 16, expected 8"):
        backend.attend(projection(case), cache, backend.plan(case.batch), AttentionSpec(4, 2, 32, 1.0), None)
