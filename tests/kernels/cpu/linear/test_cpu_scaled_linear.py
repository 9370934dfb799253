"""Native products over codes with scales: equal to the reference, with a row's bits independent of its batch."""

from dataclasses import replace

import pytest
import torch
from tiers import covering

from quire.kernels.common.block_weight import BLOCK_TYPES, BlockWeight
from quire.kernels.common.scaled_linear import TOLERANCE, PackedWeight, scaled_linear, scaled_linear_reference
from quire.kernels.common.scaled_weight import CODE_DTYPES, ScaledWeight
from quire.kernels.cpu.linear.codes import BLOCK_KINDS, CodesLinear
from quire.kernels.cpu.linear.fp8 import Fp8Linear
from quire.kernels.cpu.linear.linear import PackedLinear
from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.native.recorded_plan import record

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
ROWS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 14, 15, 16, 17, 28, 29, 33, 70]
DTYPES = [torch.float32, torch.bfloat16]
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


def _blocks(kind: str, outputs: int, inputs: int, held: slice | None = None) -> BlockWeight:
    """Random blocks with scales of usual size."""
    generator = torch.Generator().manual_seed(outputs)
    size, _, places = BLOCK_TYPES[kind]
    count = inputs // (256 if kind.endswith("_K") else 32)
    blocks = torch.randint(0, 256, (outputs, count, size), dtype=torch.uint8, generator=generator)
    for at in places:
        scales = torch.randn(outputs, count, 1, generator=generator).mul_(0.1).half()
        blocks[..., at : at + 2] = scales.view(torch.uint8)
    return BlockWeight(kind, blocks.flatten(1), held or slice(0, inputs))


def _pack(native: Native, weight: PackedWeight, bias: torch.Tensor | None = None) -> PackedLinear:
    if isinstance(weight, ScaledWeight) and weight.kind == "fp8":
        return Fp8Linear(native, weight, bias)
    return CodesLinear(native, weight, bias)


