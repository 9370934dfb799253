"""Products of quantised weights on a CPU, beside bfloat16."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from quire.bench.worker.record import Bench
from quire.kernels.common.block_weight import BLOCK_TYPES, BlockWeight
from quire.kernels.common.scaled_weight import CODE_BITS, CODE_DTYPES, ScaledWeight
from quire.kernels.cpu.linear.codes import BLOCK_KINDS, CodesLinear
from quire.kernels.cpu.linear.fp8 import Fp8Linear
from quire.kernels.cpu.linear.linear import PackedLinear
from quire.kernels.cpu.native.library import Native, load_native

SCALED = (
    ("int8", 0, torch.bfloat16),
    ("int8", 128, torch.bfloat16),
    ("int4", 128, torch.bfloat16),
    ("int4", 32, torch.float16),
    ("fp4", 16, torch.float8_e4m3fn),
    ("fp8", 128, torch.float32),
)
"""Kind, group size (0: all inputs), and dtype of the scales."""


def cpu_quantised(bench: Bench) -> None:
    """Measure one product for each kind of weights. bfloat16 numbers are one integer each, float32 numbers two."""
    native = load_native()
    if native is None:
        return
    outputs, inputs = bench.pick(full=(3072, 1024), quick=(3072, 1024), dry=(96, 256))
    for name, make in _layers(native, outputs, inputs):
        first = make()
        layers = [first, *(make() for _ in range(min(30, bench.clock.copies(first.num_bytes)) - 1))]
        for rows in bench.pick(full=(1, 4, 32, 512), quick=(1, 32), dry=(2,)):
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.randn(rows, inputs).to(dtype)
                bench.measure(
                    f"{outputs} x {inputs}, {rows} rows, {str(dtype).removeprefix('torch.')}",
                    f"quire, {name}",
                    partial(list, [partial(layer, x) for layer in layers]),
                    read=first.num_bytes,
                    flops=2 * rows * outputs * inputs,
                    dtype=dtype,
                )


def _layers(native: Native, outputs: int, inputs: int) -> Iterator[tuple[str, Callable[[], PackedLinear]]]:
    """Yield the name and a factory of layers with random weights of each kind."""
    yield "bfloat16", lambda: PackedLinear(native, torch.randn(outputs, inputs).bfloat16())
    for kind, size, dtype in SCALED:
        made = CodesLinear if kind != "fp8" else Fp8Linear
        weight = partial(_scaled, kind, outputs, inputs, size or inputs, dtype)
        yield f"{kind}, {size or 'all'} inputs", lambda made=made, weight=weight: made(native, weight())  # type: ignore[misc]
    for kind in BLOCK_KINDS:
        blocks = partial(_blocks, kind, outputs, inputs)
        yield kind, lambda blocks=blocks: CodesLinear(native, blocks())  # type: ignore[misc]


def _scaled(kind: str, outputs: int, inputs: int, size: int, dtype: torch.dtype) -> ScaledWeight:
    codes = torch.randint(0, 112, (outputs, inputs * CODE_BITS[kind] // 8), dtype=torch.uint8)
    return ScaledWeight(kind, codes.view(CODE_DTYPES[kind]), torch.rand(outputs, inputs // size).to(dtype), size)


def _blocks(kind: str, outputs: int, inputs: int) -> BlockWeight:
    size, _, places = BLOCK_TYPES[kind]
    blocks = torch.randint(0, 256, (outputs, inputs // (256 if kind.endswith("_K") else 32), size), dtype=torch.uint8)
    for at in places:
        blocks[..., at : at + 2] = torch.rand(*blocks.shape[:2], 1).half().view(torch.uint8)
    return BlockWeight(kind, blocks.flatten(1), slice(0, inputs))
