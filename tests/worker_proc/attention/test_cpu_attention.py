"""The CPU backend, native and with torch operators, against reference attention computed row by row."""

import dataclasses
from typing import Any

import pytest
import torch
from cpu_attention_cases import Ask, Case, Rows, attend, make_case, raw, run
from tiers import covering, thinned

from quire.kernels.cpu.native.library import load_native
from quire.worker_proc.attention.backend import AttentionSpec, Rotary
from quire.worker_proc.attention.cpu import CpuBackend
from quire.worker_proc.attention.prologue import normalise_and_rotate
from quire.worker_proc.attention.rope import rotate

DTYPES = [torch.float32, torch.bfloat16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

STEPS: dict[str, Rows] = {
    "one decode": [(9, 1)],
    "first tokens": [(0, 1), (0, 1)],
    "steady decode": [(20, 1), (17, 1), (31, 1), (22, 1)],
    "ragged decode": [(5, 1), (700, 1), (31, 1), (0, 1), (650, 1), (90, 1)],
    "whole prompts": [(0, 13), (0, 2), (0, 13)],
    "chunks": [(7, 7), (16, 16), (1, 3)],
    "mixed": [(40, 1), (0, 11), (12, 5), (900, 1), (0, 1), (16, 1), (13, 6)],
}
AROUND_20 = [(19, 1), (20, 1), (21, 1), (0, 20), (0, 19), (0, 21), (15, 30), (20, 5), (40, 1), (59, 2)]
HEADS = [(4, 4, 8), (4, 2, 16), (6, 1, 8), (9, 3, 64), (5, 1, 20)]
WAYS = ["native", "torch", "fixed"]

ASKS = {
    "window": Ask(window=5),
    "wide window": Ask(window=40),
    "window of one": Ask(window=1),
    "soft cap": Ask(soft_cap=2.0),
    "sinks": Ask(sinks=True),
    "window, cap and sinks": Ask(window=17, soft_cap=3.0, sinks=True),
    "chunks": Ask(chunk=20),
    "chunks of one": Ask(chunk=1),
    "wide chunks, cap and sinks": Ask(chunk=300, soft_cap=3.0, sinks=True),
    "images": Ask(images=((2, 9), (9, 11), (11, 17))),
    "images longer than a window": Ask(window=5, images=((2, 9), (9, 11), (11, 17))),
}


@pytest.fixture(params=WAYS)
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    return make_backend(request.param)


def make_backend(way: str) -> CpuBackend:
    if way == "native" and load_native() is None:
        pytest.skip("no C++ compiler")
    return CpuBackend(native=way == "native", deterministic=way == "fixed")


def check(backend: CpuBackend, case: Case) -> None:
    out = run(backend, case)
    assert out.dtype is case.query.dtype and out.shape == case.query.shape
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), case.expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("way", "step", "heads", "block_size", "dtype"), covering(["native", "torch"], STEPS, HEADS, [4, 16], DTYPES)
)
def test_equals_reference_attention(
    way: str, step: str, heads: tuple[int, int, int], block_size: int, dtype: torch.dtype
) -> None:
    check(make_backend(way), make_case(STEPS[step], heads, block_size, dtype))


@pytest.mark.parametrize(("step", "heads"), covering(["first tokens", "chunks", "mixed"], HEADS))
def test_fixed_order_attention_equals_reference_attention(step: str, heads: tuple[int, int, int]) -> None:
    for block_size, dtype in ((4, torch.float32), (16, torch.bfloat16)):
        check(make_backend("fixed"), make_case(STEPS[step], heads, block_size, dtype))


@pytest.mark.parametrize(
    ("way", "ask", "step", "heads"),
    covering(WAYS, ASKS, ["ragged decode", "whole prompts", "mixed"], [(4, 2, 16), (5, 1, 20)], pairs=True),
)
def test_all_layer_settings(way: str, ask: str, step: str, heads: tuple[int, int, int]) -> None:
    check(make_backend(way), make_case(STEPS[step], heads, 4, torch.float32, ask=ASKS[ask]))


@pytest.mark.parametrize(
    ("way", "dtype", "cache_dtype", "block_size", "shared"),
    covering(WAYS, [torch.float32, torch.bfloat16], [None, torch.float8_e4m3fn], [16, 4], [False, True], pairs=True),
)
def test_chunks_that_are_no_multiple_of_blocks(
    way: str, dtype: torch.dtype, cache_dtype: torch.dtype | None, block_size: int, shared: bool
) -> None:
    scales: dict[str, Any] = {"k_scale": (0.25,), "v_scale": (0.125,)} if cache_dtype else {}
    for chunk in (20, 5):
        ask = Ask(chunk=chunk, **scales)
        check(make_backend(way), make_case(AROUND_20, (4, 2, 16), block_size, dtype, cache_dtype, ask, shared))


