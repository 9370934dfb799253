"""Linear layers: equal products by all libraries, and in deterministic mode row bits that ignore the batch."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from quire.worker_proc.models.linear import Linear, in_tiles
from quire.worker_proc.models.weight_slot import Cut

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["native", "torch"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with the native library (if there is a compiler) and without."""
    monkeypatch.setenv("QUIRE_CPU_NATIVE", "1" if request.param == "native" else "0")
    return str(request.param)


@pytest.fixture
def thread_count_restored() -> Iterator[None]:
    """Restore torch's thread count."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _linear(outputs: int, inputs: int, dtype: torch.dtype, bias: bool = True, **settings: bool) -> Linear:
    weight = torch.nn.Parameter(_random(outputs, inputs, seed=1).to(dtype), requires_grad=False)
    own = torch.nn.Parameter(_random(outputs, seed=2).to(dtype), requires_grad=False)
    return Linear(weight, own if bias else None, **settings)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_prepacking_changes_only_the_layout(library: str, dtype: torch.dtype, deterministic: bool, bias: bool) -> None:
    linear = _linear(40, 72, dtype, bias)
    weight, own = linear.weight.data, linear.bias
    changed = linear.prepack(deterministic=deterministic)
    assert linear.weight.numel() == (0 if changed else weight.numel())
    for rows in (1, 5, 40):
        x = _random(rows, 72).to(dtype)
        expected = F.linear(x.float(), weight.float(), None if own is None else own.float())
        torch.testing.assert_close(
            linear(x), expected.to(dtype), rtol=2e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-3
        )


def test_narrow_weight_times_wide_activations_is_exact() -> None:
    """A bfloat16 weight with float32 activations gives the same result as the widened weight."""
    x = _random(5, 72)
    for prepack in (False, True):
        linear = _linear(40, 72, torch.bfloat16)
        expected = F.linear(x, linear.weight.float(), linear.bias.float() if linear.bias is not None else None)
        if prepack:
            linear.prepack(deterministic=True)
        assert linear(x).dtype is torch.float32
        torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=1e-4)


def _check_float32_output(linear: Linear, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """The result equals the float32 product of the widened operands, and 16 bits would not hold it."""
    out = linear(x)
    assert out.dtype is torch.float32
    expected = F.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    if weight.dtype is not torch.float32:
        assert float((out.to(weight.dtype) == out).float().mean()) < 0.1


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("deterministic", [None, False, True])
def test_float32_output_is_not_rounded(library: str, dtype: torch.dtype, deterministic: bool | None) -> None:
    """With the plain weight (None) and with a prepacked one."""
    linear = _linear(700, 577, dtype, float32_output=True)
    assert linear.bias is not None
    weight, bias = linear.weight.data, linear.bias
    if deterministic is not None:
        linear.prepack(deterministic=deterministic)
    for rows in (1, 5, 20):
        _check_float32_output(linear, _random(rows, 577).to(dtype), weight, bias)
    assert linear(torch.empty(0, 577, dtype=dtype)).shape == (0, 700)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_float32_output_is_not_rounded_on_a_gpu(dtype: torch.dtype) -> None:
    linear = _linear(701, 577, dtype, float32_output=True).to("cuda")
    assert linear.bias is not None
    for rows in (1, 20):
        x = _random(rows, 577).to("cuda", dtype)
        eager = linear(x)
        _check_float32_output(linear, x, linear.weight.data, linear.bias)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = linear(x)
        graph.replay()
        assert torch.equal(captured, eager)


@pytest.mark.parametrize("bias", [False, True])
def test_weights_packed_as_they_are_read_are_those_packed_afterwards(library: str, bias: bool) -> None:
    """Also if they are stored in another dtype, and in a part of a wider matrix."""
    stored = _random(40, 80, seed=1)
    after, meanwhile = (_linear(40, 72, torch.float32, bias) for _ in range(2))
    meanwhile.pack_as_read()
    for linear in (after, meanwhile):
        for held in (slice(0, 3), slice(3, 40)):
            slot = linear.projection_slots(Cut("", held, 40, slice(4, 76), 80), held)["weight"]
            assert slot.fill(stored.double()[held, 4:76]) is None
        linear.prepack()
        linear.prepack()
    x = _random(5, 72)
    assert torch.equal(after(x), meanwhile(x))


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 64), (100, 1100)])
def test_row_bits_do_not_depend_on_the_batch(
    library: str, dtype: torch.dtype, outputs: int, inputs: int, thread_count_restored: None
) -> None:
    torch.set_num_threads(2)
    linear = _linear(outputs, inputs, dtype)
    linear.prepack(deterministic=True)
    x = _random(300, inputs).to(dtype)
    torch.set_num_threads(1)
    alone = torch.cat([linear(row) for row in x[:60].split(1)])
    # Threads wait for each other at every barrier if they share cores, so most cases use one thread.
    for threads, batches in ((1, (2, 7, 33, 300)), (2, (33, 300))):
        torch.set_num_threads(threads)
        for rows in batches:
            assert torch.equal(torch.cat([linear(part) for part in x.split(rows)])[:60], alone)
            assert torch.equal(linear(x[:rows].flip(0)).flip(0)[:60], alone[:rows])


def test_tiles_whose_rows_differ_are_computed_row_by_row() -> None:
    weight = _random(8, 16)
    shapes: list[int] = []

    def product(x: torch.Tensor) -> torch.Tensor:
        shapes.append(len(x))
        return F.linear(x, weight) + torch.arange(len(x)).unsqueeze(1)

    tiled = in_tiles(product, weight)
    shapes.clear()
    x = _random(5, 16)
    assert torch.equal(tiled(x), torch.cat([F.linear(row, weight) for row in x.split(1)]))
    assert shapes == [1] * 5


def test_products_that_threads_change_take_one(thread_count_restored: None) -> None:
    weight = _random(8, 16)
    torch.set_num_threads(2)
    tiled = in_tiles(lambda x: F.linear(x, weight) + torch.get_num_threads(), weight)
    assert torch.equal(tiled(x := _random(20, 16))[:1], F.linear(x[:16], weight)[:1] + 1)
    assert torch.get_num_threads() == 2


def test_other_devices_keep_the_plain_weight() -> None:
    linear = Linear(torch.nn.Parameter(torch.empty(4, 4, device="meta")))
    assert not linear.prepack()
    assert linear.weight.shape == (4, 4)
