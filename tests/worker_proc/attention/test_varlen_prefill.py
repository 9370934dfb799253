"""Attention of whole new prompts over their own keys and values."""

import dataclasses

import numpy as np
import pytest
import torch
from cpu_attention_cases import Ask, Case, attend_naively, make_case
from tiers import covering

from quire.worker_proc.attention.varlen_prefill import attend_fresh, can_attend_fresh

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
LENGTHS = {"one": [1], "equal": [7, 7, 7], "ragged": [13, 1, 1, 40, 5, 5], "an empty row": [3, 0, 4]}


def prompts(lengths: list[int], heads: tuple[int, int, int], dtype: torch.dtype) -> Case:
    return make_case([(0, length) for length in lengths], heads, 4, dtype)


def expected_of(case: Case, lengths: list[int]) -> torch.Tensor:
    assert case.key is not None and case.value is not None
    rows = zip(*(x.split(lengths) for x in (case.query, case.key.double(), case.value.double())), strict=True)
    return torch.cat([attend_naively(q, k, v, 0, case.spec, Ask()) for q, k, v in rows])


def attend(case: Case, lengths: list[int], device: str = "cpu") -> torch.Tensor:
    assert case.key is not None and case.value is not None
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    query, key, value = (x.to(device) for x in (case.query, case.key, case.value))
    return attend_fresh(query, key, value, starts, np.array(lengths, dtype=np.int32), case.spec.scale)


@pytest.mark.parametrize(("name", "heads", "dtype"), covering(LENGTHS, [(4, 4, 8), (6, 2, 16)], TOLERANCE))
def test_equals_reference_attention(name: str, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    lengths = LENGTHS[name]
    case = prompts(lengths, heads, dtype)
    out = attend(case, lengths)
    assert out.dtype is dtype and out.shape == case.query.shape
    torch.testing.assert_close(out.double(), expected_of(case, lengths), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_accepts_slices_of_one_projection() -> None:
    lengths = [5, 5, 9]
    case = prompts(lengths, (4, 2, 8), torch.float32)
    assert case.key is not None and case.value is not None
    qkv = torch.cat([case.query, case.key, case.value], 1)
    sliced = dataclasses.replace(case, query=qkv[:, :4], key=qkv[:, 4:6], value=qkv[:, 6:])
    torch.testing.assert_close(attend(sliced, lengths), attend(case, lengths))


def test_no_tokens() -> None:
    empty = torch.zeros(0, 2, 8)
    assert attend_fresh(empty, empty, empty, torch.zeros(1, dtype=torch.int32), np.zeros(0, np.int32), 1.0).shape == (
        0, 2, 8,
    )  # fmt: skip


def test_error_names_the_wrong_tensor() -> None:
    x, starts, lens = torch.zeros(6, 4, 8), torch.tensor([0, 6], dtype=torch.int32), np.array([6], np.int32)
    with pytest.raises(ValueError, match=r"key: dimension 0 \(num_tokens\) is 5, expected 6"):
        attend_fresh(x, x[:5], x, starts, lens, 1.0)
    with pytest.raises(ValueError, match="value: dtype"):
        attend_fresh(x, x, x.half(), starts, lens, 1.0)
    with pytest.raises(ValueError, match="4 heads, expected a multiple of the key's 3"):
        attend_fresh(x, x[:, :3], x[:, :3], starts, lens, 1.0)
    with pytest.raises(ValueError, match="query_start_loc"):
        attend_fresh(x, x, x, starts[:1], lens, 1.0)
    with pytest.raises(ValueError, match="lens_cpu: sum is 5, expected 6"):
        attend_fresh(x, x, x, starts, np.array([5], np.int32), 1.0)


def test_steps_that_can_use_fresh_attention() -> None:
    half = torch.float16

    def takes(rows: list[tuple[int, int]], ask: Ask = Ask(), kv_dtype: torch.dtype = half) -> bool:  # noqa: B008
        case = make_case(rows, (4, 2, 8), 4, half, ask=ask)
        return can_attend_fresh(case.batch, case.spec, half, kv_dtype)

    prompt = [(0, 9), (0, 3)]
    assert takes(prompt) and takes(prompt, Ask(window=9))
    assert not takes([(0, 9), (4, 1)]) and not takes([(4, 5)])
    for ask in (Ask(window=8), Ask(soft_cap=1.0), Ask(sinks=True), Ask(images=((2, 9),))):
        assert not takes(prompt, ask)
    assert not takes(prompt, kv_dtype=torch.float8_e4m3fn)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["one", "equal", "ragged"])
def test_equals_reference_attention_on_the_device(name: str, dtype: torch.dtype) -> None:
    lengths = LENGTHS[name]
    case = prompts(lengths, (8, 2, 64), dtype)
    out = attend(case, lengths, "cuda").double().cpu()
    torch.testing.assert_close(out, expected_of(case, lengths), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
