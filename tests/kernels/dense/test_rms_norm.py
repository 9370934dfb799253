"""The norm references against torch, and errors of the launcher. These tests do not need triton."""

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.dense.rms_norm import MAX_WIDTH, add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_equals_torch(dtype: torch.dtype) -> None:
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.linspace(-2, 2, 48, dtype=dtype)
    torch.testing.assert_close(rms_norm_reference(x, weight, 1e-6), F.rms_norm(x, (48,), weight, 1e-6))


def test_sum_is_rounded_before_the_norm() -> None:
    # 256 + 1 is 256 in bfloat16, so that both elements of the sum are equal.
    residual = torch.tensor([[256.0, 256.0]], dtype=torch.bfloat16)
    x = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    normed = add_rms_norm_reference(x, residual, torch.ones(2), 0.0)
    assert residual.tolist() == [[256, 256]]
    assert normed.tolist() == [[1, 1]]


def test_invalid_arguments_are_rejected() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="weight: dimension 0"):
        rms_norm(x, torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match="residual: dimension 0"):
        add_rms_norm(x, torch.zeros(3, 8), torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="stride"):
        rms_norm(x.t(), None, 1e-5)
    with pytest.raises(ValueError, match="width"):
        rms_norm(torch.zeros(1, MAX_WIDTH + 1), None, 1e-5)
    with pytest.raises(ValueError, match="dtype"):
        rms_norm(x.double(), None, 1e-5)
