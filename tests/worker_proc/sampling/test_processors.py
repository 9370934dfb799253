"""``LogitsProcessors``: the order in any batch and with drafts, failures, and output lists on the host."""

import random

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processor_cases import END, EOS, START, VOCAB, Request, made, random_logits, random_request, random_tokens
from processor_plugins import AddText, Prefers
from processors_under_test import ProcessorsUnderTest
from sampling_batch import batch_of, sample_each

from quire.protocol.request.logits_processors import LogitsProcessor
from quire.protocol.request.sampling_params import SamplingParams
from quire.worker_proc.batch.positions import SampledPositions
from quire.worker_proc.sampling.builtin.allowed_token_ids import AllowedTokenIds
from quire.worker_proc.sampling.builtin.bad_words import BadWords
from quire.worker_proc.sampling.builtin.logit_bias import LogitBias
from quire.worker_proc.sampling.builtin.min_tokens import MinTokens
from quire.worker_proc.sampling.builtin.penalties import Penalties
from quire.worker_proc.sampling.processors import NOTHING_ALLOWED
from quire.worker_proc.sampling.thinking import ThinkingBudget
from quire.worker_proc.sampling.token_masks import TokenMasks

ORDER: list[type[LogitsProcessor]] = [LogitBias, Penalties, AllowedTokenIds, BadWords, MinTokens]
INF = torch.inf


def request(output: list[int] | None = None, prompt: list[int] | None = None, **sampling: object) -> Request:
    params = SamplingParams(max_tokens=None, **sampling)  # type: ignore[arg-type]
    return Request(params, prompt or [5], output or [])


def masks_of(allowed: dict[int, list[int]]) -> TokenMasks:
    """Return each position's tokens."""
    words = [sum(1 << token for token in set(tokens)) for tokens in allowed.values()]
    return TokenMasks(np.array(list(allowed), np.int64), np.array(words, np.int32)[:, None])


def random_masks(rng: random.Random, num_positions: int) -> dict[int, list[int]]:
    at = sorted(rng.sample(range(num_positions), rng.randint(0, num_positions)))
    return {place: random_tokens(rng, 0, 20) for place in at}


def expected_alone(
    own: Request, logits: torch.Tensor, plugins: list[type[LogitsProcessor]], allowed: list[int] | None
) -> torch.Tensor:
    """Apply the processors to a single request through the plugin interface.

    If nothing is left and the grammar is complete, the end of the text is allowed, although it is banned.
    """
    for cls in [*ORDER, *plugins]:
        logits = made(cls, [own]).apply(logits)
    if allowed is not None:
        logits[:, sorted(set(range(VOCAB)) - set(allowed))] = -INF
    logits = made(ThinkingBudget, [own]).apply(logits)
    if bool((logits == -INF).all()):
        logits[:, allowed if allowed and {EOS}.issuperset(allowed) else slice(None)] = 0.0
    return logits


@pytest.mark.full
@pytest.mark.parametrize("plugins", [[], [AddText, Prefers]], ids=["builtin", "plugins"])
@given(st.integers(0, 2**32))
@example(430)  # a mask with nothing but the end, which min_tokens bans
@settings(max_examples=15)
def test_request_in_a_changing_batch_equals_the_request_alone(plugins: list[type[LogitsProcessor]], seed: int) -> None:
    check_changing_batch(plugins, seed)


def check_changing_batch(plugins: list[type[LogitsProcessor]], seed: int) -> None:
    rng = random.Random(seed)
    world = ProcessorsUnderTest([cls.__name__ for cls in plugins])
    for step in range(6):
        removed = [handle for handle in world.requests if rng.random() < 0.2]
        room = world.batch.max_rows - len(world.requests) + len(removed)
        new = {10 * step + i: random_request(rng) for i in range(rng.randint(0, min(room, 4)))}
        world.change(removed, new)
        rows = np.array([row for row in range(world.batch.num_rows) if rng.random() < 0.8], np.int64)
        if not len(rows):
            continue
        drafts = [random_tokens(rng, 0, 3) for _ in rows]
        positions = (
            SampledPositions.with_drafts(rows, drafts) if rng.random() < 0.5 else SampledPositions.one_per_row(rows)
        )
        logits = random_logits(rng, len(positions))
        allowed = random_masks(rng, len(positions)) if rng.random() < 0.5 else {}
        edited = logits.clone()
        failed = dict(world.edit(edited, positions, masks_of(allowed) if allowed else None))
        for at, (row, offset) in enumerate(zip(positions.rows.tolist(), positions.offsets.tolist(), strict=True)):
            own = world.request_in(row)
            longer = Request(own.params, own.prompt, own.output + positions.drafts[at - offset : at].tolist())
            expected = expected_alone(longer, logits[at : at + 1].clone(), plugins, allowed.get(at))
            assert torch.equal(edited[at : at + 1], expected)
            assert (at in failed) == bool((expected == 0).all())
        assert set(failed.values()) <= {NOTHING_ALLOWED}
        right = [draft if draft >= 0 and rng.random() < 0.7 else rng.randrange(VOCAB) for draft in positions.drafts]
        world.sampled(positions, [int(token) for token in right])


