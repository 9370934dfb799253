"""The references of 8-bit floats, with numbers out of range. These tests do not need triton."""

import pytest
import torch

from quire.kernels.common.fp8 import FP8_DTYPES, as_bits, is_e5m2, to_fp8_reference


@pytest.mark.parametrize(("dtype", "largest"), list(zip(FP8_DTYPES, (448.0, 57344.0), strict=True)))
def test_numbers_out_of_range_become_the_largest(dtype: torch.dtype, largest: float) -> None:
    x = torch.tensor([largest * 1.5, torch.inf, -largest * 1.5, -torch.inf])
    assert to_fp8_reference(x, dtype).float().tolist() == [largest, largest, -largest, -largest]
    assert to_fp8_reference(torch.tensor([torch.nan]), dtype).float().isnan().all()


def test_ties_go_to_even() -> None:
    x = torch.tensor([1.0625, 1.1875, 2**-10, 3 * 2**-10])
    assert to_fp8_reference(x, torch.float8_e4m3fn).float().tolist() == [1.0, 1.25, 0.0, 2 * 2**-9]


def test_bits_share_memory_with_8_bit_floats_only() -> None:
    x = torch.zeros(2, 3, dtype=torch.float8_e5m2)
    as_bits(x)[1, 2] = 0x3C  # 1.0, as the upper byte of a float16
    assert x.float()[1, 2] == 1.0
    assert is_e5m2(x.dtype) and not is_e5m2(torch.float8_e4m3fn)
    half = torch.zeros(2, dtype=torch.float16)
    assert as_bits(half) is half
