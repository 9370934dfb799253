"""Worked examples of the gated activations, and errors of the launcher. These tests do not need triton."""

import math

import pytest
import torch

from quire.kernels.dense.gated_activation import gate, gate_reference


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("silu", [2 * sigmoid(2) * 3, -1 * sigmoid(-1) * 9]),
        ("gelu", [2 * 0.5 * (1 + math.erf(2 / 2**0.5)) * 3, -0.5 * (1 + math.erf(-1 / 2**0.5)) * 9]),
        ("gelu_tanh", [1.9545976 * 3, -0.1588080 * 9]),
        # Gate 2 with up -1, and gate 3 with up 9, which is clamped to 7.
        ("swiglu_oai", [0.0, (7 + 1) * 3 * sigmoid(1.702 * 3)]),
    ],
)
def test_worked_example(activation: str, expected: list[float]) -> None:
    result = gate_reference(torch.tensor([[2.0, -1.0, 3.0, 9.0]]), activation)
    torch.testing.assert_close(result, torch.tensor([expected]))


def test_clamps_of_swiglu_oai() -> None:
    result = gate_reference(torch.tensor([[100.0, 0.0, -100.0, 1.0]]), "swiglu_oai")
    torch.testing.assert_close(result, torch.tensor([[7 * sigmoid(1.702 * 7), 0.0]]))


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match="relu"):
        gate(torch.zeros(1, 4), "relu")
    with pytest.raises(ValueError, match="even"):
        gate(torch.zeros(1, 3), "silu")
