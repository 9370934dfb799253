"""MXFP4 dequantisation in a worked example and against transformers. These tests do not need triton."""

import pytest
import torch

from quire.kernels.common.mxfp4 import CHUNK_GROUPS, dequantise_mxfp4


def test_worked_example() -> None:
    blocks = torch.zeros(1, 16, dtype=torch.uint8)
    blocks[0, :3] = torch.tensor([0x21, 0xF7, 0x9C])
    values = dequantise_mxfp4(blocks, torch.tensor([128], dtype=torch.uint8), torch.float32)
    assert values.tolist() == [1.0, 2.0, 12.0, -12.0, -4.0, -1.0] + [0.0] * 26


def test_scale_of_255_is_nan() -> None:
    blocks = torch.full((1, 16), 0x22, dtype=torch.uint8)
    values = dequantise_mxfp4(blocks, torch.tensor([255], dtype=torch.uint8), torch.bfloat16)
    assert values.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_transformers(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # 1.5 s

    rng = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=rng, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 4), generator=rng, dtype=torch.uint8)
    # transformers transposes each expert's matrix.
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    assert torch.equal(dequantise_mxfp4(blocks, scales, dtype), expected)


def test_chunks_make_no_difference() -> None:
    blocks = torch.zeros(CHUNK_GROUPS + 1, 16, dtype=torch.uint8)
    blocks[-1] = 0x22
    scales = torch.full((CHUNK_GROUPS + 1,), 127, dtype=torch.uint8)
    values = dequantise_mxfp4(blocks, scales, torch.bfloat16)
    assert values[:-32].count_nonzero() == 0
    assert values[-32:].tolist() == [1.0] * 32