def test_logits_are_unchanged_without_features() -> None:
    world = ProcessorsUnderTest()
    world.add(request(temperature=0.5), request(min_tokens=2, ignore_eos=True))
    assert not world.processors.active
    logits = torch.ones(2, VOCAB)
    edited, failed = world.apply(logits)
    assert torch.equal(edited, logits) and failed == {}


def test_active_follows_the_batch() -> None:
    world = ProcessorsUnderTest()
    world.add(request(), request(logit_bias={1: 1.0}))
    assert world.processors.active
    world.change([1], {})
    assert not world.processors.active
    world.add(request(min_tokens=1))
    assert world.processors.active
    world.processors.reset()
    assert not world.processors.active


@pytest.mark.parametrize("with_plugin", [False, True])
def test_forced_token_overrides_all_constraints(with_plugin: bool) -> None:
    against = request(
        [2, 2],
        START,
        thinking_token_budget=2,
        logit_bias={2: 100.0, END[0]: -100.0},
        allowed_token_ids=[2, 4],
        bad_words_token_ids=[[END[0]]],
        repetition_penalty=10.0,
        presence_penalty=2.0,
        stop_token_ids=[END[0]],
        min_tokens=5,
        extra_args={"prefers": 0},
    )
    world = ProcessorsUnderTest(["Prefers"] if with_plugin else [])
    world.add(against, request())
    logits = torch.full((2, VOCAB), 1e30)
    edited = logits.clone()
    failed = world.edit(edited, world.everyone, masks_of({0: [2]}))
    assert failed == []
    assert edited[0, END[0]] == 0.0 and (edited[0] > -INF).sum() == 1
    assert torch.equal(edited[1], logits[1])


@pytest.mark.parametrize("with_plugin", [False, True])
def test_only_requests_without_an_allowed_token_fail(with_plugin: bool) -> None:
    world = ProcessorsUnderTest(["AddText"] if with_plugin else [], max_rows=16)
    world.add(
        request(),
        request(allowed_token_ids=[2, 9], bad_words_token_ids=[[2], [9]]),
        request(bad_words_token_ids=[[token] for token in range(VOCAB)]),
        request(allowed_token_ids=[EOS], min_tokens=1),
        request(allowed_token_ids=[2, 9], bad_words_token_ids=[[2]]),
        request(),
        request(allowed_token_ids=[1]),
        request(bad_words_token_ids=[[4], [7]]),
        request(bad_words_token_ids=[[4], [7]]),
    )
    logits = torch.ones(9, VOCAB)
    masks = masks_of({5: [], 6: [2], 7: [4, 7], 8: [4, 6]})
    edited = logits.clone()
    failed = dict(world.edit(edited, world.everyone, masks))
    assert failed == dict.fromkeys([1, 2, 3, 5, 6, 7], NOTHING_ALLOWED)
    assert torch.equal(edited[0], logits[0]) and edited[4, 9] == edited[8, 6] == 1.0
    assert (edited[[1, 2, 3, 5, 6, 7]] == 0).all()


@pytest.mark.parametrize("with_plugin", [False, True])
def test_bans_give_way_to_a_grammar_that_allows_only_the_end(with_plugin: bool) -> None:
    world = ProcessorsUnderTest(["AddText"] if with_plugin else [])
    banned = [{"min_tokens": 9}, {"allowed_token_ids": [2]}, {"bad_words_token_ids": [[EOS]]}]
    world.add(*(request(**each) for each in [*banned, {}, *banned]))
    logits = torch.ones(7, VOCAB)
    masks = masks_of({0: [EOS], 1: [EOS], 2: [EOS], 4: [EOS, 5], 5: [EOS, 5], 6: [EOS, 5]})
    assert dict(world.edit(logits, world.everyone, masks)) == {5: NOTHING_ALLOWED}
    assert (logits[:3].argmax(-1) == EOS).all() and ((logits[:3] > -INF).sum(-1) == 1).all()
    assert logits[3, 2] == 1.0 and logits[[4, 6], 5].tolist() == [1.0, 1.0] and logits[4, EOS] == -INF


