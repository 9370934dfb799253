"""Weights as codes with scales: worked examples of each kind, and the product against float64."""

import pytest
import torch

from quire.kernels.common.scaled_linear import TOLERANCE, round_to_int8, scaled_linear, scaled_linear_reference
from quire.kernels.common.scaled_weight import CODE_DTYPES, ScaledWeight, pack_pairs


def _random(
    kind: str, outputs: int, inputs: int, size: int, *, zeros: bool = False, ordered: bool = False
) -> ScaledWeight:
    generator = torch.Generator().manual_seed(3)
    stored = inputs if kind in ("int8", "fp8") else inputs // 2
    octets = torch.randint(0, 256, (outputs, stored), dtype=torch.uint8, generator=generator)
    codes = (octets & 0xBF if kind == "fp8" else octets).view(CODE_DTYPES[kind])
    groups = -(-inputs // size)
    scales = torch.rand(outputs, groups, generator=generator) + 0.5
    return ScaledWeight(
        kind,
        codes,
        scales.bfloat16(),
        size,
        torch.randint(0, 16, (outputs, groups), dtype=torch.int8, generator=generator) if zeros else None,
        torch.rand(outputs, generator=generator) if kind == "fp4" else None,
        torch.randint(0, groups, (inputs,), dtype=torch.int32, generator=generator) if ordered else None,
    )


def test_worked_examples() -> None:
    two = torch.tensor([[2.0, 0.5]])
    packed = pack_pairs(torch.tensor([[0, 15, 8, 9]]))
    assert packed.tolist() == [[0xF0, 0x98]]
    assert ScaledWeight("int4", packed, two, 2).dequantise().tolist() == [[-16, 14, 0, 0.5]]
    zeros = torch.tensor([[1, 9]], dtype=torch.int8)
    assert ScaledWeight("int4", packed, two, 2, zeros).dequantise().tolist() == [[-2, 28, -0.5, 0]]
    order = torch.tensor([1, 0, 0, 1], dtype=torch.int32)
    assert ScaledWeight("int4", packed, two, 2, None, None, order).dequantise().tolist() == [[-4, 14, 0, 0.5]]
    row = torch.tensor([4.0])
    assert ScaledWeight("fp4", packed, two, 2, None, row).dequantise().tolist() == [[0, -48, 0, -1]]
    every = torch.tensor([[code for code in range(256) if code & 0x7F != 0x7F]], dtype=torch.uint8)
    eights = every.view(torch.float8_e4m3fn)
    assert torch.equal(ScaledWeight("fp8", eights, torch.tensor([[0.75]]), 254).dequantise(), eights.float() * 0.75)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    fours = ScaledWeight("fp4", pack_pairs(torch.arange(16)[None]), torch.tensor([[0.75]]), 16)
    assert fours.dequantise().tolist() == [[0.75 * n for n in [*magnitudes, *(-n for n in magnitudes)]]]
    octets = torch.tensor([[-128, 127, 1, 2]], dtype=torch.int8)
    assert ScaledWeight("int8", octets, two, 2, zeros).dequantise().tolist() == [[-258, 252, -4, -3.5]]


@pytest.mark.parametrize("kind", CODE_DTYPES)
@pytest.mark.parametrize(
    ("inputs", "size", "ordered"), [(96, 32, False), (96, 96, False), (96, 32, True), (80, 32, True)]
)
@pytest.mark.parametrize("zeros", [False, True])
def test_product_equals_the_reference(kind: str, inputs: int, size: int, ordered: bool, zeros: bool) -> None:
    """More outputs than one part has, so that the last part is short."""
    weight = _random(kind, 2800, inputs, size, zeros=zeros, ordered=ordered)
    assert weight.shape == (2800, inputs)
    x = torch.randn(3, inputs, generator=torch.Generator().manual_seed(4))
    bias = torch.randn(2800)
    expected = scaled_linear_reference(x, weight, bias)
    magnitude = x.double().abs() @ weight.dequantise().double().abs().T + bias.double().abs()
    assert bool(((scaled_linear(x, weight, bias) - expected).abs() <= TOLERANCE * magnitude).all())
    narrow = scaled_linear(x.bfloat16(), weight)
    assert narrow.dtype is torch.bfloat16
    torch.testing.assert_close(narrow, scaled_linear(x.bfloat16().float(), weight).bfloat16(), rtol=0, atol=0)


def test_int8_activations() -> None:
    x = torch.tensor([[0.0, 0.0], [127.5, -127.5], [-3.0, 1.0]])
    codes, scales = round_to_int8(x)
    assert codes.tolist() == [[0, 0], [127, -128], [-128, 42]] and scales[1:].tolist() == [
        [1.0],
        [pytest.approx(3 / 127.5)],
    ]
    weight = _random("int8", 5, 2, 2)
    rounded = scaled_linear_reference(codes * scales, weight)
    torch.testing.assert_close(scaled_linear(x, weight, int8_activations=True).double(), rounded, rtol=1e-5, atol=1e-5)
