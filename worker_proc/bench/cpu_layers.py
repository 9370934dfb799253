"""A decoder's products and element-wise steps on a CPU, in the shapes of smollm2-135m."""

from collections.abc import Callable, Sequence
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
Packed = Callable[..., object]

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
        # As many layers as the caches cannot hold: a step finds none of its weights in them.
        copies = min(30, bench.clock.copies(sum(a * b for a, b in shapes) * 2))
        weights = [[torch.randn(shape).mul_(0.02) for shape in shapes] for _ in range(copies)]
        ways = {
            "ours, bfloat16": _native(weights, torch.bfloat16),
            "ours, float32": _native(weights, torch.float32),
            "oneDNN packed, bfloat16": _packed(weights),
            "F.linear, bfloat16": _plain(weights, torch.bfloat16),
            "F.linear, float32": _plain(weights, torch.float32),
        }
        for rows in bench.pick(full=ROWS, quick=(1, 32), dry=(2,)):
            for way, layers in ways.items():
                dtype = torch.bfloat16 if way.endswith("bfloat16") else torch.float32
                wide = torch.float32 if way.startswith("ours") else dtype
                inputs = [torch.randn(rows, shape[1]).to(wide) for shape in shapes]
                calls = [partial(_all_products, layer, inputs) for layer in layers]
                if not calls:
                    continue
                size = sum(a * b for a, b in shapes)
                bench.measure(
                    f"{name}, {rows} rows",
                    way,
                    partial(list, calls),
                    read=size * dtype.itemsize,
                    flops=2 * rows * size,
                    dtype=wide,
                )


def _all_products(layer: Sequence[Product], inputs: Sequence[torch.Tensor]) -> None:
    for product, x in zip(layer, inputs, strict=True):
        product(x)


def _native(weights: list[list[torch.Tensor]], dtype: torch.dtype) -> list[list[Product]]:
    native = load_native()
    if native is None:
        return []
    return [[PackedLinear(native, weight.to(dtype)) for weight in layer] for layer in weights]


def _packed(weights: list[list[torch.Tensor]]) -> list[list[Product]]:
    """By torch's private operators, where this release has them."""
    try:
        reorder, product = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
        layers = [[reorder(weight.bfloat16()) for weight in layer] for layer in weights]
        for weight in layers[0]:
            product(torch.zeros(1, weight.shape[1], dtype=torch.bfloat16), weight, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return []
    return [[partial(_apply_packed, product, weight) for weight in layer] for layer in layers]


def _apply_packed(product: Packed, weight: torch.Tensor, x: torch.Tensor) -> object:
    return product(x, weight, None, "none", [], "")


def _plain(weights: list[list[torch.Tensor]], dtype: torch.dtype) -> list[list[Product]]:
    return [[partial(_apply_plain, weight.to(dtype)) for weight in layer] for layer in weights]


def _apply_plain(weight: torch.Tensor, x: torch.Tensor) -> object:
    return F.linear(x, weight)


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
