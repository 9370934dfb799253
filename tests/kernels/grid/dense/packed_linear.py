"""Products of packed weights against float64; run by test_triton.py."""

import pytest
import torch

from quire.kernels.common.scaled_linear import scaled_linear_reference
from quire.kernels.common.scaled_weight import CODE_DTYPES, ScaledWeight
from quire.kernels.dense.packed_linear import KINDS, TOLERANCES, packed_linear


def random_weight(
    kind: str, outputs: int, inputs: int, size: int, scale_dtype: torch.dtype, zeros: bool, device: torch.device
) -> ScaledWeight:
    """Return codes of all values but NaN, each output's and group's scale and zero point different from the next."""
    rng = torch.Generator().manual_seed(3)
    octets = torch.randint(0, 256, (outputs, inputs // 2 if kind == "int4" else inputs), generator=rng)
    if kind == "fp8":
        octets[octets & 0x7F == 0x7F] = 0x80
    shape = outputs, inputs // size
    scales = (torch.rand(shape, generator=rng) + 0.5).to(scale_dtype)
    low, high = (0, 16) if kind == "int4" else (-128, 128)
    points = torch.randint(low, high, shape, generator=rng, dtype=torch.int8).to(device) if zeros else None
    codes = octets.to(torch.uint8).view(CODE_DTYPES[kind])
    return ScaledWeight(kind, codes.to(device), scales.to(device), size, points)


def assert_equal(x: torch.Tensor, weight: ScaledWeight, bias: torch.Tensor | None) -> None:
    result = packed_linear(x, weight, bias)
    assert result.dtype is x.dtype
    magnitude = x.double().abs() @ weight.dequantise().double().abs().T
    if bias is not None:
        magnitude += bias.double().abs()
    error = (result.double() - scaled_linear_reference(x, weight, bias)).abs()
    assert bool((error <= TOLERANCES[x.dtype] * magnitude).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "size"),
    [
        # Few rows, and a tile that holds the end of the inputs, of the outputs, or both.
        *((3, 40, 96, 32), (1, 33, 72, 72), (16, 5, 160, 160), (2, 64, 512, 256)),
        # Many rows.
        *((17, 70, 96, 96), (65, 130, 64, 32), (130, 20, 256, 128), (17, 20, 200, 200)),
    ],
)
@pytest.mark.parametrize("zeros", [False, True])
def test_equals_reference(
    kind: str, rows: int, outputs: int, inputs: int, size: int, zeros: bool, dtype: torch.dtype, device: torch.device
) -> None:
    if kind == "fp8" and zeros:
        pytest.skip("fp8 has no zero points")
    rng = torch.Generator().manual_seed(4)
    memory = torch.full((rows, inputs + 8), torch.nan, dtype=dtype)
    # With float16, the largest sums are below its range.
    memory[:, :inputs] = torch.randn(rows, inputs, generator=rng) * (2.0**-5 if kind == "fp8" else 1.0)
    x = memory.to(device)[:, :inputs]
    scale_dtype = torch.float32 if dtype is torch.bfloat16 else torch.float16
    weight = random_weight(kind, outputs, inputs, size, scale_dtype, zeros, device)
    bias = torch.randn(outputs, generator=rng).to(device) if rows % 2 else None
    assert_equal(x, weight, bias)


@pytest.mark.parametrize("kind", KINDS)
def test_every_code(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """Each input in turn is 1 and the others 0, so that the results are the weights."""
    weight = random_weight(kind, 16, 128, 64, torch.float32, kind == "int8", device)
    x = torch.eye(128, device=device, dtype=dtype)
    rtol = TOLERANCES[dtype]
    torch.testing.assert_close(packed_linear(x, weight).float(), weight.dequantise().T, rtol=rtol, atol=0)


def test_no_rows(device: torch.device) -> None:
    weight = random_weight("int8", 4, 32, 32, torch.float32, False, device)
    assert packed_linear(torch.zeros(0, 32, device=device), weight).shape == (0, 4)


def test_deterministic_rows_ignore_their_batch(main_dtype: torch.dtype, device: torch.device) -> None:
    weight = random_weight("int4", 40, 256, 64, torch.float32, True, device)
    x = torch.randn(70, 256, generator=torch.Generator().manual_seed(5)).to(main_dtype).to(device)
    together = packed_linear(x, weight, deterministic=True)
    assert_equal(x, weight, None)
    # The interpreter multiplies with numpy, which may round the rows of a matrix differently: the same places of tiles.
    slices = [slice(0, 1), slice(32, 33), slice(16, 70)]
    for rows in slices if device.type == "cpu" else [*slices, slice(33, 34), slice(20, 70)]:
        assert torch.equal(packed_linear(x[rows], weight, deterministic=True), together[rows])
