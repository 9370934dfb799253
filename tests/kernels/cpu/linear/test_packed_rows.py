"""Rows of packed weights: written in parts, and gathered as embeddings."""

import math
from itertools import pairwise

import pytest
import torch
from tiers import covering

from quire.kernels.common.block_weight import BLOCK_TYPES, BlockWeight
from quire.kernels.common.scaled_linear import PackedWeight
from quire.kernels.common.scaled_weight import CODE_DTYPES, ScaledWeight
from quire.kernels.cpu.linear.codes import BLOCK_KINDS, SCALED_KINDS, CodesLinear
from quire.kernels.cpu.linear.linear import PackedLinear
from quire.kernels.cpu.linear.packed_rows import EmbeddingRows
from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.native.recorded_plan import record

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (5, 7), (70, 33), (100, 64), (64, 577)]


def _weight(native: Native, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.float16 and not native.has_float16:
        pytest.skip("this CPU does not convert float16")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(*shape, generator=generator) * torch.logspace(-9, 3, shape[0])[:, None]
    weight[0, 0] = -0.0
    return weight.to(dtype)  # in float16, some numbers are subnormal


@pytest.mark.parametrize(("dtype", "shape"), covering(DTYPES, SHAPES))
def test_rows_written_in_parts_are_those_written_at_once(
    native: Native, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight = _weight(native, shape, dtype)
    outputs, inputs = shape
    whole, parts = PackedLinear(native, weight), PackedLinear.unfilled(native, outputs, inputs, dtype)
    parts.packed.fill_(255)
    beside = torch.cat([torch.full_like(weight, math.nan), weight], 1)[:, inputs:]
    cuts = sorted({0, min(3, outputs), min(40, outputs), outputs})
    for first, end in reversed(list(pairwise(cuts))):
        assert parts.write_rows(first, beside[first:end])
    assert torch.equal(whole.packed, parts.packed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_not_finite_are_found(native: Native, dtype: torch.dtype) -> None:
    weight = _weight(native, (70, 33), dtype)
    packed = PackedLinear(native, weight)
    for row, column, number in [(0, 0, math.nan), (69, 32, math.inf), (33, 31, -math.inf)]:
        broken = weight.clone()
        broken[row, column] = number
        assert not packed.write_rows(0, broken)
    for sign in (1, -1):
        largest = weight.clone()
        largest[1, :2] = sign * torch.finfo(dtype).max
        assert packed.write_rows(0, largest)


@pytest.mark.parametrize(("dtype", "shape", "factor"), covering(DTYPES, SHAPES, [1.0, 5.5]))
def test_gathered_rows_are_those_of_the_weight(
    native: Native, dtype: torch.dtype, shape: tuple[int, int], factor: float
) -> None:
    weight = _weight(native, shape, dtype)
    ids = torch.tensor([7, 6 + len(weight), 7, 6, 7 + len(weight), -1, 2**40, *range(7, 7 + len(weight))])
    held = (ids >= 7) & (ids < 7 + len(weight))
    expected = torch.zeros(len(ids), shape[1])
    expected[held] = weight[ids[held] - 7].float() * factor
    for source in (weight, PackedLinear(native, weight)):
        rows = EmbeddingRows(native, source, range(7, 7 + len(weight)), factor)
        for out in DTYPES:
            assert torch.equal(rows(ids, out), expected.to(out))
        assert rows(ids[:0], dtype).shape == (0, shape[1])


def _codes(kind: str, outputs: int, inputs: int) -> PackedWeight:
    generator = torch.Generator().manual_seed(outputs)

    def octets(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).half()

    if kind in BLOCK_KINDS:
        size, _, places = BLOCK_TYPES[kind]
        blocks = octets(outputs, inputs // (256 if kind.endswith("_K") else 32), size)
        for at in places:
            blocks[..., at : at + 2] = scales(*blocks.shape[:2], 1).view(torch.uint8)
        return BlockWeight(kind, blocks.flatten(1), slice(8, inputs - 16))
    width = inputs if kind == "int8" else inputs // 2
    codes, groups = octets(outputs, width).view(CODE_DTYPES[kind]), scales(outputs, inputs // 64)
    zeros = octets(outputs, inputs // 64).view(torch.int8) >> 5 if kind != "fp4" else None
    rows = torch.rand(outputs, generator=generator) if kind == "fp4" else None
    order = torch.arange(inputs, dtype=torch.int32) % groups.shape[1] if kind == "int4" else None
    return ScaledWeight(kind, codes, groups, 64, zeros, rows, order)


@pytest.mark.parametrize(("kind", "shape"), covering([*SCALED_KINDS, *BLOCK_KINDS], [(1, 256), (70, 768)]))
def test_gathered_codes_are_those_of_the_weight(native: Native, kind: str, shape: tuple[int, int]) -> None:
    weight = _codes(kind, *shape)
    if not CodesLinear.takes(native, weight):
        pytest.skip("this CPU does not convert float16")
    rows = EmbeddingRows(native, CodesLinear(native, weight), range(7, 7 + shape[0]), 5.5)
    ids = torch.tensor([6, 7 + shape[0], -1, *range(7, 7 + shape[0])])
    expected = torch.cat([torch.zeros(3, weight.shape[1]), weight.dequantise() * 5.5])
    for out in DTYPES:
        assert torch.equal(rows(ids, out), expected.to(out))


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_blocks_written_in_parts_are_those_written_at_once(native: Native, kind: str) -> None:
    weight = _codes(kind, 70, 768)
    if not isinstance(weight, BlockWeight) or not CodesLinear.takes(native, weight):
        pytest.skip("this CPU does not convert float16")
    size = weight.blocks.shape[1]
    parts = CodesLinear.of_blocks(native, kind, 70, weight.inputs, size)
    beside = torch.cat([weight.blocks + 1, weight.blocks], 1)[:, size:]
    for first, end in ((40, 70), (0, 3), (3, 40)):
        assert parts.write_blocks(first, beside[first:end])
    whole, x = CodesLinear(native, weight), torch.randn(3, weight.shape[1])
    assert torch.equal(parts(x), whole(x))
    for at in BLOCK_TYPES[kind][2]:
        broken = weight.blocks[:1].clone()
        broken[0, at + 1] = 0x7C  # infinity or NaN
        assert not parts.write_blocks(69, broken)
    for first, rows in ((0, beside[:, 1:]), (69, beside[:2])):
        with pytest.raises(ValueError, match="rows: "):
            parts.write_blocks(first, rows)


def test_a_plan_gathers_the_rows_of_new_ids(native: Native) -> None:
    weight = _weight(native, (5000, 64), torch.bfloat16)
    rows = EmbeddingRows(native, PackedLinear(native, weight), range(5000))
    ids = torch.arange(3000)
    plan, out = record(native, lambda: rows(ids, torch.bfloat16))
    ids.copy_(torch.arange(4999, 1999, -1))
    plan.run()
    assert torch.equal(out, weight[ids])


def test_wrong_arguments_are_refused(native: Native) -> None:
    packed = PackedLinear(native, _weight(native, (20, 24), torch.float32))
    for first, rows in [(0, torch.ones(2, 23)), (19, torch.ones(2, 24)), (0, torch.ones(2, 24).bfloat16())]:
        with pytest.raises(ValueError, match=r"rows: expected \[rows, 24\]"):
            packed.write_rows(first, rows)
    with pytest.raises(ValueError, match="weight: expected packed or contiguous rows"):
        EmbeddingRows(native, torch.ones(24, 20, dtype=torch.int8), range(24))
    with pytest.raises(ValueError, match="token_ids"):
        EmbeddingRows(native, packed, range(20))(torch.ones(3), torch.float32)