@pytest.mark.parametrize("ask", ["window", "chunks", "soft cap"])
def test_layer_that_reads_an_earlier_layers_cache(ask: str, backend: CpuBackend) -> None:
    case = make_case(STEPS["mixed"], (4, 2, 16), 16, torch.float32, ask=ASKS[ask], shared=True)
    before = case.cache.clone()
    check(backend, case)
    torch.testing.assert_close(case.cache, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("way", "cache_dtype", "dtype", "step"),
    covering(WAYS, [*DTYPES, torch.float16, *FP8], DTYPES, ["ragged decode", "mixed"], pairs=True),
)
def test_cache_of_another_dtype_than_activations(
    way: str, cache_dtype: torch.dtype, dtype: torch.dtype, step: str
) -> None:
    ask = Ask(k_scale=(0.25,), v_scale=(0.125,)) if cache_dtype.itemsize == 1 else Ask()
    check(make_backend(way), make_case(STEPS[step], (9, 3, 64), 16, dtype, cache_dtype, ask))


@pytest.mark.parametrize("step", thinned(["ragged decode", "whole prompts", "mixed"], keep=1))
@pytest.mark.parametrize(
    "ask", [{}, {"window": 17, "soft_cap": 2.0, "sinks": True, "images": ((2, 9),)}], ids=["plain", "all settings"]
)
def test_scale_per_head(ask: dict[str, Any], step: str, backend: CpuBackend) -> None:
    scales = Ask(k_scale=(0.25, 2.0, 0.03), v_scale=(0.125, 0.5, 4.0), **ask)
    for dtype in FP8:
        check(backend, make_case(STEPS[step], (6, 3, 16), 4, torch.float32, dtype, scales))


def test_layer_that_reads_a_scaled_cache_of_an_earlier_layer(backend: CpuBackend) -> None:
    ask = Ask(k_scale=(0.25, 2.0), v_scale=(0.5, 4.0))
    check(backend, make_case(STEPS["mixed"], (4, 2, 16), 16, torch.float32, torch.float8_e4m3fn, ask, shared=True))


def test_many_queries_of_one_row(backend: CpuBackend) -> None:
    rows = [(50, 300), (3, 256)] if "fixed" not in backend.describe() else [(250, 60)]
    images = (60, 70), (90, 250), (255, 300)
    asks = Ask(), Ask(window=70), Ask(window=64, sinks=True), Ask(chunk=100), Ask(images=images)
    for ask in (*asks, Ask(window=70, images=images)):
        check(backend, make_case(rows, (2, 1, 8), 16, torch.float32, ask=ask))


def test_float16_activations(backend: CpuBackend) -> None:
    check(backend, make_case(STEPS["mixed"], (4, 2, 16), 16, torch.float16))


def test_writes_keys_and_values_only_to_their_slots(backend: CpuBackend) -> None:
    case = make_case(STEPS["mixed"], (4, 2, 16), 4, torch.float32)
    before = case.cache.clone()
    attend(backend, case, case.cache)
    assert case.key is not None and case.value is not None
    keys, values = by_slot(case.cache)
    assert torch.equal(keys[case.batch.slot_mapping], case.key)
    assert torch.equal(values[case.batch.slot_mapping], case.value)
    untouched = torch.ones(len(keys), dtype=torch.bool)
    untouched[case.batch.slot_mapping] = False
    for now, old in zip((keys, values), by_slot(before), strict=True):
        torch.testing.assert_close(now[untouched], old[untouched], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *FP8], ids=str)
def test_stored_values_are_rounded_as_in_torch_and_clamped(dtype: torch.dtype, backend: CpuBackend) -> None:
    case = make_case([(0, 64)], (2, 1, 32), 16, torch.float32, dtype)
    most = torch.finfo(dtype).max if dtype.itemsize == 1 else float("inf")
    exponents = torch.linspace(-26, 20, 64)[:, None, None] if dtype is not torch.bfloat16 else torch.zeros(64, 1, 1)
    wanted = torch.randn(64, 1, 32, generator=torch.Generator().manual_seed(1)) * 2**exponents
    wanted[0, 0, :3] = torch.tensor([0.0, -0.0, float("nan")])
    attend(backend, dataclasses.replace(case, key=wanted, value=wanted), case.cache)
    for stored in by_slot(raw(case.cache)):
        stored = stored[case.batch.slot_mapping].view(dtype).float()
        torch.testing.assert_close(stored, wanted.clamp(-most, most).to(dtype).float(), rtol=0, atol=0, equal_nan=True)


def by_slot(cache: torch.Tensor) -> torch.Tensor:
    """View a cache as ``[2, slots, kv_heads, head_dim]``."""
    return cache.transpose(2, 3).flatten(1, 2)


