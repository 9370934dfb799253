"""Which layers of a class Quire computes, and that the results stay those of the class. Needs no transformers."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quire.protocol.model.model_config import ModelConfig
from quire.worker_proc.models.ops import TorchOps
from quire.worker_proc.models.transformers.gates import use_gates
from quire.worker_proc.models.transformers.linears import JoinedProduct, Products
from quire.worker_proc.models.transformers.norms import use_norms
from quire.worker_proc.models.transformers.watch import Functions, replaceable, watch
from quire.worker_proc.models.weights import Build
from quire.worker_proc.parallel.group import SingleRank

WIDTH, HALF, TOKENS = 16, 24, 31


class Norm(nn.Module):
    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.randn(WIDTH)), 1e-5, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight + self.offset, self.eps)


class PlainRMSNorm(Norm):
    pass


class OffsetRMSNorm(Norm):
    def __init__(self) -> None:
        super().__init__(offset=1.0)


class OtherRMSNorm(Norm):
    """Has the name, and computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class GatedMLP(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HALF), nn.Linear(WIDTH, HALF)
        self.down, self.kind = nn.Linear(HALF, WIDTH, bias=False), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "up first":
            return self.down(self.up(x) * F.silu(self.gate(x)))
        if self.kind == "scaled":
            return self.down(F.silu(self.gate(x)) * self.up(x) * 2)
        act = {"silu": F.silu, "tanh": lambda y: F.gelu(y, approximate="tanh")}[self.kind]
        return self.down(act(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Queries and keys have the same input, values another one; other code reads the weight of ``mixed``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.mixed, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.written_a, self.written_b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = {"silu": PlainRMSNorm, "tanh": OffsetRMSNorm}.get(kind, OtherRMSNorm)()
        self.mlp = GatedMLP(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        z = self.q(y) + torch.cat([self.k(y), self.v(y + 1)], -1) + F.linear(y, self.mixed.weight)
        z = z + self.written_a(y)
        y.mul_(2)
        return x + self.mlp(z + self.written_b(y))


class Tiny(nn.Module):
    _keep_in_fp32_modules_strict: frozenset[str] = frozenset()
    _keep_in_fp32_modules: frozenset[str] = frozenset()

    def __init__(self, kind: str = "silu", tied: bool = True) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(2))
        self.last = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        if tied:
            self.head.weight = self.table.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last[0](x) + self.last[1](x))


def watched(model: nn.Module) -> list[list[str]]:
    model = deepcopy(model)
    watch(model)
    with torch.no_grad():
        model(torch.arange(5)[None])
    return replaceable(model)


def build() -> Build:
    config = ModelConfig(
        architecture="Tiny",
        vocab_size=TOKENS,
        hidden_size=WIDTH,
        intermediate_size=HALF,
        num_layers=2,
        num_heads=1,
        num_kv_heads=1,
        head_dim=WIDTH,
    )
    return Build(config, torch.float32, torch.float32, "cpu", TorchOps(), SingleRank())


def replace_layers(model: Any) -> Any:
    """Return a copy whose layers Quire computes, with the same weights."""
    stored, model = model.state_dict(), deepcopy(model).requires_grad_(False)
    products = Products(model, watched(model), build())
    use_gates(model, products.joined, TorchOps())
    products.install()
    use_norms(model, TorchOps(), torch.float32)
    for name, slot in products.weight_slots().items():
        assert slot.fill(stored[name]) is None and slot.shape == stored[name].shape
    for projection in products.projections:
        for linear in projection.modules():
            if hasattr(linear, "prepack"):
                linear.prepack()
    products.prepack()
    return model


def test_layers_whose_weights_are_read_are_not_replaced() -> None:
    found = watched(Tiny())
    assert ["layers.*.q", "layers.*.k", "layers.*.written_a"] in found and ["layers.*.v"] in found
    assert ["layers.*.mlp.gate", "layers.*.mlp.up"] in found and ["layers.*.mlp.down"] in found
    assert ["layers.*.written_b"] in found, "its input has changed in place since q read it"
    assert found.count(["last.*"]) == 1 and ["table"] in found and ["head"] in found
    assert not {"layers.*.mixed", "layers.*.unused"} & {name for group in found for name in group}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind, gates", [("silu", 2), ("tanh", 2), ("up first", 2), ("scaled", 0)])
def test_results_are_those_of_the_class(kind: str, gates: int, tied: bool) -> None:
    torch.manual_seed(0)
    model = Tiny(kind, tied).requires_grad_(False)
    fast = replace_layers(model)
    for tokens in (torch.arange(7)[None], torch.tensor([[3]])):
        torch.testing.assert_close(fast(tokens), model(tokens), rtol=1e-4, atol=1e-5)
    replaced = {name for name, module in fast.named_modules() if "forward" in vars(module)}
    assert len([name for name in replaced if name.endswith("mlp")]) == gates
    norms = [name for name in replaced if name.endswith("norm")]
    assert len(norms) == (2 if kind in ("silu", "tanh") else 0), "OtherRMSNorm is no RMS norm"
    assert {"head", "layers.1.q", "last.0", "last.1"} <= replaced
    assert ("table" in replaced) == tied
    left = {name for name, _ in fast.named_parameters() if ".mixed." in name or ".unused." in name}
    assert len(left) == 8 and not any("weight" in layer._parameters for layer in [fast.head, fast.layers[0].q])


class Table(nn.Module):
    def __init__(self, rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.rows, self.table = rows, torch.randn(100, WIDTH)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return self.rows(self.table, positions)


@pytest.mark.parametrize(
    "rows, counts",
    [
        (lambda table, positions: table[positions], False),
        (lambda table, positions: table[:1].expand(len(positions), -1), False),
        (lambda table, positions: table[: len(positions)], True),
        (lambda table, positions: F.embedding(torch.arange(len(positions)), table), True),
        (lambda table, positions: torch.ones(len(positions)).cumsum(0), True),
    ],
)
def test_a_module_that_counts_tokens_is_found(rows: Any, counts: bool) -> None:
    model, positions = nn.Sequential(Table(rows)), torch.arange(23)
    with Functions(23) as functions:
        model(positions)
    assert functions.counting == ({model[0]} if counts else set())


def test_products_with_weights_of_one_zero_are_not_computed() -> None:
    layer = nn.Linear(WIDTH, 8)
    layer.weight = nn.Parameter(torch.zeros(1).expand(2**18, 2**18), requires_grad=False)  # 256 GiB
    layer.bias = None  # type: ignore[assignment]
    with Functions(23):
        assert layer(torch.ones(1, 2, 2**18)).shape == (1, 2, 2**18)


def test_a_layer_called_with_another_tensor_has_its_own_result() -> None:
    layers = [nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 5)]
    calls: list[int] = []

    def projection(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return torch.cat([layer(x) for layer in layers], -1)

    joined, x, other = JoinedProduct(projection, layers), torch.randn(1, 4, WIDTH), torch.randn(1, 2, WIDTH)  # type: ignore[arg-type]
    for part, given in [(0, x), (1, x), (1, other), (0, x), (0, x), (1, other), (0, other)]:
        torch.testing.assert_close(joined.columns(part, given), layers[part](given))
    assert calls == [4, 2, 4, 4, 2], "one product for both, where both have its input"
    joined.columns(0, x)
    joined.forget()
    assert joined._input is None and not joined._left, "a step leaves nothing to the next one"


def test_weights_in_float32_and_shared_weights_stay() -> None:
    """A class keeps some weights in float32; and a weight of two layers has no place in one product."""
    model = Tiny()
    model._keep_in_fp32_modules_strict = frozenset({"layers.*.v"})
    model.layers[1].q = model.layers[0].q
    model.layers[0].mlp.down.weight = model.layers[1].mlp.down.weight
    given = build()
    narrow = Build(given.config, torch.bfloat16, torch.float32, "cpu", given.ops, given.parallel)
    names = Products(model, watched(model), narrow).weight_slots()
    assert "layers.0.k.weight" in names
    assert not {"layers.0.v.weight", "layers.0.q.weight", "layers.1.mlp.down.weight"} & names.keys()
