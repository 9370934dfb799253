"""Calls that the launcher of products of packed weights rejects. These tests do not need triton."""

from dataclasses import replace

import pytest
import torch

from quire.kernels.common.scaled_weight import ScaledWeight
from quire.kernels.dense.packed_linear import accepts, packed_linear

X = torch.zeros(2, 128)
WEIGHT = ScaledWeight("int4", torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2), 64)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (replace(WEIGHT, kind="fp4"), "int8, int4, fp8 .*got fp4"),
        (replace(WEIGHT, group_size=16, scales=torch.ones(4, 8)), "multiple of 32 .*groups of 16"),
        (replace(WEIGHT, input_groups=torch.zeros(128, dtype=torch.int32)), "consecutive"),
        (replace(WEIGHT, row_scales=torch.ones(4)), "weight: expected"),
        (replace(WEIGHT, scales=torch.ones(4, 3)), r"scales: dimension 1 \(groups\) is 3, expected 2"),
        (replace(WEIGHT, scales=torch.ones(2, 4).T), "scales: .*stride"),
        (replace(WEIGHT, group_size=96), r"scales: dimension 1 \(groups\) is 2, expected 1"),
        (replace(WEIGHT, zeros=torch.zeros(4, 1, dtype=torch.int8)), r"zeros: dimension 1"),
        (replace(WEIGHT, codes=WEIGHT.codes.view(torch.int8)), "codes: dtype"),
    ],
)
def test_weights_that_the_kernel_would_misread(weight: ScaledWeight, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed_linear(X, weight)


def test_other_tensors_that_the_kernel_would_misread() -> None:
    assert accepts(WEIGHT)
    with pytest.raises(ValueError, match=r"x: dimension 1 \(inputs\) is 96, expected 128"):
        packed_linear(X[:, :96], WEIGHT)
    with pytest.raises(ValueError, match=r"x: .*stride 2"):
        packed_linear(torch.zeros(2, 256)[:, ::2], WEIGHT)
    with pytest.raises(ValueError, match=r"bias: dimension 0 \(outputs\) is 3, expected 4"):
        packed_linear(X, WEIGHT, torch.zeros(3))
