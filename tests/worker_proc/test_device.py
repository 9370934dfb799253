"""What a CPU without 16-bit matrix instructions is given instead."""

import pytest
import torch

from quire.worker_proc import device
from quire.worker_proc.device import cpu_compute_dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_widened_only_where_the_cpu_lacks_the_instructions(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_supported", lambda probe: False)
    chosen, reason = cpu_compute_dtype(dtype)
    assert chosen is torch.float32 and "float32 is faster" in reason
    monkeypatch.setattr(device, "_supported", lambda probe: True)
    assert cpu_compute_dtype(dtype) == (dtype, "")


def test_float32_stays() -> None:
    assert cpu_compute_dtype(torch.float32) == (torch.float32, "")


def test_an_operator_that_this_torch_lacks_counts_as_unsupported() -> None:
    assert device._supported("_no_such_operator") is False
