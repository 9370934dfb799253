"""Prepare decode without triton: the references on a worked example, and the launchers' argument checks."""

import pytest
import torch

from quire.kernels.cache.pointer_table import TableSet
from quire.kernels.cache.prepare_decode import (
    DecodeInputs,
    advance_decode,
    advance_decode_reference,
    prepare_decode,
    prepare_decode_reference,
)

CPU = torch.device("cpu")


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tables() -> TableSet:
    return TableSet.of(
        [torch.tensor([[7, 3], [4, -1], [9, -1]], dtype=torch.int32), torch.tensor([[5], [6], [2]], dtype=torch.int32)],
        [4, 8],
    )


def test_two_steps_of_three_rows() -> None:
    last_sampled, num_computed = torch.tensor([50, 60, 70]), ints(4, 0, 2)
    inputs = DecodeInputs.empty(4, 2, CPU)
    row_of = ints(2, 0, 1, -1)
    prepare_decode_reference(row_of, last_sampled, num_computed, tables(), inputs)
    assert inputs.input_ids.tolist() == [70, 50, 60, 0]
    assert inputs.positions.tolist() == [2, 4, 0, 0]
    assert inputs.seq_lens.tolist() == [3, 5, 1, 0]
    assert inputs.query_start_loc.tolist() == [0, 1, 2, 3, 3]
    assert inputs.slot_mapping.tolist() == [[9 * 4 + 2, 3 * 4, 4 * 4, -1], [2 * 8 + 2, 5 * 8 + 4, 6 * 8, -1]]
    advance_decode_reference(row_of, torch.tensor([71, 51, 61, 99]), last_sampled, num_computed)
    assert last_sampled.tolist() == [51, 61, 71] and num_computed.tolist() == [5, 1, 3]
    prepare_decode_reference(row_of, last_sampled, num_computed, tables(), inputs)
    assert inputs.slot_mapping[0].tolist() == [9 * 4 + 3, 3 * 4 + 1, 4 * 4 + 1, -1]


def test_rejects_padding_before_a_row() -> None:
    with pytest.raises(ValueError, match="padding at index 0 before a row"):
        prepare_decode_reference(
            ints(-1, 0), torch.zeros(3).long(), ints(0, 0, 0), tables(), DecodeInputs.empty(2, 2, CPU)
        )


def test_rejects_wrong_tensors() -> None:
    row_of, sampled, computed = ints(0, 1), torch.zeros(3, dtype=torch.int64), ints(0, 0, 0)
    inputs = DecodeInputs.empty(2, 2, CPU)
    with pytest.raises(ValueError, match="row_of: dtype"):
        prepare_decode(row_of.long(), sampled, computed, tables(), inputs)
    with pytest.raises(ValueError, match=r"num_computed: dimension 0 \(max_rows\) is 2, expected 3"):
        prepare_decode(row_of, sampled, computed[:2], tables(), inputs)
    with pytest.raises(ValueError, match=r"slot_mapping: dimension 0 \(num_groups\) is 3, expected 2"):
        prepare_decode(row_of, sampled, computed, tables(), DecodeInputs.empty(2, 3, CPU))
    with pytest.raises(ValueError, match=r"sampled: dimension 0 \(num_rows\) is 3, expected 2"):
        advance_decode(row_of, sampled, sampled, computed)
