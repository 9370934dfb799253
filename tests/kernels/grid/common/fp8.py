"""Conversion of 8-bit floats in kernels against torch; run by test_triton.py."""

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels.common.fp8 import FP8_DTYPES, as_bits, is_e5m2, to_fp8_reference
from quire.kernels.common.fp8_triton import decode_fp8, encode_fp8

fp8_dtypes = pytest.mark.parametrize("dtype", FP8_DTYPES, ids=["e4m3", "e5m2"])


@triton.jit
def decode_kernel(bits, out, COUNT: tl.constexpr, E5M2: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(out + index, decode_fp8(tl.load(bits + index), E5M2))


@triton.jit
def encode_kernel(x, bits, COUNT: tl.constexpr, E5M2: tl.constexpr):
    index = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(bits + index, encode_fp8(tl.load(x + index), E5M2))


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)


def same_bits(result: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(result.cpu(), as_bits(expected))


@fp8_dtypes
def test_decoding_of_every_pattern_equals_torch(dtype: torch.dtype, device: torch.device) -> None:
    patterns = all_patterns(dtype)
    out = torch.empty(256, dtype=torch.float32, device=device)
    decode_kernel[(1,)](as_bits(patterns).to(device), out, COUNT=256, E5M2=is_e5m2(dtype))
    torch.testing.assert_close(out.cpu(), patterns.float(), rtol=0, atol=0, equal_nan=True)


def hard_values(dtype: torch.dtype) -> torch.Tensor:
    """Return all values of the format, all midpoints, their float32 neighbours, and values out of range."""
    values = all_patterns(dtype).float()
    values = values[values.isfinite()].unique()
    middles = (values[1:] + values[:-1]) / 2
    near = torch.cat([values, middles])
    infinity = torch.tensor(torch.inf)
    largest = values.max()
    outside = [largest * 1.01, largest * 1.0625, largest * 2, 3e38, torch.inf, 1e-45, 1e-39, 1e-38, 0.0, torch.nan]
    positive = torch.tensor([float(x) for x in outside])
    return torch.cat([near, near.nextafter(infinity), near.nextafter(-infinity), positive, -positive])


@fp8_dtypes
def test_encoding_equals_torch(dtype: torch.dtype, device: torch.device) -> None:
    rng = torch.Generator().manual_seed(3)
    anything = torch.randint(-(2**31), 2**31, (20_000,), generator=rng, dtype=torch.int64).to(torch.int32)
    scales = torch.exp2(torch.randint(-20, 18, (20_000,), generator=rng).float())
    x = torch.cat([hard_values(dtype), anything.view(torch.float32), torch.randn(20_000, generator=rng) * scales])
    count = 8192
    x = torch.nn.functional.pad(x, (0, -len(x) % count))
    bits = torch.empty(len(x), dtype=torch.uint8, device=device)
    encode_kernel[(len(x) // count,)](x.to(device), bits, COUNT=count, E5M2=is_e5m2(dtype))
    expected = to_fp8_reference(x, dtype)
    number = ~x.isnan()
    assert same_bits(bits.cpu()[number], expected[number])
    assert bits.cpu().view(dtype)[~number].float().isnan().all()


@fp8_dtypes
def test_decoded_values_encode_to_themselves(dtype: torch.dtype, device: torch.device) -> None:
    patterns = all_patterns(dtype)
    values = patterns.float()
    patterns = patterns[values.isfinite()]
    padded = torch.nn.functional.pad(values[values.isfinite()], (0, 256 - len(patterns)))
    bits = torch.empty(256, dtype=torch.uint8, device=device)
    encode_kernel[(1,)](padded.to(device), bits, COUNT=256, E5M2=is_e5m2(dtype))
    assert same_bits(bits[: len(patterns)], patterns)
