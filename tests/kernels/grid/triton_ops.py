"""``TritonOps`` against ``TorchOps``; run by test_triton.py."""

import pytest
import torch

from quire.kernels.dense import gated_activation, rms_norm
from quire.kernels.moe import fused_experts
from quire.protocol.model.model_config import ModelConfig, MoeConfig
from quire.protocol.model.weight_format import online_format
from quire.worker_proc.models.mlp import SparseMlp
from quire.worker_proc.models.ops import ACTIVATIONS, Experts, Ops, TorchOps
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.models.triton_ops import TritonOps
from quire.worker_proc.startup.loader import init_dummy_weights


def test_norms(dtype: torch.dtype, device: torch.device) -> None:
    triton_ops: Ops = TritonOps()
    torch_ops: Ops = TorchOps()
    rng = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 5, 96, generator=rng).to(dtype).to(device)
    weight = torch.randn(96, generator=rng).to(dtype).to(device)
    rtol, atol = rms_norm.TOLERANCES[dtype]
    sums = residual.clone(), residual.clone()
    result = triton_ops.add_rms_norm(x, sums[0], weight, 1e-6)
    torch.testing.assert_close(result, torch_ops.add_rms_norm(x, sums[1], weight, 1e-6), rtol=rtol, atol=atol)
    assert torch.equal(*sums)
    heads = x.view(5, 3, 32)[:, 1:]
    for head_weight in (weight[:32], None):
        result, expected = (ops.rms_norm(heads, head_weight, 1e-6) for ops in (triton_ops, torch_ops))
        torch.testing.assert_close(result, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates(activation: str, dtype: torch.dtype, device: torch.device) -> None:
    rng = torch.Generator().manual_seed(0)
    gate_up = (torch.randn(4, 2 * 72, generator=rng) * 2).to(dtype).to(device)
    rtol, atol = gated_activation.TOLERANCES[dtype]
    expected = TorchOps().gate(gate_up.clone(), activation)
    torch.testing.assert_close(TritonOps().gate(gate_up, activation), expected, rtol=rtol, atol=2 * atol)


@pytest.mark.parametrize(("activation", "renormalise"), [("silu", False), ("swiglu_oai", True)])
def test_experts(activation: str, renormalise: bool, dtype: torch.dtype, device: torch.device) -> None:
    rng = torch.Generator().manual_seed(0)
    x, scores = torch.randn(6, 40, generator=rng).to(dtype), torch.randn(6, 4, generator=rng).to(dtype)
    # Weights may have a narrower dtype than the activations.
    narrow = torch.float16 if dtype == torch.float32 else dtype
    gate_up, gate_up_bias = torch.randn(4, 48, 40, generator=rng) / 6, torch.randn(4, 48, generator=rng)
    down, down_bias = torch.randn(4, 40, 24, generator=rng) / 5, torch.randn(4, 40, generator=rng)
    tensors = (t.to(narrow).to(device) for t in (gate_up, down, gate_up_bias, down_bias))
    experts = Experts(*tensors, activation=activation)
    x, scores = x.to(device), scores.to(device)
    ids, weights = TritonOps().route(scores, 2, renormalise=renormalise)
    expected_ids, expected = TorchOps().route(scores, 2, renormalise=renormalise)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected)
    rtol, atol = fused_experts.TOLERANCES[dtype]
    result = TritonOps().experts(x, experts, ids, weights)
    torch.testing.assert_close(result, TorchOps().experts(x, experts, ids, weights), rtol=rtol, atol=2 * atol)


def test_packed_experts(dtype: torch.dtype, device: torch.device) -> None:
    """MXFP4 in the layout of gpt-oss's checkpoints."""
    rng = torch.Generator().manual_seed(0)
    x, scores = torch.randn(6, 64, generator=rng).to(dtype), torch.randn(6, 4, generator=rng).to(dtype)
    shapes = ((4, 192, 2, 16), (4, 64, 3, 16))
    blocks = [torch.randint(0, 256, shape, dtype=torch.uint8, generator=rng).to(device) for shape in shapes]
    scales = [torch.full(shape[:-1], 123, dtype=torch.uint8, device=device) for shape in shapes]
    biases = [torch.randn(shape[:2], generator=rng).to(dtype).to(device) for shape in shapes]
    experts = Experts(*blocks, *biases, "swiglu_oai", gate_up_scales=scales[0], down_scales=scales[1])
    x, scores = x.to(device), scores.to(device)
    ids, weights = TritonOps().route(scores, 2, renormalise=True)
    rtol, atol = fused_experts.TOLERANCES[dtype]
    result, expected = (ops.experts(x, experts, ids, weights) for ops in (TritonOps(), TorchOps()))
    torch.testing.assert_close(result, expected, rtol=rtol, atol=2 * atol * float(expected.abs().max().clamp(min=1)))


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_quantised_experts(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    moe = MoeConfig(num_experts=4, num_experts_per_token=2, intermediate_size=96, layers=[0], renormalise=True)
    config = ModelConfig(
        architecture="MixtralForCausalLM",
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        moe=moe,
        weight_format=online_format(kind),
    )
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    results = []
    ops: Ops
    for ops in (TritonOps(), TorchOps()):
        model = build_model(config, dtype, device, 64, ops=ops)
        init_dummy_weights(model, 0)
        results.append(next(part for part in model.modules() if isinstance(part, SparseMlp))(x))
    rtol, atol = fused_experts.TOLERANCES[dtype]
    torch.testing.assert_close(*results, rtol=rtol, atol=atol * float(results[1].abs().max()))
