"""The native norms and gates: equal to torch, with a token's bits independent of other tokens."""

from collections.abc import Callable

import pytest
import torch
from tiers import thinned

from quire.kernels.cpu.linear.ops import CpuKernels
from quire.kernels.cpu.native.library import load_native
from quire.kernels.dense import gated_activation, rms_norm
from quire.worker_proc.models.cpu_ops import CpuOps
from quire.worker_proc.models.ops import ACTIVATIONS, TorchOps

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 7, 8, 33, 64, 576]
ROWS = [0, 1, 3, 200]


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    native = load_native()
    if native is None:
        pytest.skip("no compiler here")
    return CpuOps(native)


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", thinned(WIDTHS, keep=2))
def test_norms_equal_the_reference(ops: CpuOps, dtype: torch.dtype, width: int) -> None:
    rtol, atol = rms_norm.TOLERANCES[dtype]
    for rows in ROWS:
        x, residual = _random(rows, width, dtype=dtype), _random(rows, width, dtype=dtype, seed=1)
        other = (
            dtype if dtype is torch.float16 else torch.float32
        )  # torch computes float16, and warns about mixed dtypes
        for weight in (None, _random(width, dtype=dtype, seed=2), _random(width, dtype=other, seed=3)):
            expected = rms_norm.rms_norm_reference(x, weight, 1e-5)
            torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), expected, rtol=rtol, atol=atol)
        weight = _random(width, dtype=dtype, seed=2)
        actual_sum, expected_sum = residual.clone(), residual.clone()
        out = ops.add_rms_norm(x, actual_sum, weight, 1e-5)
        expected = rms_norm.add_rms_norm_reference(x, expected_sum, weight, 1e-5)
        torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)
        assert torch.equal(actual_sum, expected_sum)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_strided_heads(ops: CpuOps, dtype: torch.dtype) -> None:
    """Queries and keys are a slice of rows that also have values."""
    heads = _random(5, 6, 64, dtype=dtype)[:, :4]
    out = ops.rms_norm(heads, None, 1e-6)
    rtol, atol = rms_norm.TOLERANCES[dtype]
    torch.testing.assert_close(out, rms_norm.rms_norm_reference(heads, None, 1e-6), rtol=rtol, atol=atol)
    assert out.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", thinned(WIDTHS, keep=2))
def test_gates_equal_the_reference(ops: CpuOps, dtype: torch.dtype, activation: str, width: int) -> None:
    rtol, atol = gated_activation.TOLERANCES[dtype]
    for rows in ROWS:
        gate_up = _random(rows, 2 * width, dtype=dtype)
        expected = gated_activation.gate_reference(gate_up, activation)
        torch.testing.assert_close(ops.gate(gate_up, activation), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_are_accurate_over_their_whole_range(ops: CpuOps, activation: str) -> None:
    """The result is within a few roundings of torch, and NaN for NaN."""
    gate = torch.linspace(-120, 120, 48_001)
    gate_up = torch.stack([gate, torch.ones_like(gate)], 1)
    expected = gated_activation.gate_reference(gate_up, activation)
    assert ((ops.gate(gate_up, activation) - expected).abs() <= 1e-6 * gate.abs().clamp(min=1)[:, None]).all()
    ends = torch.tensor([[float("inf"), 1.0], [float("-inf"), 1.0], [float("nan"), 1.0], [1.0, float("nan")]])
    out, torchs = ops.gate(ends, activation), TorchOps().gate(ends.clone(), activation)
    assert torch.equal(out.isnan()[[0, 2, 3]], torchs.isnan()[[0, 2, 3]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_joined_columns_equal_concatenation(ops: CpuOps, dtype: torch.dtype) -> None:
    for rows in ROWS:
        wide = _random(rows, 40, dtype=dtype)
        parts = [wide[:, 3:20], _random(rows, 7, dtype=dtype, seed=1), wide[:, :1]]
        assert torch.equal(ops.join_columns(parts), torch.cat(parts, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "step",
    [
        lambda ops, x: ops.rms_norm(x, None, 1e-5),
        lambda ops, x: ops.add_rms_norm(x, x.clone(), x[0].clone().fill_(2), 1e-5),
        lambda ops, x: ops.gate(x, "silu"),
        lambda ops, x: ops.gate(x, "gelu"),
        lambda ops, x: ops.gate(x, "gelu_tanh"),
    ],
    ids=["rms_norm", "add_rms_norm", "silu", "gelu", "gelu_tanh"],
)
def test_row_bits_do_not_depend_on_the_batch(
    ops: CpuOps, dtype: torch.dtype, step: Callable[[CpuOps, torch.Tensor], torch.Tensor]
) -> None:
    before = torch.get_num_threads()
    x = _random(300, 614, dtype=dtype)
    alone = torch.cat([step(ops, row) for row in x.split(1)])
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in (2, 7, 33, 300):
                assert torch.equal(torch.cat([step(ops, part) for part in x.split(rows)]), alone)
    finally:
        torch.set_num_threads(before)


def test_unsupported_tensors_are_rejected_or_computed_by_torch(ops: CpuOps) -> None:
    native = load_native()
    assert native is not None
    kernels = CpuKernels(native)
    for bad in (_random(4, 8).T, _random(4), _random(4, 8).double()):
        with pytest.raises(ValueError, match=r"^x: "):
            kernels.rms_norm(bad, None, 1e-5)
    with pytest.raises(ValueError, match=r"^weight: "):
        kernels.rms_norm(_random(4, 8), _random(7), 1e-5)
    with pytest.raises(ValueError, match=r"^residual: "):
        kernels.add_rms_norm(_random(4, 8), _random(4, 9), _random(8), 1e-5)
    with pytest.raises(ValueError, match=r"^gate_up: "):
        kernels.gate(_random(4, 7), "silu")
    with pytest.raises(ValueError, match=r"^parts\[1\]: "):
        kernels.join_columns([_random(4, 7), _random(5, 7)])
    strided = _random(8, 6).T
    torch.testing.assert_close(ops.rms_norm(strided, None, 1e-5), ops.rms_norm(strided.contiguous(), None, 1e-5))
    torch.testing.assert_close(ops.gate(strided, "silu"), ops.gate(strided.contiguous(), "silu"))
    residual = _random(8, 6, seed=1).T
    expected = residual + strided
    torch.testing.assert_close(
        ops.add_rms_norm(strided, residual, _random(8), 1e-5), rms_norm.rms_norm_reference(expected, _random(8), 1e-5)
    )
