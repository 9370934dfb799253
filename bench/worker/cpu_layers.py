"""Matrix products, experts and element-wise steps of a decoder on a CPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch
import torch.nn.functional as F

from quire.bench.worker.record import Bench
from quire.bench.worker.timing import Call
from quire.kernels.common.mxfp4 import GROUP_BYTES, GROUP_SIZE, dequantise_mxfp4
from quire.kernels.cpu.linear.linear import PackedLinear
from quire.kernels.cpu.native.library import load_native
from quire.protocol.model.model_config import ModelConfig
from quire.worker_proc.models.cpu_ops import CpuOps
from quire.worker_proc.models.ops import Experts, TorchOps

Product = Callable[[torch.Tensor], object]

ROWS = (1, 8, 32, 256)


def layer_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of one layer's matrix products."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return [
        (heads, model.hidden_size),
        (model.hidden_size, model.num_heads * model.head_dim),
        (2 * model.intermediate_size, model.hidden_size),
        (model.hidden_size, model.intermediate_size),
    ]


def cpu_linear(bench: Bench) -> None:
    """Measure all products of one layer, and the output head. Weight reads limit few rows, arithmetic many rows."""
    model = bench.models["smollm2-135m"]
    head = bench.pick(full=model.vocab_size, quick=model.vocab_size, dry=96)
    stacks = {"one layer": layer_shapes(model), "output head": [(head, model.hidden_size)]}
    for name, shapes in stacks.items():
        size = sum(a * b for a, b in shapes)
        # More layers than the caches can hold, so that a step finds no weights in them.
        copies = min(30, bench.clock.copies(size * 2))
        weights = [[torch.randn(shape).mul_(0.02) for shape in shapes] for _ in range(copies)]
        implementations = {
            (implementation, dtype): [[prepare(weight.to(dtype)) for weight in layer] for layer in weights]
            for implementation, dtype, prepare in _implementations()
        }
        for rows in bench.pick(full=ROWS, quick=(1, 32), dry=(2,)):
            for (implementation, dtype), layers in implementations.items():
                wide = torch.float32 if implementation == "quire" else dtype
                inputs = [torch.randn(rows, shape[1]).to(wide) for shape in shapes]
                calls = [partial(_all_products, layer, inputs) for layer in layers]
                bench.measure(
                    f"{name}, {rows} rows",
                    f"{implementation}, {str(dtype).removeprefix('torch.')}",
                    partial(list, calls),
                    read=size * dtype.itemsize,
                    flops=2 * rows * size,
                    dtype=wide,
                )


def _all_products(layer: Sequence[Product], inputs: Sequence[torch.Tensor]) -> None:
    for product, x in zip(layer, inputs, strict=True):
        product(x)


def _implementations() -> Iterator[tuple[str, torch.dtype, Callable[[torch.Tensor], Product]]]:
    """Yield (name, dtype of the weights, factory of a product) of each implementation that this machine has."""
    native = load_native()
    if native is not None:
        yield "quire", torch.bfloat16, partial(PackedLinear, native)
        yield "quire", torch.float32, partial(PackedLinear, native)
    with suppress(AttributeError, RuntimeError):
        _packed(torch.zeros(16, 16, dtype=torch.bfloat16))(torch.zeros(1, 16, dtype=torch.bfloat16))
        yield "oneDNN packed", torch.bfloat16, _packed
    yield "F.linear", torch.bfloat16, _plain
    yield "F.linear", torch.float32, _plain


def _packed(weight: torch.Tensor) -> Product:
    """Prepare oneDNN's packed product, by private operators of torch that not every release has."""
    reordered, product = torch.ops.mkldnn._reorder_linear_weight(weight), torch.ops.mkldnn._linear_pointwise
    return lambda x: product(x, reordered, None, "none", [], "")


def _plain(weight: torch.Tensor) -> Product:
    return lambda x: F.linear(x, weight)


def cpu_experts(bench: Bench) -> None:
    """Measure the experts of a layer, packed in MXFP4 and widened to bfloat16, over random routes.

    A decode step of few tokens reads the weights of their experts: packed, about a quarter of the bytes.
    """
    native = load_native()
    model = bench.models["gpt-oss-20b"]
    if native is None or model.moe is None:
        return
    top_k, count = model.moe.num_experts_per_token, bench.pick(full=16, quick=8, dry=4)
    hidden, width = (bench.pick(full=size, quick=size, dry=64) for size in (model.hidden_size, model.intermediate_size))
    packed, wide = [], []
    for _ in range(count):
        first, second = _random_mxfp4(2 * width, hidden), _random_mxfp4(hidden, width)
        packed.append((PackedLinear.from_mxfp4(native, *first), PackedLinear.from_mxfp4(native, *second)))
        first_wide, second_wide = (dequantise_mxfp4(*layer, torch.bfloat16) for layer in (first, second))
        wide.append((PackedLinear(native, first_wide), PackedLinear(native, second_wide)))
    empty, ops = torch.empty(0), CpuOps(native)
    experts = {
        "quire, MXFP4": Experts(empty, empty, activation=model.moe.activation, packed=packed),
        "quire, bfloat16": Experts(empty, empty, activation=model.moe.activation, packed=wide),
    }
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in bench.pick(full=(1, 4, 16, 64), quick=(1, 16), dry=(2,)):
            steps = [torch.rand(tokens, count).topk(top_k).indices.int() for _ in range(8)]
            x, weights = torch.randn(tokens, hidden).to(dtype), torch.full((tokens, top_k), 1 / top_k)
            for name, of in experts.items():
                calls = [partial(ops.experts, x, of, chosen, weights) for chosen in steps]
                bench.measure(
                    f"{tokens} tokens, {str(dtype).removeprefix('torch.')}",
                    name,
                    partial(list, calls),
                    flops=6 * tokens * top_k * hidden * width,
                    dtype=dtype,
                )


def _random_mxfp4(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (outputs, inputs // GROUP_SIZE)
    return torch.randint(0, 256, (*shape, GROUP_BYTES), dtype=torch.uint8), torch.full(shape, 120, dtype=torch.uint8)


def cpu_ops(bench: Bench) -> None:
    """Measure norms and gates, with inputs small enough to stay in a cache, as between two products."""
    from quire.kernels.cpu.linear.ops import CpuKernels

    model = bench.models["smollm2-135m"]
    native = load_native()
    implementations: dict[str, CpuKernels | TorchOps] = {} if native is None else {"quire": CpuKernels(native)}
    implementations["torch"] = TorchOps()
    width, inner = model.hidden_size, model.intermediate_size
    for rows in bench.pick(full=(1, 32, 256), quick=(1, 32), dry=(2,)):
        x, residual, weight = torch.randn(rows, width), torch.zeros(rows, width), torch.ones(width)
        gate_up = torch.randn(rows, 2 * inner)
        for implementation, kernels in implementations.items():
            cases: dict[str, Call] = {
                "rms_norm": partial(kernels.rms_norm, x, weight, 1e-5),
                "add_rms_norm": partial(kernels.add_rms_norm, x, residual, weight, 1e-5),
                "silu gate": partial(kernels.gate, gate_up, "silu"),
            }
            for name, call in cases.items():
                bench.measure(f"{name}, {rows} rows", implementation, partial(list, [call]))
