"""The native linear layer: equal to the reference, with a row's bits independent of its batch."""

import pytest
import torch

from quire.kernels.common.mxfp4 import dequantise_mxfp4
from quire.kernels.cpu.linear.linear import TOLERANCE, PackedLinear, linear_reference
from quire.kernels.cpu.native.library import Native

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Outputs and inputs around the panel, the pair of inputs in a word, and blocks of up to 576 inputs.
SHAPES = [(1, 1), (16, 8), (31, 33), (100, 575), (48, 576), (65, 577), (40, 1155)]


def _skip_unless_supported(native: Native, dtype: torch.dtype) -> None:
    if dtype is torch.float16 and not native.has_float16:
        pytest.skip("this CPU does not convert float16")


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _assert_close(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    magnitude = linear_reference(x.abs(), weight.abs(), None if bias is None else bias.abs())
    error = (out - linear_reference(x, weight, bias)).abs()
    assert (error <= TOLERANCE * magnitude).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_result_equals_the_reference(native: Native, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    _skip_unless_supported(native, dtype)
    weight, bias = _random(outputs, inputs).to(dtype), _random(outputs, seed=1)
    plain, biased = PackedLinear(native, weight), PackedLinear(native, weight, bias)
    for rows in [*range(14), 25, 33, 70]:
        x = _random(rows, inputs, seed=rows)
        _assert_close(plain(x), x, weight, None)
        _assert_close(biased(x), x, weight, bias)


def test_rows_may_be_strided_and_of_a_narrower_dtype(native: Native) -> None:
    packed = PackedLinear(native, _random(20, 24))
    wide = _random(7, 64)
    assert torch.equal(packed(wide[:, 8:32]), packed(wide[:, 8:32].contiguous()))
    assert torch.equal(packed(wide.T[:24, :5].T), packed(wide.T[:24, :5].T.contiguous()))
    half = wide[:, :24].bfloat16()
    assert torch.equal(packed(half), packed(half.float()).bfloat16())


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (31, 64), (100, 1088), (65, 520)])
def test_bfloat16_rows_give_the_float32_sums(native: Native, outputs: int, inputs: int) -> None:
    """On CPUs with matrix tiles these shapes use them, but for the last, which is not a multiple of a tile."""
    weight, bias = _random(outputs, inputs).bfloat16(), _random(outputs, seed=1)
    packed = PackedLinear(native, weight, bias)
    alone = packed(_random(70, inputs, seed=3).bfloat16()[:1], torch.float32)
    for rows in (0, 1, 2, 15, 16, 17, 31, 32, 33, 70):
        x = _random(70, inputs, seed=3).bfloat16()[:rows]
        out = packed(x, torch.float32)
        _assert_close(out, x, weight, bias)
        assert out.dtype is torch.float32
        assert torch.equal(out[:1], alone[:rows])
        assert torch.equal(packed(x.flip(0), torch.float32).flip(0), out)
        assert torch.equal(packed(x), out.bfloat16())
        apart = torch.full((rows, 2 * inputs + 1), float("nan"), dtype=torch.bfloat16)
        apart[:, inputs : 2 * inputs] = x
        assert torch.equal(packed(apart[:, inputs : 2 * inputs], torch.float32), out)


def test_nan_and_infinity_stay_in_their_row_and_output(native: Native) -> None:
    """Padding is multiplied too, so it must be zeros and not uninitialised memory."""
    x, weight = _random(7, 33), _random(20, 33).bfloat16()
    x[2, 32], weight[5, 32] = float("nan"), float("inf")
    out = PackedLinear(native, weight)(x)
    assert out[2].isnan().all() and not out[[0, 1, 3, 4, 5, 6]].isnan().any()
    assert out[0, 5].isinf() and out[0].isfinite().sum() == 19


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_bits_do_not_depend_on_the_batch(native: Native, dtype: torch.dtype) -> None:
    _skip_unless_supported(native, dtype)
    packed = PackedLinear(native, _random(100, 1100).to(dtype), _random(100, seed=1))
    x = _random(300, 1100, seed=2)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([packed(row) for row in x.split(1)])
        # Threads wait for each other at every barrier if they share cores, so most cases use one thread.
        for threads, batches in ((1, (2, 7, 33, 300)), (2, (33, 300)), (3, (300,))):
            torch.set_num_threads(threads)
            for rows in batches:
                assert torch.equal(torch.cat([packed(part) for part in x.split(rows)]), alone)
                assert torch.equal(packed(x.flip(0)[:rows]), alone.flip(0)[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (31, 64), (100, 512), (65, 544), (40, 1120)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_gives_the_bits_of_the_same_numbers_in_bfloat16(
    native: Native, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    """That holds for any number of rows, so a row's bits do not depend on its batch either."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(90, 140, (outputs, inputs // 32), dtype=torch.uint8, generator=generator)
    scales[-1, -1] = 0
    weight, bias = dequantise_mxfp4(blocks, scales, torch.bfloat16), _random(outputs, seed=1)
    packed, wide = PackedLinear.from_mxfp4(native, blocks, scales, bias), PackedLinear(native, weight, bias)
    padded = -(-outputs // (2 * native.vector_floats)) * 2 * native.vector_floats
    assert packed.num_bytes == padded * inputs * 17 // 32
    alone = torch.cat([packed(row, torch.float32) for row in _random(70, inputs, seed=2).to(dtype).split(1)])
    for rows in (0, 1, 2, 3, 4, 5, 9, 10, 11, 16, 33, 70):
        x = _random(70, inputs, seed=2).to(dtype)[:rows]
        out = packed(x, torch.float32)
        assert torch.equal(out, wide(x, torch.float32)) and torch.equal(out, alone[:rows])
        _assert_close(out, x, weight, bias)


def test_mxfp4_with_nan_scale_or_row(native: Native) -> None:
    blocks, scales = torch.full((20, 2, 16), 0x22, dtype=torch.uint8), torch.full((20, 2), 127, dtype=torch.uint8)
    scales[5, 1] = 255
    x = torch.ones(12, 64)
    x[3, 7] = float("nan")
    for rows in (4, 12):
        out = PackedLinear.from_mxfp4(native, blocks, scales)(x[:rows])
        assert out[:, 5].isnan().all() and out[3].isnan().all()
        assert (out[:3, :5] == 64).all() and (out[:3, 6:] == 64).all()


def test_wrong_shapes_of_mxfp4_are_rejected(native: Native) -> None:
    blocks, scales = torch.zeros(4, 2, 16, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="blocks: "):
        PackedLinear.from_mxfp4(native, blocks[..., :8], scales)
    with pytest.raises(ValueError, match="scales: "):
        PackedLinear.from_mxfp4(native, blocks, scales[:, :1])
    with pytest.raises(ValueError, match="expected contiguous"):
        PackedLinear.from_mxfp4(native, blocks[::2], scales[::2])


def test_wrong_shapes_and_dtypes_are_rejected(native: Native) -> None:
    packed = PackedLinear(native, _random(20, 24))
    with pytest.raises(ValueError, match="x: expected"):
        packed(_random(2, 23))
    with pytest.raises(ValueError, match="weight: expected a contiguous matrix"):
        PackedLinear(native, _random(24, 20).T)
    with pytest.raises(ValueError, match="weight: expected a contiguous matrix"):
        PackedLinear(native, _random(4, 4).double())