def _assert_close(out: torch.Tensor, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> None:
    """bfloat16 numbers that are small beside the largest one of their row are rounded."""
    wide = weight.dequantise().double()
    most = TOLERANCE * (x.double().abs() @ wide.abs().T + (0 if bias is None else bias.double().abs()))
    if x.dtype is torch.bfloat16 and weight.kind != "fp8":
        most += 2**-15 * x.double().abs().amax(1, keepdim=True) * wide.abs().sum(1)
    assert ((out - scaled_linear_reference(x, weight, bias)).abs() <= most).all()


def _assert_rows_ignore_their_batch(native: Native, weight: PackedWeight, dtype: torch.dtype) -> None:
    """Beside each row of ``x`` lies NaN, which must not be read."""
    outputs, inputs = weight.shape
    bias = torch.randn(outputs)
    packed = _pack(native, weight, bias)
    apart = torch.full((70, 2 * inputs + 1), float("nan"), dtype=dtype)
    x = apart[:, inputs : 2 * inputs]
    x.copy_(_rows(70, inputs))
    alone = torch.cat([packed(row, torch.float32) for row in x.split(1)])
    _assert_close(alone, x, weight, bias)
    for rows in ROWS:
        assert torch.equal(packed(x[:rows], torch.float32), alone[:rows])
    assert torch.equal(packed(x.flip(0), torch.float32).flip(0), alone)
    assert torch.equal(packed(x), alone.to(dtype))


def _skip_without_float16(native: Native) -> None:
    if not native.has_float16:
        pytest.skip("this CPU does not convert float16")


def _rows(count: int, inputs: int) -> torch.Tensor:
    return torch.randn(70, inputs, generator=torch.Generator().manual_seed(2))[:count]


@pytest.mark.parametrize(
    ("shape", "kind", "dtype"),
    covering(SHAPES, ["int8", "int8 with zeros", "int4", "int4 with zeros", "fp8", "fp4"], DTYPES),
)
def test_products_equal_the_reference_in_any_batch(
    native: Native, kind: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    weight = _random(kind.split()[0], *shape, zeros=kind.endswith("zeros"))
    _assert_rows_ignore_their_batch(native, weight, dtype)


@pytest.mark.parametrize(("kind", "shape", "dtype"), covering(BLOCK_KINDS, [(1, 256), (33, 768), (64, 1024)], DTYPES))
def test_blocks_equal_the_reference_in_any_batch(
    native: Native, kind: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    _skip_without_float16(native)
    outputs, inputs = shape
    _assert_rows_ignore_their_batch(native, _blocks(kind, outputs, inputs), dtype)
    part = _blocks(kind, outputs, inputs, slice(inputs // 4 - 8, inputs - 40))  # a rank's inputs
    _assert_rows_ignore_their_batch(native, part, dtype)


@pytest.mark.parametrize(("kind", "dtype"), covering(["int8", "int4", "fp8", "fp4"], SCALE_DTYPES))
def test_scales_of_each_dtype(native: Native, kind: str, dtype: torch.dtype) -> None:
    if dtype is torch.float16:
        _skip_without_float16(native)
    weight = _random(kind, 65, 1056, 32, dtype=dtype)
    x = _rows(33, 1056)
    packed = _pack(native, weight)
    for rows in (1, 33):
        _assert_close(packed(x[:rows]), x[:rows], weight)
    half = packed(x.half())
    assert half.dtype is torch.float16 and torch.equal(half, packed(x.half().float()).half())


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("size", [64, 256])
def test_groups_of_any_inputs(native: Native, kind: str, size: int) -> None:
    """The last group may be smaller than the others; groups of integers may have any inputs, and be of any size."""
    whole = _random(kind, 33, 768, size, zeros=kind != "fp8")
    codes = whole.codes[:, : whole.codes.shape[1] * 640 // 768].contiguous()
    generator, held = torch.Generator().manual_seed(5), -(-640 // size)
    orders = [torch.arange(640) // size]
    if kind != "fp8":
        orders.append(torch.randperm(640, generator=generator) // size)
        orders.append(torch.randint(0, held, (640,), generator=generator))
    zeros = None if whole.zeros is None else whole.zeros[:, :held].contiguous()
    scales = whole.scales[:, :held].contiguous()
    for order in orders:
        weight = replace(whole, codes=codes, scales=scales, zeros=zeros, input_groups=order.int())
        for dtype in (torch.float32, torch.bfloat16):
            x = _rows(12, 640).to(dtype)
            _assert_close(_pack(native, weight)(x, torch.float32), x, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_rounded_to_int8(native: Native, dtype: torch.dtype) -> None:
    weight, bias = _random("int8", 65, 1056, 1056), torch.randn(65)
    x = _rows(33, 1056).to(dtype)
    x[2], x[3, 1:] = 0, 0
    expected = scaled_linear(x.float(), weight, bias, int8_activations=True)
    out = CodesLinear(native, weight, bias, int8_activations=True)(x, torch.float32)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1.0, 1e30])
def test_rows_of_any_magnitude(native: Native, scale: float) -> None:
    weight = _random("int4", 33, 64, 32)
    x = _rows(5, 64) * scale
    x[1, :32] *= 2.0**-20
    x[2, 5] *= 2.0**20 if scale < 1e30 else 1.0
    out = CodesLinear(native, weight)(x)
    if scale > 1e-35:
        _assert_close(out, x, weight)
    assert out.isfinite().all()
    x[3, 40] = torch.inf
    assert CodesLinear(native, weight)(x).isfinite().all(1).tolist() == [True, True, True, False, True]


def test_bits_do_not_depend_on_the_threads(native: Native) -> None:
    packed = _pack(native, _random("int4", 600, 1088, 32))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_run_again_in_a_plan(native: Native, dtype: torch.dtype) -> None:
    """The rounded rows of a product lie in memory that the next one uses again."""
    first = CodesLinear(native, _random("int4", 128, 256, 32))
    second = CodesLinear(native, _random("int8", 64, 128, 128))
    for rows in (1, 40):
        x = _rows(rows, 256).to(dtype)
        plan, out = record(native, lambda x=x: second(first(x)))  # type: ignore[misc]
        for factor in (0.5, -3.0):
            x *= factor
            assert plan.run() == 0
            assert torch.equal(out, second(first(x)))


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8", "fp4"])
def test_packed_weights_take_the_bytes_of_the_codes(native: Native, kind: str) -> None:
    weight = _random(kind, 96, 1024, 32)
    parts = (weight.codes, weight.scales, weight.row_scales)
    held = sum(part.nbytes for part in parts if part is not None)
    assert held <= _pack(native, weight).num_bytes <= 1.03 * held


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_packed_blocks_take_the_bytes_of_the_file(native: Native, kind: str) -> None:
    _skip_without_float16(native)
    weight = _blocks(kind, 96, 1024)
    assert weight.blocks.nbytes <= CodesLinear(native, weight).num_bytes <= 1.03 * weight.blocks.nbytes


def test_nan_stays_in_its_row_and_output(native: Native) -> None:
    weight = _random("int4", 20, 64, 32)
    weight.scales[5, 1] = torch.nan
    x = torch.ones(12, 64)
    x[3, 7] = torch.nan
    for rows in (4, 12):
        out = _pack(native, weight)(x[:rows]).isnan()
        assert out[:, 5].all() and out[3].all()
        assert int(out.sum()) == 20 + rows - 1


def test_weights_that_the_library_lacks_are_rejected(native: Native) -> None:
    uneven = torch.zeros(64, dtype=torch.int32)
    uneven[63] = 1
    plain, fp8 = _random("int4", 20, 64, 32), _random("fp8", 20, 64, 32)
    wrong: list[PackedWeight] = [
        ScaledWeight("int4", plain.codes, plain.scales, 32, None, None, uneven),
        ScaledWeight("int4", plain.codes, plain.scales[:, :1], 32),
        ScaledWeight("int4", plain.codes, plain.scales.double(), 32),
        ScaledWeight("int4", plain.codes[:, ::2], plain.scales[:, :1], 32),
        _random("int8", 4, 12, 4),
        fp8,
    ]
    for weight in wrong:
        with pytest.raises(ValueError, match="weight: expected contiguous codes"):
            CodesLinear(native, weight)
    for other in (plain, replace(fp8, scales=fp8.scales.double()), replace(fp8, input_groups=uneven)):
        with pytest.raises(ValueError, match="weight: expected contiguous fp8 codes"):
            Fp8Linear(native, other)
    with pytest.raises(ValueError, match="x: expected"):
        CodesLinear(native, plain)(torch.zeros(2, 63))
