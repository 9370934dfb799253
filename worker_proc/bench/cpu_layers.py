"""A decoder's products and element-wise steps on a CPU, in the shapes of smollm2-135m."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch
import torch.nn.functional as F

from quire.kernels.cpu.linear import PackedLinear
from quire.kernels.cpu.native import load_native
from quire.protocol.model.model_config import ModelConfig
from quire.worker_proc.bench.record import Bench
from quire.worker_proc.bench.timing import Call
from quire.worker_proc.models.ops import TorchOps

Product = Callable[[torch.Tensor], object]

ROWS = (1, 8, 32, 256)


def layer_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """(outputs, inputs) of one layer's products."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return [
        (heads, model.hidden_size),
        (model.hidden_size, model.num_heads * model.head_dim),
        (2 * model.intermediate_size, model.hidden_size),
        (model.hidden_size, model.intermediate_size),
    ]


def cpu_linear(bench: Bench) -> None:
    """All products of one layer, and the output head. Weights are read once; from some rows on, arithmetic is more."""
    model = bench.models["smollm2-135m"]
    head = bench.pick(full=model.vocab_size, quick=model.vocab_size, dry=96)
    stacks = {"one layer": layer_shapes(model), "output head": [(head, model.hidden_size)]}
    for name, shapes in stacks.items():
        size = sum(a * b for a, b in shapes)
        # As many layers as the caches cannot hold: a step finds none of its weights in them.
        copies = min(30, bench.clock.copies(size * 2))
        weights = [[torch.randn(shape).mul_(0.02) for shape in shapes] for _ in range(copies)]
        ways = {
            (way, dtype): [[prepare(weight.to(dtype)) for weight in layer] for layer in weights]
            for way, dtype, prepare in _ways()
        }
        for rows in bench.pick(full=ROWS, quick=(1, 32), dry=(2,)):
            for (way, dtype), layers in ways.items():
                wide = torch.float32 if way == "ours" else dtype
                inputs = [torch.randn(rows, shape[1]).to(wide) for shape in shapes]
                calls = [partial(_all_products, layer, inputs) for layer in layers]
                bench.measure(
                    f"{name}, {rows} rows",
                    f"{way}, {str(dtype).removeprefix('torch.')}",
                    partial(list, calls),
                    read=size * dtype.itemsize,
                    flops=2 * rows * size,
                    dtype=wide,
                )


def _all_products(layer: Sequence[Product], inputs: Sequence[torch.Tensor]) -> None:
    for product, x in zip(layer, inputs, strict=True):
        product(x)


def _ways() -> Iterator[tuple[str, torch.dtype, Callable[[torch.Tensor], Product]]]:
    """(name, dtype of the weights, what makes a product of a weight) of each that this machine has."""
    native = load_native()
    if native is not None:
        yield "ours", torch.bfloat16, partial(PackedLinear, native)
        yield "ours", torch.float32, partial(PackedLinear, native)
    with suppress(AttributeError, RuntimeError):
        _packed(torch.zeros(16, 16, dtype=torch.bfloat16))(torch.zeros(1, 16, dtype=torch.bfloat16))
        yield "oneDNN packed", torch.bfloat16, _packed
    yield "F.linear", torch.bfloat16, _plain
    yield "F.linear", torch.float32, _plain


def _packed(weight: torch.Tensor) -> Product:
    """By torch's private operators, which not every release has."""
    reordered, product = torch.ops.mkldnn._reorder_linear_weight(weight), torch.ops.mkldnn._linear_pointwise
    return lambda x: product(x, reordered, None, "none", [], "")


def _plain(weight: torch.Tensor) -> Product:
    return lambda x: F.linear(x, weight)


def cpu_ops(bench: Bench) -> None:
    """Norms and gates; small enough to stay in a cache, as they do between two products."""
    from quire.kernels.cpu.ops import CpuKernels

    model = bench.models["smollm2-135m"]
    native = load_native()
    ways: dict[str, CpuKernels | TorchOps] = {} if native is None else {"ours": CpuKernels(native)}
    ways["torch"] = TorchOps()
    width, inner = model.hidden_size, model.intermediate_size
    for rows in bench.pick(full=(1, 32, 256), quick=(1, 32), dry=(2,)):
        x, residual, weight = torch.randn(rows, width), torch.zeros(rows, width), torch.ones(width)
        gate_up = torch.randn(rows, 2 * inner)
        for way, kernels in ways.items():
            cases: dict[str, Call] = {
                "rms_norm": partial(kernels.rms_norm, x, weight, 1e-5),
                "add_rms_norm": partial(kernels.add_rms_norm, x, residual, weight, 1e-5),
                "silu gate": partial(kernels.gate, gate_up, "silu"),
            }
            for name, call in cases.items():
                bench.measure(f"{name}, {rows} rows", way, partial(list, [call]))
