"""The MXFP4 kernel against its reference; run by test_triton.py."""

import pytest
import torch

from quire.kernels.moe.mxfp4 import dequantise_mxfp4, dequantise_mxfp4_reference


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 7, 13)])
def test_equals_reference(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    rng = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (*shape, 16), generator=rng, dtype=torch.uint8).to(device)
    scales = torch.randint(115, 135, shape, generator=rng, dtype=torch.uint8).to(device)
    assert torch.equal(dequantise_mxfp4(blocks, scales, dtype), dequantise_mxfp4_reference(blocks, scales, dtype))


def test_every_scale(device: torch.device) -> None:
    scales = torch.arange(256, dtype=torch.uint8, device=device)
    # Powers that take the largest numbers out of float32's range: NumPy, which interprets, warns.
    scales[253:255] = 0
    blocks = torch.arange(16, dtype=torch.uint8, device=device).expand(256, 16).contiguous() * 17
    result = dequantise_mxfp4(blocks, scales, torch.float32)
    expected = dequantise_mxfp4_reference(blocks, scales, torch.float32)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
