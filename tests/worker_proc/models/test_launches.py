"""Launches of a layer, through Triton with a driver that only records them: kernels are compiled, but nothing runs."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from quire.kernels.common.launches import Launch
from quire.kernels.common.scaled_weight import ScaledWeight
from quire.kernels.common.triton_runtime import drop_unused_launch_hooks
from quire.kernels.dense.packed_linear import packed_linear
from quire.protocol.model.model_config import ModelConfig, MoeConfig
from quire.protocol.model.weight_format import online_format
from quire.worker_proc.attention.backend import StepBatch
from quire.worker_proc.attention.triton_backend import TritonBackend
from quire.worker_proc.models.formats.quantised import QuantisedLinear
from quire.worker_proc.models.model import Inputs
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.models.triton_ops import TritonOps

DEVICE = 99
"""No real device: Triton keeps compiled variants by device."""


class RecordingDriver:
    """A Triton driver whose launcher records its arguments: grid, variant of the kernel, and the kernel's arguments."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        numbers = count(1)
        properties = {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}
        self.utils = SimpleNamespace(
            load_binary=lambda *args: (self, next(numbers), 32, 0, 1024),
            get_device_properties=lambda device: properties,
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(*args: Any) -> None:
            *grid, _, variant = args[:5]
            self.launches.append((*grid, variant, *args[9:]))

        return launch

    def get_current_device(self) -> int:
        return DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture(scope="module")
def recording() -> Iterator[RecordingDriver]:
    """One driver for all tests, because launches keep variants with its launcher."""
    recording = RecordingDriver()
    kernels = (
        *("attention.paged_attention", "cache.fused_cache_write", "dense.rms_norm", "dense.gated_activation"),
        "dense.packed_linear",
        *("moe.moe_routing", "moe.fused_experts"),
    )
    users = ("attention.triton_backend", "models.triton_ops")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", recording)
        for module in (*(f"kernels.{name}" for name in kernels), *(f"worker_proc.{name}" for name in users)):
            patch.setattr(f"quire.{module}.require_launchable", lambda device_type: None)
        yield recording


def mixed_step(recording: RecordingDriver, num_layers: int, experts: str = "") -> list[tuple[Any, ...]]:
    """Return the launches of a step with two decoding rows, one of them long, and a prompt.

    Args:
        experts: none, ``plain``, ``mxfp4`` or ``int4``; with int4, attention's products are launches too.
    """
    moe = MoeConfig(
        num_experts=4,
        num_experts_per_token=2,
        intermediate_size=32,
        layers=list(range(num_layers)),
        mxfp4=experts == "mxfp4",
    )
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        qk_norm="head",
        moe=moe if experts else None,
        weight_format=online_format("int4") if experts == "int4" else None,
    )
    model = build_model(config, torch.float32, "cpu", 1024, ops=TritonOps())
    for layer in model.modules():
        if isinstance(layer, QuantisedLinear):
            # As on a GPU, where layers choose the kernel when they are loaded.
            layer._product = partial(packed_linear, weight=layer.scaled_weight(), bias=None)
    backend = TritonBackend(fresh_from=0)
    lens, seqs = np.array([1, 1, 20], np.int32), np.array([600, 9, 36], np.int32)
    caches = [torch.zeros(backend.kv_cache_shape(64, 16, 2, 16)) for _ in range(num_layers)]
    batch = StepBatch(
        query_start_loc=torch.tensor([0, 1, 2, 22], dtype=torch.int32),
        seq_lens=torch.from_numpy(seqs),
        block_table=torch.zeros(3, 64, dtype=torch.int32),
        slot_mapping=torch.zeros(22, dtype=torch.int64),
        query_lens_cpu=lens,
        seq_lens_cpu=seqs,
        block_size=16,
        layer_shapes=(model.attention_shape(0),),
    )
    recording.launches.clear()
    tokens = torch.zeros(22, dtype=torch.int64)
    model(Inputs(tokens, tokens), caches, [backend.plan(batch)] * num_layers, backend)
    return recording.launches.copy()


def described(launch: tuple[Any, ...]) -> list[Any]:
    """Return the arguments with a tensor's description in its place."""
    return [(a.shape, a.stride(), a.dtype) if isinstance(a, torch.Tensor) else a for a in launch]


@pytest.mark.parametrize(("experts", "launches"), [("", 1), ("plain", 6), ("mxfp4", 6), ("int4", 8)])
def test_kept_variants_get_the_arguments_of_tritons_dispatch(
    experts: str, launches: int, recording: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed_step(recording, 2, experts)
    kept = mixed_step(recording, 3, experts)
    with monkeypatch.context() as patch:
        patch.setattr(Launch, "__call__", Launch.dispatch)
        dispatched = mixed_step(recording, 3, experts)
    assert list(map(described, kept)) == list(map(described, dispatched))
    # Two norms, the cache write, two parts and the merge of attention, the gate or experts; and the last norm.
    assert len(kept) == 3 * (6 + launches) + 1


def test_layers_after_the_first_do_not_pass_through_dispatch(
    recording: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    run = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda self, *a, **k: (calls.append(self.__name__), run(self, *a, **k))[1])
    mixed_step(recording, 1)
    first = len(calls)
    mixed_step(recording, 6)
    assert len(calls) - first <= 4  # the cache write and attention of the new step's plan


def test_an_unaligned_tensor_gets_a_variant_of_its_own(recording: RecordingDriver) -> None:
    recording.launches.clear()
    memory, weight, ops = torch.zeros(65), torch.ones(16), TritonOps()
    for start in (0, 1, 0, 1):
        ops.rms_norm(memory[start : start + 64].view(4, 16), weight, 1e-6)
    aligned, unaligned, *again = [launch[3] for launch in recording.launches]
    assert aligned != unaligned and again == [aligned, unaligned]


def test_products_of_packed_weights_keep_their_variant(
    recording: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero points and the bias may be tensors or None."""
    bare = ScaledWeight("int4", torch.zeros(64, 64, dtype=torch.uint8), torch.ones(64, 4), 32)
    full = replace(bare, zeros=torch.zeros(64, 4, dtype=torch.int8))
    for weight, bias in ((bare, None), (full, torch.zeros(64))):
        recording.launches.clear()
        x = torch.zeros(3, 128)
        packed_linear(x, weight, bias)
        packed_linear(x, weight, bias)
        with monkeypatch.context() as patch:
            patch.setattr(Launch, "__call__", Launch.dispatch)
            packed_linear(x, weight, bias)
        first, kept, dispatched = map(described, recording.launches)
        assert first == kept == dispatched


def test_hooks_that_are_used_stay() -> None:
    runtime = knobs.runtime
    with runtime.scope():
        runtime.launch_enter_hook, runtime.launch_exit_hook = knobs.HookChain(), knobs.HookChain()
        runtime.launch_exit_hook.add(print)
        drop_unused_launch_hooks()
        assert runtime.launch_enter_hook is not None and runtime.launch_exit_hook.calls == [print]
        runtime.launch_exit_hook.remove(print)
        for _ in range(2):
            drop_unused_launch_hooks()
            assert runtime.launch_enter_hook is runtime.launch_exit_hook is None
