"""Recorded plans: native calls that run again on the same memory, with late threads too."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from quire.kernels.cpu.linear.linear import PackedLinear
from quire.kernels.cpu.linear.ops import CpuKernels
from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.native.recorded_plan import NotRecordable, record

ROWS, WIDTH, LAYERS = 3, 256, 12


class Chain:
    """Products, norms and gates that follow each other, as in a model's layers."""

    def __init__(self, native: Native) -> None:
        generator = torch.Generator().manual_seed(1)
        self.kernels = CpuKernels(native)
        self.norm = torch.ones(WIDTH)
        self.layers = [PackedLinear(native, torch.randn(2 * WIDTH, WIDTH, generator=generator)) for _ in range(LAYERS)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.kernels.gate(layer(self.kernels.rms_norm(x, self.norm, 1e-6)), "silu")
        return x


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_computes_new_content(native: Native) -> None:
    chain, x = Chain(native), inputs(0)
    plan, out = record(native, lambda: chain(x))
    assert torch.equal(out, chain(inputs(0))), "recording also computes"
    for seed in range(1, 5):
        x.copy_(inputs(seed))
        assert plan.run() == 0
        assert torch.equal(out, chain(inputs(seed)))


def test_refuses_operators_that_it_would_not_run(native: Native) -> None:
    chain, x = Chain(native), inputs(0)
    with pytest.raises(NotRecordable, match=r"aten\.mul"):
        record(native, lambda: chain(x) * 2)
    plan, out = record(native, lambda: chain(x).view(-1)[2:])
    x.copy_(inputs(1))
    plan.run()
    assert torch.equal(out, chain(inputs(1)).view(-1)[2:])


@pytest.fixture
def busy_cores() -> Iterator[None]:
    """Other processes that take the cores from the library's threads."""
    spinning = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(4)]
    yield
    for process in spinning:
        process.kill()
        process.wait()


def test_late_threads_change_no_bit(native: Native, busy_cores: None) -> None:
    """A thread without a core holds its piece for milliseconds; another one computes it meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        chain, x = Chain(native), inputs(0)
        want = [chain(inputs(seed)) for seed in range(4)]
        for _ in range(5):
            plan, out = record(native, lambda: chain(x))
            for run in range(20):
                x.copy_(inputs(run % 4))
                plan.run()
                assert torch.equal(out, want[run % 4])
            del plan, out  # waits for threads that are still in it
    finally:
        torch.set_num_threads(threads)


@pytest.mark.full
def test_recording_does_not_import_torchs_compiler() -> None:
    """It would take seconds and tens of megabytes in each worker."""
    program = (
        "import sys, torch\n"
        "from quire.kernels.cpu.linear.linear import PackedLinear\n"
        "from quire.kernels.cpu.native.library import load_native\n"
        "from quire.kernels.cpu.native.recorded_plan import record\n"
        "native, x = load_native(), torch.randn(1, 64)\n"
        "if native is not None:\n"
        "    layer = PackedLinear(native, torch.randn(64, 64))\n"
        "    record(native, lambda: layer(x).view(-1)[1:])\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True)
