"""The FlashInfer backend against reference attention, with a fake of the library or with the library on a GPU."""

import dataclasses
from typing import Any

import fake_flashinfer
import numpy as np
import pytest
import torch
from cpu_attention_cases import Ask, Case, Rows, make_case
from paged_backend_cases import ASKS, PLAIN, STEPS, check, check_attend, in_pages, on_gpu
from tiers import covering

from quire.worker_proc.attention.flashinfer_backend import FlashInferBackend

BLOCK_SIZE = 8
CPU = torch.device("cpu")
HEADS = (6, 2, 64)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of all wrappers that the fake library makes."""
    wrappers: Any = fake_flashinfer.install(monkeypatch)
    return wrappers  # type: ignore[no-any-return]


def step(
    rows: Rows, ask: Ask = PLAIN, heads: tuple[int, int, int] = HEADS, cache_dtype: torch.dtype | None = None
) -> Case:
    return in_pages(make_case(rows, heads, BLOCK_SIZE, torch.float16, cache_dtype, ask=ask))


@pytest.mark.parametrize(("name", "ask"), covering(STEPS, ASKS))
def test_equals_reference_attention(made: list[Any], name: str, ask: str) -> None:
    check(FlashInferBackend(CPU), step(STEPS[name], ASKS[ask]))
    assert [type(wrapper).__name__ for wrapper in made] == ["Decode" if "decode" in name else "Prefill"]


@pytest.mark.full
@pytest.mark.parametrize("heads", [(2, 2, 64), (4, 2, 128), (12, 2, 64), (7, 1, 256)], ids=str)
def test_all_head_group_sizes(made: list[Any], heads: tuple[int, int, int]) -> None:
    for name in ("steady decode", "mixed"):
        check(FlashInferBackend(CPU), step(STEPS[name], heads=heads))
    assert made[0].use_tensor_cores is (heads[0] // heads[1] > 2)


@pytest.mark.parametrize(
    ("name", "dtype"), covering(["steady decode", "mixed"], [torch.float8_e4m3fn, torch.float8_e5m2])
)
def test_fp8_cache_with_scales(made: list[Any], name: str, dtype: torch.dtype) -> None:
    case = step(STEPS[name], Ask(k_scale=(0.5,), v_scale=(2.0,)), cache_dtype=dtype)
    check(FlashInferBackend(CPU), case)


def test_scales_per_head_are_rejected(made: list[Any]) -> None:
    case = step(STEPS["mixed"], Ask(k_scale=(0.5, 2.0)), cache_dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="k_scale: attention backend flashinfer supports one scale"):
        check(FlashInferBackend(CPU), case)


def test_layers_of_one_kind_share_one_plan(made: list[Any]) -> None:
    backend, case = FlashInferBackend(CPU), step(STEPS["mixed"])
    plan = backend.plan(case.batch)
    for _ in range(3):
        check(backend, case, plan)
    capped = dataclasses.replace(step(STEPS["mixed"], Ask(soft_cap=2.0)), batch=case.batch)
    check(backend, capped, plan)
    assert [wrapper.plans for wrapper in made] == [1, 1]


def test_simultaneous_plans_have_separate_wrappers(made: list[Any]) -> None:
    backend = FlashInferBackend(CPU)
    full, local = step(STEPS["mixed"]), step(STEPS["mixed"], ASKS["wide window"])
    for _ in range(3):
        plans = [backend.plan(case.batch) for case in (full, local)]
        for _ in range(2):
            for plan, case in zip(plans, (full, local), strict=True):
                check(backend, case, plan)
        del plan, plans
    assert [wrapper.plans for wrapper in made] == [3, 3]


def test_attend_computes_norms_rotation_write_and_attention(made: list[Any]) -> None:
    check_attend(FlashInferBackend(CPU), step(STEPS["mixed"]))


def test_plan_decode_is_not_supported(made: list[Any]) -> None:
    backend, case = FlashInferBackend(CPU), step(STEPS["one decode"])
    assert backend.needs_host_lengths
    with pytest.raises(NotImplementedError, match="lengths on the host"):
        backend.plan_decode(dataclasses.replace(case.batch, seq_lens_cpu=np.zeros(0, np.int32)))


def test_unsupported_settings_are_errors(made: list[Any]) -> None:
    with pytest.raises(ValueError, match="flashinfer does not support sinks"):
        check(FlashInferBackend(CPU), step(STEPS["mixed"], Ask(sinks=True)))
    case = step(STEPS["mixed"])
    with pytest.raises(ValueError, match=r"block_size\) is 8, expected 16"):
        check(FlashInferBackend(CPU), dataclasses.replace(case, batch=dataclasses.replace(case.batch, block_size=16)))


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("name", STEPS)
def test_library_equals_reference_attention(name: str, ask: str, cache_dtype: torch.dtype | None) -> None:
    pytest.importorskip("flashinfer")
    check(FlashInferBackend(torch.device("cuda")), on_gpu(step(STEPS[name], ASKS[ask], (8, 2, 64), cache_dtype)))
