"""Penalties and bitmasks without triton: worked examples, native bitmasks against the reference, and errors."""

import pytest
import torch
from penalty_case import PenaltyCase

from quire.kernels.common.penalty_rows import PenaltyRows
from quire.kernels.cpu.sampling.logit_edits import LogitEdits, native_edits
from quire.kernels.sampling.penalties import PROMPT_BIT, apply_penalties, apply_penalties_reference
from quire.kernels.sampling.token_bitmask import apply_token_bitmask, apply_token_bitmask_reference

CPU = torch.device("cpu")


@pytest.fixture
def native() -> LogitEdits:
    found = native_edits()
    if found is None:
        pytest.skip("no compiler here")
    return found


def test_penalties_of_a_worked_example() -> None:
    logits = torch.tensor([[4.0, -4.0, 4.0, 4.0, 1.0]]).repeat(3, 1)
    counts = torch.tensor([[PROMPT_BIT, PROMPT_BIT | 2, 3, 0, 0]], dtype=torch.int32)
    factors = (torch.full((3,), value) for value in (2.0, 0.5, 0.25))
    slots, offsets, drafts = torch.tensor([0, 0, -1]), torch.tensor([0, 1, 0]), torch.tensor([4, -1, -1])
    apply_penalties(logits, counts, PenaltyRows(slots, *factors, offsets, drafts))
    assert logits[0].tolist() == [2.0, -8.0 - 1.25, 2.0 - 1.75, 4.0, 1.0]
    assert logits[1].tolist() == [*logits[0, :4].tolist(), 0.5 - 0.75]
    assert logits[2].tolist() == [4.0, -4.0, 4.0, 4.0, 1.0]


def test_draft_out_of_range_is_an_error_in_torch() -> None:
    case = PenaltyCase(20, CPU)
    case.drafts[1] = -7
    with pytest.raises(IndexError, match="drafts must not be negative"):
        apply_penalties_reference(*case.arguments())


def test_bitmask_of_a_worked_example() -> None:
    for apply in (apply_token_bitmask, apply_token_bitmask_reference):
        logits = torch.zeros(2, 34)
        apply(logits, torch.tensor([1]), torch.tensor([[0b101, 0b10]], dtype=torch.int32))
        assert torch.isfinite(logits[1]).nonzero()[:, 0].tolist() == [0, 2, 33]
        assert not logits[0].any()


@pytest.mark.parametrize(("vocab", "num_words"), [(5, 1), (64, 2), (70, 2), (40, 3), (70_001, 2188), (33, 0)])
def test_native_bitmasks_equal_the_reference(vocab: int, num_words: int, native: LogitEdits) -> None:
    rng = torch.Generator().manual_seed(vocab)
    logits = torch.randn(4, vocab + 3, generator=rng)[:, :vocab]
    words = torch.randint(-(2**31), 2**31, (3, num_words), generator=rng).int()
    words[1] = -1
    rows = torch.tensor([2, 0, 3])
    want, got = logits.clone(), logits.clone()
    apply_token_bitmask_reference(want, rows, words)
    native.bitmask(got, rows, words)
    assert torch.equal(got, want)
    assert torch.equal(got[1], logits[1])


def test_bitmask_of_a_row_out_of_range_is_ignored_or_an_error(native: LogitEdits) -> None:
    logits, rows, words = torch.zeros(2, 40), torch.tensor([-1, 2]), torch.zeros(2, 2, dtype=torch.int32)
    native.bitmask(logits, rows, words)
    assert not logits.any()
    for wrong in rows.split(1):
        with pytest.raises(IndexError):
            apply_token_bitmask_reference(logits, wrong, words[:1])


def test_invalid_arguments_are_rejected() -> None:
    logits, counts, penalties = PenaltyCase(20, CPU).arguments()
    for given, held, wrong, error in [
        (logits.double(), counts, penalties, "logits: dtype"),
        (logits, counts[:, :9], penalties, "counts: dimension 1"),
        (logits, counts, penalties._replace(slots=penalties.slots[:2]), "slots: dimension 0"),
        (logits, counts, penalties._replace(repetition=penalties.repetition.double()), "repetition: dtype"),
        (logits, counts, penalties._replace(offsets=penalties.offsets.int()), "offsets: dtype"),
    ]:
        with pytest.raises(ValueError, match=error):
            apply_penalties(given, held, wrong)
    rows, words = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int32)
    for arguments, error in [
        ([torch.zeros(2, 9, dtype=torch.half), rows, words], "logits: dtype"),
        ([torch.zeros(2, 9), rows.int(), words], "rows: dtype"),
        ([torch.zeros(2, 9), rows, words.long()], "words: dtype"),
        ([torch.zeros(2, 9), torch.zeros(2, dtype=torch.int64), words], "rows: dimension 0"),
    ]:
        with pytest.raises(ValueError, match=error):
            apply_token_bitmask(*arguments)
