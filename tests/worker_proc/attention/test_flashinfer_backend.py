"""The FlashInfer backend against attention written out row by row: with a stand-in for the library here, with the
library on a GPU."""

import dataclasses
from typing import Any

import fake_flashinfer
import numpy as np
import pytest
import torch
from cpu_attention_cases import OUTSIDE, Ask, Case, Rows, make_case, raw
from dense_attention import DenseBackend
from tiers import thinned

from quire.worker_proc.attention.backend import Rotary
from quire.worker_proc.attention.flashinfer_backend import FlashInferBackend

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
BLOCK_SIZE = 8
CPU = torch.device("cpu")

STEPS: dict[str, Rows] = {
    "one decode": [(9, 1)],
    "steady decode": [(20, 1), (300, 1), (0, 1), (23, 1)],
    "whole prompts": [(0, 13), (0, 2), (0, 13)],
    "mixed": [(40, 1), (0, 11), (11, 5), (270, 1), (0, 1), (256, 6)],
}
PLAIN = Ask()
ASKS = {
    "plain": PLAIN,
    "window of one": Ask(window=1),
    "wide window": Ask(window=260),
    "window and cap": Ask(window=17, soft_cap=3.0),
}
HEADS = (6, 2, 64)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All wrappers of the library that were made."""
    wrappers: Any = fake_flashinfer.install(monkeypatch)
    return wrappers  # type: ignore[no-any-return]


def step(
    rows: Rows, ask: Ask = PLAIN, heads: tuple[int, int, int] = HEADS, cache_dtype: torch.dtype | None = None
) -> Case:
    """A case with the cache as this backend lays it out, and what a window hides in a row's own first block written."""
    case = make_case(rows, heads, BLOCK_SIZE, torch.float16, cache_dtype, ask=ask)
    cache, batch = raw(case.cache).transpose(2, 3).contiguous(), case.batch
    for row, first in enumerate(batch.first_visible.tolist()):
        cache[:, batch.block_table[row, first // BLOCK_SIZE], : first % BLOCK_SIZE] = 50
    return dataclasses.replace(case, cache=cache.view(case.cache.dtype))


def check(backend: FlashInferBackend, case: Case, plan: Any = None) -> None:
    plan = plan or backend.plan(case.batch)
    out = backend.forward(case.query, case.key, case.value, case.cache, plan, case.spec)
    assert out.dtype is case.query.dtype and out.shape == case.query.shape
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double().cpu(), case.expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("ask", thinned(ASKS, keep=2))
@pytest.mark.parametrize("name", STEPS)
def test_equals_attention_row_by_row(made: list[Any], name: str, ask: str) -> None:
    check(FlashInferBackend(CPU), step(STEPS[name], ASKS[ask]))
    assert [type(wrapper).__name__ for wrapper in made] == ["Decode" if "decode" in name else "Prefill"]


@pytest.mark.full
@pytest.mark.parametrize("heads", [(2, 2, 64), (4, 2, 128), (12, 2, 64), (7, 1, 256)], ids=str)
def test_any_group_of_heads(made: list[Any], heads: tuple[int, int, int]) -> None:
    for name in ("steady decode", "mixed"):
        check(FlashInferBackend(CPU), step(STEPS[name], heads=heads))
    assert made[0].use_tensor_cores is (heads[0] // heads[1] > 2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("name", ["steady decode", "mixed"])
def test_a_cache_of_8_bit_floats_has_scales(made: list[Any], name: str, dtype: torch.dtype) -> None:
    case = step(STEPS[name], Ask(k_scale=0.5, v_scale=2.0), cache_dtype=dtype)
    check(FlashInferBackend(CPU), case)


def test_one_plan_serves_all_layers_of_a_kind(made: list[Any]) -> None:
    backend, case = FlashInferBackend(CPU), step(STEPS["mixed"])
    plan = backend.plan(case.batch)
    for _ in range(3):
        check(backend, case, plan)
    capped = dataclasses.replace(step(STEPS["mixed"], Ask(soft_cap=2.0)), batch=case.batch)
    check(backend, capped, plan)
    assert [wrapper.plans for wrapper in made] == [1, 1]


def test_plans_that_live_together_have_wrappers_of_their_own(made: list[Any]) -> None:
    backend = FlashInferBackend(CPU)
    full, local = step(STEPS["mixed"]), step(STEPS["mixed"], ASKS["wide window"])
    for _ in range(3):
        plans = [backend.plan(case.batch) for case in (full, local)]
        for _ in range(2):
            for plan, case in zip(plans, (full, local), strict=True):
                check(backend, case, plan)
        del plan, plans
    assert [wrapper.plans for wrapper in made] == [3, 3]


def test_attend_is_norms_rotation_write_and_attention(made: list[Any]) -> None:
    backend, dense, case = FlashInferBackend(CPU), DenseBackend(), step(STEPS["mixed"])
    generator = torch.Generator().manual_seed(5)
    tokens = len(case.query)
    qkv = torch.randn(tokens, HEADS[0] + 2 * HEADS[1], HEADS[2], generator=generator).half()
    angles = torch.randn(400, HEADS[2] // 4, generator=generator)
    sines = torch.cat([-angles.sin(), angles.sin()], -1)
    table = torch.stack([torch.cat([angles.cos(), angles.cos()], -1), sines]).half()
    rotary = Rotary(table, torch.arange(tokens))
    weight = 1 + 0.1 * torch.randn(HEADS[2], generator=generator).half()
    spec = dataclasses.replace(case.spec, q_norm=weight, k_norm=weight)
    caches = [case.cache.nan_to_num(0.0) for _ in range(2)]
    case.batch.block_table[case.batch.block_table == OUTSIDE] = 0
    out = backend.attend(qkv.clone(), caches[0], backend.plan(case.batch), spec, rotary)
    expected = dense.attend(qkv.clone(), caches[1], dense.plan(case.batch), spec, rotary)
    torch.testing.assert_close(out, expected, atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(caches[0], caches[1], atol=4e-3, rtol=4e-3)


def test_it_plans_on_the_host_alone(made: list[Any]) -> None:
    backend, case = FlashInferBackend(CPU), step(STEPS["one decode"])
    assert backend.needs_host_lengths
    with pytest.raises(NotImplementedError, match="lengths on the host"):
        backend.plan_decode(dataclasses.replace(case.batch, seq_lens_cpu=np.zeros(0, np.int32)))


def test_what_it_has_not_is_an_error_and_not_a_wrong_answer(made: list[Any]) -> None:
    with pytest.raises(ValueError, match="flashinfer has no sinks"):
        check(FlashInferBackend(CPU), step(STEPS["mixed"], Ask(sinks=True)))
    case = step(STEPS["mixed"])
    with pytest.raises(ValueError, match=r"block_size\) is 8, expected 16"):
        check(FlashInferBackend(CPU), dataclasses.replace(case, batch=dataclasses.replace(case.batch, block_size=16)))


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("name", STEPS)
def test_the_library_equals_attention_row_by_row(name: str, ask: str, cache_dtype: torch.dtype | None) -> None:
    pytest.importorskip("flashinfer")
    case = step(STEPS[name], ASKS[ask], (8, 2, 64), cache_dtype)
    batch = case.batch
    batch.block_table[batch.block_table == OUTSIDE] = 0
    fields = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    moved = dataclasses.replace(batch, **{field: getattr(batch, field).cuda() for field in fields})
    tensors = {field: getattr(case, field).cuda() for field in ("cache", "query", "key", "value")}
    check(FlashInferBackend(torch.device("cuda")), dataclasses.replace(case, batch=moved, **tensors))
