"""Each built-in processor: its state follows the batch, rows are independent, drafts count as output."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processor_cases import (
    EOS,
    VOCAB,
    ChangingBatch,
    Request,
    made,
    processor_config,
    random_logits,
    random_request,
    random_tokens,
)
from processor_plugins import AddText, Halve, Prefers
from tiers import examples, thinned

from quire.protocol.request.logits_processors import LogitsProcessor
from quire.protocol.request.sampling_params import SamplingParams
from quire.worker_proc.batch.positions import SampledPositions
from quire.worker_proc.sampling.accept import accept_drafts
from quire.worker_proc.sampling.builtin.allowed_token_ids import AllowedTokenIds
from quire.worker_proc.sampling.builtin.bad_words import BadWords
from quire.worker_proc.sampling.builtin.base import RowProcessor
from quire.worker_proc.sampling.builtin.logit_bias import LogitBias
from quire.worker_proc.sampling.builtin.min_tokens import MinTokens
from quire.worker_proc.sampling.builtin.penalties import Penalties
from quire.worker_proc.sampling.builtin.token_counts import DenseCounts
from quire.worker_proc.sampling.thinking import ThinkingBudget

BUILTIN: list[type[RowProcessor[object]]] = [  # type: ignore[type-abstract]
    LogitBias,  # type: ignore[list-item]
    Penalties,  # type: ignore[list-item]
    AllowedTokenIds,  # type: ignore[list-item]
    BadWords,  # type: ignore[list-item]
    MinTokens,  # type: ignore[list-item]
    ThinkingBudget,  # type: ignore[list-item]
]
PLUGINS: list[type[LogitsProcessor]] = [AddText, Prefers, Halve]
SEEDS = st.integers(0, 2**32)
INF = torch.inf


def request(output: list[int], prompt: list[int] | None = None, **sampling: object) -> Request:
    return Request(SamplingParams(max_tokens=None, **sampling), prompt or [5], output)  # type: ignore[arg-type]


def banned(cls: type[RowProcessor[object]], rows: list[Request]) -> list[list[int]]:
    logits = made(cls, rows).apply(torch.zeros(len(rows), VOCAB))
    return [torch.nonzero(row == -INF)[:, 0].tolist() for row in logits]


@pytest.mark.parametrize("cls", [*BUILTIN, *PLUGINS], ids=lambda cls: cls.__name__)
@given(SEEDS)
@settings(max_examples=examples(25))
def test_updated_state_equals_newly_built_state(cls: type[LogitsProcessor], seed: int) -> None:
    rng = random.Random(seed)
    batch = ChangingBatch(rng)
    processor = made(cls, batch.rows)
    for _ in range(8):
        processor.update_state(batch.change())
        logits = random_logits(rng, len(batch.rows))
        assert torch.equal(processor.apply(logits.clone()), made(cls, batch.rows).apply(logits.clone()))


@pytest.mark.parametrize("cls", [*BUILTIN, *PLUGINS], ids=lambda cls: cls.__name__)
@given(SEEDS)
@settings(max_examples=examples(25))
def test_row_in_a_batch_equals_the_row_alone(cls: type[LogitsProcessor], seed: int) -> None:
    rng = random.Random(seed)
    rows = [random_request(rng) if rng.random() < 0.8 else None for _ in range(6)]
    logits = random_logits(rng, len(rows))
    together = made(cls, rows).apply(logits.clone())
    for row, own in enumerate(rows):
        alone = logits[row : row + 1].clone()
        assert torch.equal(together[row : row + 1], alone if own is None else made(cls, [own]).apply(alone))


@pytest.mark.parametrize("cls", BUILTIN, ids=lambda cls: cls.__name__)
@given(SEEDS)
@settings(max_examples=examples(40))
def test_drafts_before_a_position_count_as_output(cls: type[RowProcessor[object]], seed: int) -> None:
    """The batch also has rows that do not sample in the step."""
    rng = random.Random(seed)
    rows = [random_request(rng) for _ in range(5)]
    sampling = sorted(rng.sample(range(5), 3))
    drafts = [random_tokens(rng, 0, 3) for _ in sampling]
    positions = SampledPositions.with_drafts(np.array(sampling), drafts)
    logits = random_logits(rng, len(positions))
    edited = logits.clone()
    processor = made(cls, rows)
    for _ in range(2):  # the second time from cached data
        edited = logits.clone()
        processor.edit(edited, positions)
    for at, (row, offset) in enumerate(zip(positions.rows.tolist(), positions.offsets.tolist(), strict=True)):
        own = rows[row]
        longer = Request(own.params, own.prompt, own.output + drafts[sampling.index(row)][:offset])
        assert torch.equal(edited[at : at + 1], made(cls, [longer]).apply(logits[at : at + 1].clone()))


@pytest.mark.parametrize("cls", BUILTIN, ids=lambda cls: cls.__name__)
def test_without_the_feature_nothing_is_active(cls: type[RowProcessor[object]]) -> None:
    processor = made(cls, [request([1, 1], temperature=0.5, min_tokens=0)])
    assert not processor.active and not processor.is_argmax_invariant()
    processor = made(cls, [random_request(random.Random(seed)) for seed in range(20)])
    assert processor.active
    processor.reset()
    assert not processor.active
    logits = random_logits(random.Random(0), 20)
    assert torch.equal(processor.apply(logits.clone()), logits)


def test_bias_is_added() -> None:
    logits = made(LogitBias, [request([]), request([], logit_bias={2: 1.5, 4: -100.0})]).apply(torch.ones(2, VOCAB))
    expected = torch.ones(2, VOCAB)
    expected[1, 2], expected[1, 4] = 2.5, -99.0
    assert torch.equal(logits, expected)


def test_only_allowed_tokens_keep_their_logits() -> None:
    logits = torch.arange(2.0 * VOCAB).reshape(2, VOCAB)
    edited = made(AllowedTokenIds, [request([], allowed_token_ids=[7, 2]), request([])]).apply(logits.clone())
    assert edited[0, [2, 7]].tolist() == [2.0, 7.0] and (edited[0] > -INF).sum() == 2
    assert torch.equal(edited[1], logits[1])


def test_stop_tokens_are_banned_before_min_tokens() -> None:
    rows = [
        request([0, 0], min_tokens=3),
        request([0, 0, 0], min_tokens=3),
        request([], min_tokens=1, stop_token_ids=[9]),
        request([], min_tokens=1, stop_token_ids=[9], ignore_eos=True),
        request([], min_tokens=1, ignore_eos=True),
    ]
    assert banned(MinTokens, rows) == [[EOS], [], [EOS, 9], [9], []]  # type: ignore[arg-type]


def test_row_with_its_minimum_is_dropped() -> None:
    own = request([0], min_tokens=2)
    processor = made(MinTokens, [own])
    assert processor.apply(torch.zeros(1, VOCAB))[0, EOS] == -INF and processor.active
    own.output.append(0)
    assert processor.apply(torch.zeros(1, VOCAB))[0, EOS] == 0 and not processor.active


def test_last_token_of_a_bad_word_is_banned_after_its_prefix() -> None:
    words = [[4], [5, 6], [9, 5, 2], [5, 5, 7]]
    rows = [request(output, bad_words_token_ids=words) for output in ([], [5], [9, 5], [5, 5], [5, 9], [9])]
    assert banned(BadWords, rows) == [[4], [4, 6], [2, 4, 6], [4, 6, 7], [4], [4]]  # type: ignore[arg-type]


def test_prompt_is_not_a_prefix_of_a_bad_word() -> None:
    assert banned(BadWords, [request([], prompt=[5], bad_words_token_ids=[[5, 6]])]) == [[]]  # type: ignore[arg-type]


def test_penalties_follow_their_definition() -> None:
    """Repetition counts prompt and output tokens; frequency and presence only output tokens."""
    own = request([2, 2], [1], repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    logits = torch.tensor([[1.0, 1.0, 1.0, -1.0] + [0.0] * (VOCAB - 4)])
    expected = logits.clone()
    expected[0, 1] = 0.5
    expected[0, 2] = 0.5 - 2 * 0.5 - 0.25
    processor = made(Penalties, [own])
    assert torch.equal(processor.apply(logits.clone()), expected)
    own.output.append(3)
    expected[0, 3] = -2.0 - 0.5 - 0.25
    assert torch.equal(processor.apply(logits.clone()), expected)


def test_counts_use_memory_for_penalised_rows_only() -> None:
    plain, own = request([]), request([1], presence_penalty=1.0)
    processor = made(Penalties, [plain] * 40)
    assert len(processor._counts) == 0
    processor = made(Penalties, [own] * 3 + [plain] * 40)
    assert len(processor._counts) == 3


@pytest.fixture
def kinds_of_counts(monkeypatch: pytest.MonkeyPatch) -> list[Penalties]:
    """Counts with the native library, if it is available, and without."""
    both = [Penalties(processor_config(), torch.device("cpu"), False)]
    monkeypatch.setenv("QUIRE_CPU_NATIVE", "0")
    both.append(Penalties(processor_config(), torch.device("cpu"), False))
    assert type(both[1]._counts) is DenseCounts
    return both


@pytest.mark.parametrize("seed", thinned(range(6), keep=2))
def test_counts_are_equal_in_all_implementations(seed: int, kinds_of_counts: list[Penalties]) -> None:
    """Rows are added and removed; the engine passes samples and accepted drafts instead of output lists."""
    rng = random.Random(seed)
    batch = ChangingBatch(rng)
    for _ in range(30):
        update = batch.change()
        drafts = [random_tokens(rng, 0, 3) for _ in batch.rows]
        positions = SampledPositions.with_drafts(np.arange(len(drafts)), drafts)
        logits = random_logits(rng, len(positions))
        tokens = torch.tensor(
            [rng.choice([rng.randrange(VOCAB), max(draft, 0)]) for draft in positions.drafts.tolist()]
        )
        accepted = accept_drafts(tokens.numpy(), positions)
        edited = []
        for processor in kinds_of_counts:
            processor.update_state(update)
            edited.append(logits.clone())
            if processor.active:
                processor.edit(edited[-1], positions)
            processor.accepted(positions, tokens, accepted)
        assert torch.equal(*edited)


def test_used_up_budget_allows_one_token() -> None:
    rows = [request([5, 5], [1], thinking_token_budget=budget) for budget in (3, 2)]
    logits = made(ThinkingBudget, rows).apply(torch.full((2, VOCAB), 100.0))
    assert (logits[0] == 100.0).all()
    assert logits[1, 7] == 0.0 and (logits[1] > -INF).sum() == 1


def test_without_markers_there_is_no_budget() -> None:
    own = request([5, 5], [1], thinking_token_budget=0)
    assert not made(ThinkingBudget, [own], processor_config(thinking_end_token_ids=[])).active
