"""The rotary reference against the engine's own rotation, and what the launcher refuses. None of this needs triton."""

import pytest
import torch

from quire.kernels.dense.rotary import rotary, rotary_reference
from quire.protocol.model.model_config import RopeConfig
from quire.worker_proc.attention.rope import rope_table, rotate


def test_reference_is_the_engines() -> None:
    table = rope_table(RopeConfig(theta=1e4), 32, 50, "cpu")
    x = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 49, 7])
    cos, sin = table[:, positions, None]
    torch.testing.assert_close(rotary_reference(x, positions, table), rotate(x, cos, sin))


def test_partial_rotation_of_a_worked_example() -> None:
    table = torch.tensor([[[0.0, 0.0]], [[-1.0, 1.0]]])  # a quarter turn
    x = torch.tensor([[[3.0, 4.0, 5.0]]])
    assert rotary_reference(x, torch.tensor([0]), table).tolist() == [[[-4, 3, 5]]]


@pytest.mark.parametrize("position", [-1, 1])
def test_reference_raises_outside_the_table(position: int) -> None:
    with pytest.raises(IndexError):
        rotary_reference(torch.zeros(1, 1, 2), torch.tensor([position]), torch.zeros(2, 1, 2))


def test_refusals() -> None:
    x, positions, table = torch.zeros(2, 1, 8), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4, 8)
    with pytest.raises(ValueError, match="rotary_dim"):
        rotary(x, positions, torch.zeros(2, 4, 10))
    with pytest.raises(ValueError, match="rotary_dim"):
        rotary(x, positions, torch.zeros(2, 4, 5))
    with pytest.raises(ValueError, match="positions: dtype"):
        rotary(x, positions.int(), table)
    with pytest.raises(ValueError, match="out: dimension 1"):
        rotary(x, positions, table, torch.zeros(2, 2, 8))