@pytest.mark.parametrize("with_plugin", [False, True])
@pytest.mark.parametrize("value", [torch.nan, INF, -INF])
def test_row_with_non_finite_logits_is_not_a_failure(with_plugin: bool, value: float) -> None:
    world = ProcessorsUnderTest(["AddText"] if with_plugin else [])
    world.add(request(allowed_token_ids=[2], bad_words_token_ids=[[2]], extra_args={"add_text": 1}), request())
    logits = torch.ones(2, VOCAB)
    logits[0] = value
    _, failed = world.apply(logits)
    assert failed == {}


def test_position_after_a_draft_may_have_no_allowed_token() -> None:
    """Only the position after the draft fails; positions before it are sampled."""
    world = ProcessorsUnderTest()
    world.add(request(allowed_token_ids=[2, 9], bad_words_token_ids=[[2, 9], [2, 2]]))
    positions = SampledPositions.with_drafts(np.array([0]), [[2]])
    assert world.edit(torch.zeros(2, VOCAB), positions, None) == [(1, NOTHING_ALLOWED)]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({}, False),
        ({"presence_penalty": 1.0}, False),
        ({"min_tokens": 3}, False),
        ({"allowed_token_ids": [1], "logit_bias": {1: 1.0}}, False),
        ({"bad_words_token_ids": [[4]]}, False),
        ({"bad_words_token_ids": [[4], [4, 5]]}, True),
        ({"thinking_token_budget": 0}, True),
    ],
)
def test_output_lists_are_kept_only_if_tokens_are_read(sampling: dict[str, object], kept: bool) -> None:
    """The host waits for these lists; it knows lengths, and the device has counts."""
    params = SamplingParams(max_tokens=None, **sampling)  # type: ignore[arg-type]
    assert ProcessorsUnderTest().processors.reads_output(params) == kept
    assert ProcessorsUnderTest(["AddText"]).processors.reads_output(params)


def test_budget_without_markers_needs_no_output_list() -> None:
    params = SamplingParams(thinking_token_budget=0)
    assert not ProcessorsUnderTest(thinking_end_token_ids=[]).processors.reads_output(params)


def test_builtin_processors_are_before_plugins() -> None:
    processors = ProcessorsUnderTest(["Halve", "AddText"]).processors
    names = [type(processor).__name__ for processor in processors.non_argmax_invariant]
    assert names == ["LogitBias", "Penalties", "AllowedTokenIds", "BadWords", "MinTokens", "ThinkingBudget", "AddText"]
    assert [type(processor).__name__ for processor in processors.argmax_invariant] == ["Halve"]
    assert [type(processor).__name__ for processor in processors.all] == ["Halve", *names]


def test_penalties_count_samples_unknown_to_the_host() -> None:
    world = ProcessorsUnderTest()
    world.add(request(frequency_penalty=1.0), request(), request(frequency_penalty=2.0))
    positions = world.everyone
    for tokens in ([4, 4, 6], [4, 4, 4]):
        world.edit(torch.zeros(3, VOCAB), positions, None)
        world.processors.accepted(positions, torch.tensor(tokens), None)
    edited, _ = world.apply(torch.zeros(3, VOCAB))
    assert edited[0, [4, 6]].tolist() == [-2.0, 0.0]
    assert edited[2, [4, 6]].tolist() == [-2.0, -2.0]
    assert (edited[1] == 0).all()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_row_is_bad_if_the_model_excludes_all_allowed_tokens(temperature: float) -> None:
    """The host checks constraints without logits; the sampler detects the conflict with the logits."""
    own = {"allowed_token_ids": [2, 4], "temperature": temperature}
    _, sampler = batch_of([(1, 1, own), (2, 1, own), (3, 1, {"temperature": temperature})], VOCAB)
    logits = torch.zeros(3, VOCAB)
    logits[0, [2, 4]] = -INF
    sampled = sample_each(sampler, logits)
    assert sampled.bad.tolist() == [True, False, False] and sampled.failed == []
    assert int(sampled.tokens[1]) in (2, 4)
