"""The penalties kernel against its reference; run by test_triton.py."""

import pytest
import torch
from penalty_case import PenaltyCase

from quire.kernels.sampling.penalties import TILE_TOKENS, apply_penalties_reference, launch_penalties


@pytest.mark.parametrize("vocab", [7, TILE_TOKENS + 9])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_equals_reference(vocab: int, slot_dtype: torch.dtype, device: torch.device) -> None:
    case = PenaltyCase(vocab, device)
    case.slots = case.slots.to(slot_dtype)
    got, want = case.arguments(), case.arguments()
    launch_penalties(*got)
    apply_penalties_reference(*want)
    assert torch.equal(got[0], want[0])
    assert not torch.equal(got[0], case.logits)


def test_slot_out_of_range_is_ignored(device: torch.device) -> None:
    case = PenaltyCase(7, device)
    case.slots[:] = len(case.counts)
    got = case.arguments()
    launch_penalties(*got)
    assert torch.equal(got[0], case.logits)
