"""Addends of LoRA adapters on a CPU: those of all layers of a step, from recorded plans, beside the step's products."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.bench.worker.cpu_layers import layer_shapes
from quire.bench.worker.record import Bench
from quire.bench.worker.timing import elapsed_on_host
from quire.kernels.cpu.linear.linear import PackedLinear
from quire.kernels.cpu.linear.lora import CpuAdapters
from quire.kernels.cpu.linear.weight_memory import allocate
from quire.kernels.cpu.native.library import Native, load_native
from quire.kernels.cpu.native.recorded_plan import RecordedPlan, record
from quire.kernels.lora.lora import AdapterRows, LoraPart, SlotTable
from quire.protocol.model.model_config import ModelConfig

RANK = 16
DTYPE = torch.bfloat16


class LoraLayer:
    """The products of one decoder layer, with adapters of all their projections in each slot."""

    def __init__(self, add: CpuAdapters, model: ModelConfig, num_slots: int, products: Sequence[PackedLinear]) -> None:
        heads, key_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        hidden, width = model.hidden_size, model.intermediate_size
        sites = [(hidden, [heads, key_heads, key_heads]), (heads, [hidden]), (hidden, [width] * 2), (width, [hidden])]
        self._add, self._products = add, products
        self.tables = []
        for inputs, outputs in sites:
            table = SlotTable(num_slots, inputs, sum(outputs), len(outputs), RANK, DTYPE, torch.device("cpu"))
            for slot in range(num_slots):
                firsts = np.cumsum([0, *outputs]).tolist()
                table.set(slot, [_part(inputs, *each) for each in zip(outputs, firsts, strict=False)])
            self.tables.append(table)
        self.num_bytes = RANK * DTYPE.itemsize * sum(inputs * len(parts) + sum(parts) for inputs, parts in sites)

    def add_all(self, inputs: dict[int, torch.Tensor], outputs: dict[int, torch.Tensor], rows: AdapterRows) -> None:
        for table in self.tables:
            self._add.add(inputs[table.inputs], outputs[table.outputs], table, rows)

    def run(self, inputs: dict[int, torch.Tensor], rows: AdapterRows | None) -> None:
        """Compute all products and, with ``rows``, the addends after each."""
        for product, table in zip(self._products, self.tables, strict=True):
            y = product(inputs[table.inputs])
            if rows is not None:
                self._add.add(inputs[table.inputs], y, table, rows)


def _part(inputs: int, outputs: int, first: int) -> LoraPart:
    a, b = (_weight(RANK, width) for width in (inputs, outputs))
    return LoraPart(a, b, first, 0.5)


def _weight(rows: int, columns: int) -> torch.Tensor:
    weight = allocate(rows * columns * DTYPE.itemsize).view(DTYPE).view(rows, columns)
    return weight.copy_(torch.randn(rows, columns).mul_(0.02))


def cpu_lora(bench: Bench) -> None:
    """Measure the addends alone, and the products of all layers without and with them, alternating: the best rounds."""
    native = load_native()
    if native is None:
        bench.note("adapters", "no compiler", None)
        return
    model = bench.models["smollm2-135m"]
    num_layers, num_slots = bench.pick(full=(model.num_layers, 9), quick=(model.num_layers, 9), dry=(1, 2))
    shapes = bench.pick(
        full=((1, 1), (8, 8), (32, 1), (32, 8), (256, 1), (256, 8)), quick=((32, 1), (32, 8)), dry=((2, 2),)
    )
    rounds = bench.pick(full=60, quick=20, dry=1)
    add = CpuAdapters(native)
    layers = [
        LoraLayer(
            add,
            model,
            num_slots,
            [PackedLinear(native, torch.randn(shape).mul_(0.02).to(DTYPE)) for shape in layer_shapes(model)],
        )
        for _ in range(num_layers)
    ]
    for num_rows, num_adapters in shapes:
        bench.require_time()
        rows = AdapterRows(num_rows, num_slots, torch.device("cpu"))
        rows.assign((np.arange(num_rows) * num_adapters // num_rows).astype(np.int32))
        plans = _plans(native, layers, num_rows, rows)
        best = dict.fromkeys(plans, float("inf"))
        for _ in range(rounds):
            for name, plan in plans.items():
                best[name] = min(best[name], elapsed_on_host(plan.run))
        added = best["quire, products and addends"] - best["quire, products"]
        read = num_layers * layers[0].num_bytes * num_adapters
        figures = {
            "gb_per_s": read / best["quire, addends"] / 1e9,
            "added_us": added * 1e6,
            "added": added / best["quire, products"],
        }
        for name, seconds in best.items():
            bench.note(f"{num_rows} rows, {num_adapters} adapters", name, seconds, **figures)
            figures = {}


def _plans(native: Native, layers: Sequence[LoraLayer], num_rows: int, rows: AdapterRows) -> dict[str, RecordedPlan]:
    """Record the addends alone, the products alone, and both."""
    inputs = {table.inputs: torch.randn(num_rows, table.inputs).to(DTYPE) for table in layers[0].tables}
    outputs = {table.outputs: torch.zeros(num_rows, table.outputs, dtype=DTYPE) for table in layers[0].tables}
    bodies: dict[str, Callable[[LoraLayer], None]] = {
        "quire, addends": lambda layer: layer.add_all(inputs, outputs, rows),
        "quire, products": lambda layer: layer.run(inputs, None),
        "quire, products and addends": lambda layer: layer.run(inputs, rows),
    }

    def plan(body: Callable[[LoraLayer], None]) -> RecordedPlan:
        def all_layers() -> None:
            for layer in layers:
                body(layer)

        return record(native, all_layers, keep=(layers, inputs, outputs, rows))[0]

    return {name: plan(body) for name, body in bodies.items()}