def test_padding_is_not_written_and_gives_zero(backend: CpuBackend) -> None:
    case = make_case([(9, 1), (14, 1)], (4, 2, 16), 4, torch.float32)
    before = case.cache.clone()
    assert case.key is not None and case.value is not None
    padded = [torch.cat([x, torch.full((3, *x.shape[1:]), float("nan"))]) for x in (case.query, case.key, case.value)]
    slots = torch.cat([case.batch.slot_mapping, torch.full((3,), -1)])
    batch = dataclasses.replace(case.batch, slot_mapping=slots)
    out = backend.attend(torch.cat(padded, 1), case.cache, backend.plan(batch), case.spec, None)
    torch.testing.assert_close(out[:2].double(), case.expected, atol=2e-5, rtol=2e-5)
    assert torch.equal(out[2:], torch.zeros(3, 4, 16))
    changed = ~torch.isclose(by_slot(before), by_slot(case.cache), equal_nan=True).flatten(2).all(2).all(0)
    assert torch.equal(changed.nonzero().view(-1), case.batch.slot_mapping.sort().values)


def test_several_layers_share_one_plan(backend: CpuBackend) -> None:
    case = make_case(STEPS["mixed"], (4, 2, 16), 16, torch.float32)
    plan = backend.plan(case.batch)
    caches = [case.cache.clone(), case.cache.clone()]
    outs = [attend(backend, case, cache, plan) for cache in caches]
    assert torch.equal(outs[0], outs[1])
    torch.testing.assert_close(caches[0], caches[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("way", "norms", "rotary_dim", "shared", "dtype"),
    covering(WAYS, [False, True], [0, 8, 20], [False, True], DTYPES, pairs=True),
)
def test_norms_and_rotation_before_attention(
    way: str, norms: bool, rotary_dim: int, shared: bool, dtype: torch.dtype
) -> None:
    backend = make_backend(way)
    case = make_case(STEPS["mixed"], (4, 2, 20), 4, dtype, shared=shared)
    generator = torch.Generator().manual_seed(5)
    weight = torch.rand(2, 20, generator=generator).to(dtype) if norms else (None, None)
    spec = dataclasses.replace(case.spec, q_norm=weight[0], k_norm=weight[1])
    qkv = case.query.clone()
    if not shared:
        assert case.key is not None and case.value is not None
        qkv = torch.cat((case.query, case.key, case.value), 1)
    rotary = None
    if rotary_dim:
        angles = torch.rand(1000, rotary_dim // 2, generator=generator) * 6
        table = torch.stack((torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)))
        rotary = Rotary(table.to(dtype), torch.randint(0, 1000, (len(qkv),), generator=generator))
    query, key = _prepared(case, spec, rotary)
    expected_cache, cache = case.cache.clone(), case.cache.clone()
    plan = backend.plan(case.batch)
    expected = attend(backend, dataclasses.replace(case, query=query, key=key), expected_cache, plan)
    out = backend.attend(qkv, cache, plan, spec, rotary)
    tolerance = TOLERANCE[dtype] * 2
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(cache, expected_cache, atol=tolerance, rtol=tolerance, equal_nan=True)


def _prepared(case: Case, spec: AttentionSpec, rotary: Rotary | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return query and key after norms and rotation, with torch operators in float32."""
    both = case.query if case.key is None else torch.cat((case.query, case.key), 1)
    if spec.q_norm is not None and spec.k_norm is not None:
        spec = dataclasses.replace(spec, q_norm=spec.q_norm.float(), k_norm=spec.k_norm.float())
    both = normalise_and_rotate(both.float(), spec, None)
    if rotary is not None:
        cos, sin = rotary.cos_sin().float()
        both = rotate(both, cos, sin)
    both = both.to(case.query.dtype)
    return both[:, : spec.num_heads], None if case.key is None else both[:, spec.num_heads :]


def test_describe_has_the_implementation_and_the_reason() -> None:
    assert CpuBackend(native=False).describe() == "cpu (torch operators; no native kernels: not requested)"
    assert make_backend("native").describe().startswith("cpu (native, ")


def test_native_kernels_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_NATIVE", "0")
    assert "QUIRE_CPU_NATIVE is 0" in CpuBackend().describe()


def test_native_rejects_indices_outside_the_cache() -> None:
    backend = make_backend("native")
    case = make_case(STEPS["mixed"], (4, 2, 16), 4, torch.float32, ask=ASKS["images"])
    assert case.batch.last_keys is not None
    case.batch.last_keys[0] += 1
    with pytest.raises(ValueError, match="an image that ends behind it"):
        run(backend, case)
    case.batch.last_keys[0] -= 1
    case.batch.block_table[3, 5] = 10**6
    with pytest.raises(ValueError, match="block id"):
        run(backend, case)
    case.batch.block_table[3, 5] = 1
    case.batch.slot_mapping[2] = 10**9
    with pytest.raises(ValueError, match="slot"):
        run(backend, case)
    case.batch.slot_mapping[2] = 0
    case.batch.seq_lens[3] = 10**6
    with pytest.raises(ValueError, match="longer than its block table"):
        run(backend, case)
