"""Penalties from lists of counts give the same bits as from counts of the whole vocabulary, after any operations."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penalty_case import PenaltyCase

from quire.kernels.common.penalty_rows import PenaltyRows
from quire.kernels.cpu.native.library import load_native
from quire.kernels.cpu.sampling.penalties import ListedCounts
from quire.kernels.sampling.penalties import COUNT_MASK, PROMPT_BIT, apply_penalties_reference

CPU = torch.device("cpu")
SEEDS = st.integers(0, 2**32)

if load_native() is None:
    pytest.skip("no compiler here", allow_module_level=True)


def listed(vocab: int) -> ListedCounts:
    native = load_native()
    assert native is not None
    return ListedCounts(native, vocab)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def of_dense(dense: torch.Tensor) -> ListedCounts:
    """Return listed counts equal to ``dense``, int32 ``[num_slots, vocab]``."""
    counts = listed(dense.shape[1])
    counts.grow(len(dense))
    for slot, held in enumerate(dense.numpy()):
        answer = np.repeat(np.arange(len(held)), held & COUNT_MASK)
        counts.set_text(slot, np.flatnonzero(held & PROMPT_BIT), np.random.default_rng(slot).permutation(answer))
    return counts


class Slots:
    """Listed counts beside dense ones; random operations start texts, append tokens and add slots to both."""

    def __init__(self, rng: random.Random, vocab: int) -> None:
        self._rng, self._vocab = rng, vocab
        self.counts = listed(vocab)
        self.dense = torch.zeros(0, vocab, dtype=torch.int32)
        self.grow()

    def grow(self) -> None:
        self.counts.grow(len(self.counts) + self._rng.randint(0, 2) + (not len(self.counts)))
        new = self.dense.new_zeros(len(self.counts) - len(self.dense), self._vocab)
        self.dense = torch.cat([self.dense, new])

    def begin(self) -> None:
        slot = self._rng.randrange(len(self.counts))
        prompt, answer = self._tokens(), self._tokens()
        self.counts.set_text(slot, np.array(prompt, np.int32), np.array(answer, np.int64))
        self.dense[slot] = 0
        self.dense[slot, prompt] = PROMPT_BIT
        for token in answer:
            self.dense[slot, token] += 1

    def add(self) -> None:
        tokens = self._tokens()
        slots = [self._rng.randrange(len(self.counts)) for _ in tokens]
        self.counts.add(ints(*slots), ints(*tokens))
        for slot, token in zip(slots, tokens, strict=True):
            self.dense[slot, token] += 1

    def arguments(self, drafts: list[list[int]]) -> tuple[torch.Tensor, PenaltyRows]:
        """Return random arguments of a call without the counts: rows with their drafts."""
        rng = self._rng
        offsets = [offset for own in drafts for offset in range(len(own) + 1)]
        slots = [slot for own in drafts for slot in [rng.randrange(-1, len(self.counts))] * (len(own) + 1)]
        given = [draft for own in drafts for draft in [*own, -1]]
        factors = [torch.tensor([rng.uniform(low, high) for _ in slots]) for low, high in ((0.1, 3), (-2, 2), (-2, 2))]
        logits = torch.randn(len(slots), self._vocab, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
        return logits, PenaltyRows(ints(*slots), *factors, ints(*offsets), ints(*given))

    def _tokens(self) -> list[int]:
        """Return random tokens, sometimes from few distinct ones, so that many repeat."""
        most = self._rng.choice([3, self._vocab])
        return [self._rng.randrange(most) for _ in range(self._rng.randint(0, 2 * self._vocab))]

    def drafts(self) -> list[list[int]]:
        return [[self._rng.randrange(self._vocab) for _ in range(self._rng.randint(0, 3))] for _ in range(5)]


@pytest.mark.full
@given(SEEDS, st.sampled_from([3, 20, 700]))
@settings(max_examples=60, deadline=None)
def test_random_operations_equal_the_reference(seed: int, vocab: int) -> None:
    rng = random.Random(seed)
    slots = Slots(rng, vocab)
    for _ in range(10):
        rng.choice([slots.grow, slots.begin, slots.add, slots.add])()
        slots.counts.check()
        assert torch.equal(slots.counts.dense(), slots.dense)
        logits, rows = slots.arguments(slots.drafts())
        want = logits.clone()
        apply_penalties_reference(want, slots.dense, rows)
        slots.counts.penalise(logits, rows)
        assert torch.equal(logits, want)


@pytest.mark.parametrize("vocab", [5, 77, 40_003])
def test_case_with_every_penalty(vocab: int) -> None:
    case = PenaltyCase(vocab, CPU)
    (got, counts, rows), want = case.arguments(), case.arguments()
    of_dense(counts).penalise(got, rows)
    apply_penalties_reference(*want)
    assert torch.equal(got, want[0])
    assert not torch.equal(got, case.logits)


def test_result_does_not_depend_on_the_number_of_threads() -> None:
    """A batch that is divided among threads equals its rows alone."""
    rng = np.random.default_rng(0)
    counts = listed(4_000)
    counts.grow(16)
    for slot in range(16):
        counts.set_text(slot, rng.integers(0, 4_000, 900), rng.integers(0, 4_000, 900))
    logits = torch.randn(16, 4_000, generator=torch.Generator().manual_seed(0))
    factors = [torch.full((16,), factor) for factor in (1.2, 0.3, 0.1)]
    rows = PenaltyRows(torch.arange(16), *factors, torch.zeros(16, dtype=torch.int64), torch.full((16,), -1))
    together = logits.clone()
    counts.penalise(together, rows)
    for row in range(16):
        alone = logits[row : row + 1].clone()
        counts.penalise(alone, PenaltyRows(*(column[row : row + 1] for column in rows)))
        assert torch.equal(together[row], alone[0])


def test_slots_and_tokens_out_of_range_are_ignored() -> None:
    case = PenaltyCase(20, CPU)
    counts = of_dense(case.counts)
    case.drafts[:], case.slots[0] = 20, 6
    got, _, rows = case.arguments()
    counts.penalise(got, rows)
    case.offsets[:], case.slots[0] = 0, -1
    want = case.arguments()
    apply_penalties_reference(*want)
    assert torch.equal(got, want[0])
    counts.add(ints(6, -1, 0, 0), ints(1, 1, 20, -1))
    assert torch.equal(counts.dense(), case.counts)


def test_slot_is_cleared_by_its_list() -> None:
    """Clearing a slot only follows its list: a place that is not in the list stays set."""
    counts = listed(50)
    counts.grow(1)
    counts.set_text(0, np.array([4, 9]), np.array([9]))
    counts._places[0, 30] = 7
    counts.set_text(0, np.array([5]), np.array([], np.int64))
    assert np.flatnonzero(counts._places[0]).tolist() == [5, 30]
    with pytest.raises(AssertionError, match="slot 0: tokens"):
        counts.check()


def test_lists_grow_only_with_the_longest_text() -> None:
    counts = listed(100_000)
    counts.grow(2)
    room = counts._tokens.shape[1]
    counts.set_text(0, np.zeros(10 * room, np.int32), np.arange(3))
    assert counts._tokens.shape == (2, room)
    counts.add(torch.zeros(room, dtype=torch.int64), torch.arange(room))
    assert counts._tokens.shape == (2, 2 * room)
    counts.check()
    assert counts.dense()[0, :4].tolist() == [PROMPT_BIT + 2, 2, 2, 1]


def test_invalid_arguments_are_rejected() -> None:
    case = PenaltyCase(20, CPU)
    counts = of_dense(case.counts)
    logits, _, rows = case.arguments()
    for own, wrong, error in [
        (logits.double(), rows, "logits: dtype"),
        (logits[:, :9], rows, "logits: dimension 1"),
        (logits, rows._replace(slots=rows.slots[:2]), "slots: dimension 0"),
        (logits, rows._replace(slots=rows.slots.int()), "slots: dtype"),
        (logits, rows._replace(repetition=rows.repetition.double()), "repetition: dtype"),
        (logits, rows._replace(offsets=rows.offsets.int()), "offsets: dtype"),
    ]:
        with pytest.raises(ValueError, match=error):
            counts.penalise(own, wrong)
    for slots, tokens, error in [
        (ints(0), ints(0, 1), "slots: dimension 0"),
        (ints(0), ints(0).int(), "tokens: dtype"),
    ]:
        with pytest.raises(ValueError, match=error):
            counts.add(slots, tokens)
