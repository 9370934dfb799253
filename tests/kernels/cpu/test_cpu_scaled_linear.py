"""The native product over codes with scales: equal to the reference, with a row's bits independent of its batch."""

from dataclasses import replace

import pytest
import torch

from quire.kernels.common.scaled_linear import TOLERANCE, scaled_linear_reference
from quire.kernels.common.scaled_weight import CODE_DTYPES, ScaledWeight
from quire.kernels.cpu.native import Native
from quire.kernels.cpu.scaled_linear import PackedScaledLinear

# Outputs, inputs and group size: around the panel, the step of 8 inputs, and the block of 512; one group or several.
SHAPES = [
    (1, 2, 2),
    (31, 36, 36),
    (100, 514, 514),
    (40, 1030, 1030),
    (33, 96, 16),
    (65, 1120, 32),
    (20, 1152, 128),
    (48, 1152, 576),
    (64, 1024, 1024),
    (7, 576, 72),
]
ROWS = [0, 1, 2, 3, 4, 5, 9, 10, 11, 16, 17, 32, 33, 70]
SCALE_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def _random(
    kind: str, outputs: int, inputs: int, size: int, *, zeros: bool = False, dtype: torch.dtype = torch.bfloat16
) -> ScaledWeight:
    """Codes of all values but NaN, and scales of both signs."""
    generator = torch.Generator().manual_seed(outputs)
    octets = torch.randint(
        0, 256, (outputs, inputs // (1 if kind in ("int8", "fp8") else 2)), dtype=torch.uint8, generator=generator
    )
    if kind == "fp8":
        octets[(octets & 0x7F) == 0x7F] = 1
    groups = inputs // size
    low, high = (0, 16) if kind == "int4" else (-128, 128)
    return ScaledWeight(
        kind,
        octets.view(CODE_DTYPES[kind]),
        torch.randn(outputs, groups, generator=generator).to(dtype),
        size,
        torch.randint(low, high, (outputs, groups), dtype=torch.int8, generator=generator) if zeros else None,
        torch.rand(outputs, generator=generator) + 0.5 if kind == "fp4" else None,
    )


def _rows(count: int, inputs: int) -> torch.Tensor:
    return torch.randn(70, inputs, generator=torch.Generator().manual_seed(2))[:count]


@pytest.mark.parametrize(("outputs", "inputs", "size"), SHAPES)
@pytest.mark.parametrize(
    ("kind", "zeros"),
    [("int8", False), ("int8", True), ("int4", False), ("int4", True), ("fp8", False), ("fp4", False)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_equal_the_reference_in_any_batch(
    native: Native, kind: str, zeros: bool, outputs: int, inputs: int, size: int, dtype: torch.dtype
) -> None:
    """Beside each row of ``x`` lies NaN, which must not be read."""
    weight, bias = _random(kind, outputs, inputs, size, zeros=zeros), torch.randn(outputs)
    packed = PackedScaledLinear(native, weight, bias)
    apart = torch.full((70, 2 * inputs + 1), float("nan"), dtype=dtype)
    x = apart[:, inputs : 2 * inputs]
    x.copy_(_rows(70, inputs))
    alone = torch.cat([packed(row, torch.float32) for row in x.split(1)])
    magnitude = x.double().abs() @ weight.dequantise().double().abs().T + bias.double().abs()
    assert ((alone - scaled_linear_reference(x, weight, bias)).abs() <= TOLERANCE * magnitude).all()
    for rows in ROWS:
        assert torch.equal(packed(x[:rows], torch.float32), alone[:rows])
    assert torch.equal(packed(x.flip(0), torch.float32).flip(0), alone)
    assert torch.equal(packed(x), alone.to(dtype))


@pytest.mark.parametrize("dtype", SCALE_DTYPES)
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8", "fp4"])
def test_scales_of_each_dtype(native: Native, kind: str, dtype: torch.dtype) -> None:
    if dtype is torch.float16 and not native.has_float16:
        pytest.skip("this CPU does not convert float16")
    weight = _random(kind, 65, 1056, 32, dtype=dtype)
    x = _rows(33, 1056)
    magnitude = x.double().abs() @ weight.dequantise().double().abs().T
    expected = scaled_linear_reference(x, weight)
    packed = PackedScaledLinear(native, weight)
    for rows in (1, 33):
        assert ((packed(x[:rows]) - expected[:rows]).abs() <= TOLERANCE * magnitude[:rows]).all()
    half = packed(x.half())
    assert half.dtype is torch.float16 and torch.equal(half, packed(x.half().float()).half())


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("size", [64, 256])
def test_groups_of_any_inputs(native: Native, kind: str, size: int) -> None:
    """The last group may be smaller than the others."""
    whole = _random(kind, 33, 768, size, zeros=kind != "fp8")
    codes = whole.codes[:, : whole.codes.shape[1] * 640 // 768].contiguous()
    groups, held = (torch.randperm(640, generator=torch.Generator().manual_seed(5)) // size).int(), -(-640 // size)
    zeros = None if whole.zeros is None else whole.zeros[:, :held].contiguous()
    scales = whole.scales[:, :held].contiguous()
    weight = replace(whole, codes=codes, scales=scales, zeros=zeros, input_groups=groups)
    for dtype in (torch.float32, torch.bfloat16):
        x = _rows(12, 640).to(dtype)
        out = PackedScaledLinear(native, weight)(x, torch.float32)
        magnitude = x.double().abs() @ weight.dequantise().double().abs().T
        assert ((out - scaled_linear_reference(x, weight)).abs() <= TOLERANCE * magnitude).all()


def test_bits_do_not_depend_on_the_threads(native: Native) -> None:
    packed = PackedScaledLinear(native, _random("int4", 600, 1088, 32))
    before = torch.get_num_threads()
    try:
        for dtype in (torch.float32, torch.bfloat16):
            x = _rows(70, 1088).to(dtype)
            torch.set_num_threads(1)
            alone = packed(x)
            for threads in (2, 3):
                torch.set_num_threads(threads)
                assert torch.equal(packed(x), alone) and torch.equal(packed(x[:1]), alone[:1])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8", "fp4"])
def test_packed_weights_take_the_bytes_of_the_codes(native: Native, kind: str) -> None:
    weight = _random(kind, 96, 1024, 32)
    parts = (weight.codes, weight.scales, weight.row_scales)
    held = sum(part.nbytes for part in parts if part is not None)
    assert held <= PackedScaledLinear(native, weight).num_bytes <= 1.05 * held


def test_nan_stays_in_its_row_and_output(native: Native) -> None:
    weight = _random("int4", 20, 64, 32)
    weight.scales[5, 1] = torch.nan
    x = torch.ones(12, 64)
    x[3, 7] = torch.nan
    for rows in (4, 12):
        out = PackedScaledLinear(native, weight)(x[:rows]).isnan()
        assert out[:, 5].all() and out[3].all()
        assert int(out.sum()) == 20 + rows - 1


def test_weights_that_the_library_lacks_are_rejected(native: Native) -> None:
    order = torch.zeros(64, dtype=torch.int32)
    plain = _random("int4", 20, 64, 32)
    wrong = [
        ScaledWeight("int4", plain.codes, plain.scales, 32, None, None, order),
        ScaledWeight("int4", plain.codes, plain.scales[:, :1], 32),
        ScaledWeight("int4", plain.codes, plain.scales.double(), 32),
        ScaledWeight("int4", plain.codes[:, ::2], plain.scales[:, :1], 32),
        _random("int8", 4, 12, 4),
    ]
    for weight in wrong:
        with pytest.raises(ValueError, match="weight: expected contiguous codes"):
            PackedScaledLinear(native, weight)
    with pytest.raises(ValueError, match="x: expected"):
        PackedScaledLinear(native, plain)(torch.zeros(2, 63))
