"""Thinking spans and budgets, compared with a reading of the whole text from its beginning."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from quire.protocol.request.thinking import ThinkingState

TOKENS = st.integers(0, 2)
MARKERS = st.lists(TOKENS, max_size=4)
TEXTS = st.lists(TOKENS, max_size=24)


@dataclass
class Reading:
    is_open: bool
    num_tokens: int
    num_ended: int
    forced: int | None


def last_in(text: list[int], marker: list[int]) -> int:
    return max((at for at in range(len(text)) if text[at : at + len(marker)] == marker), default=-1)


def read(start: list[int], end: list[int], prompt: list[int], output: list[int], budget: int) -> Reading:
    """The definition, in quadratic time."""
    if not start or not end:
        return Reading(False, 0, 0, None)
    begins = last_in(prompt, start)
    opened = begins + len(start) if begins > last_in(prompt, end) else None  # index of the span's first token
    text, ended = prompt + output, 0
    for known in range(len(prompt) + 1, len(text) + 1):
        if opened is None:
            opened = known if text[:known][-len(start) :] == start else None
        elif text[:known][-len(end) :] == end:
            opened, ended = None, ended + 1
    if opened is None:
        return Reading(False, 0, ended, None)
    spent = len(text) - opened
    forced = None
    if spent >= budget:
        partial = next(n for n in range(len(end) - 1, -1, -1) if text[len(text) - n :] == end[:n] and n <= len(text))
        forced = end[partial]
    return Reading(True, spent, ended, forced)


def reading_of(state: ThinkingState, budget: int) -> Reading:
    return Reading(state.is_open, state.num_tokens, state.num_ended, state.forced_token(budget))


@given(MARKERS, MARKERS, TEXTS, TEXTS, st.integers(0, 6))
@settings(deadline=None, max_examples=examples(300))
def test_state_equals_a_reading_of_the_whole_text(
    start: list[int], end: list[int], prompt: list[int], output: list[int], budget: int
) -> None:
    state = ThinkingState(start, end, prompt)
    assert reading_of(state, budget) == read(start, end, prompt, [], budget)
    for known, token in enumerate(output, start=1):
        state.advance(token)
        assert reading_of(state, budget) == read(start, end, prompt, output[:known], budget)


@given(MARKERS, MARKERS, TEXTS, TEXTS, TEXTS, st.integers(0, 6))
@settings(deadline=None, max_examples=examples(100))
def test_copy_follows_drafts_without_changing_the_original(
    start: list[int], end: list[int], prompt: list[int], output: list[int], drafts: list[int], budget: int
) -> None:
    state = ThinkingState(start, end, prompt)
    state.extend(output)
    ahead = state.copy()
    ahead.extend(drafts)
    assert reading_of(ahead, budget) == read(start, end, prompt, output + drafts, budget)
    assert reading_of(state, budget) == read(start, end, prompt, output, budget)


@given(st.lists(TOKENS, min_size=1, max_size=4), st.lists(TOKENS, min_size=1, max_size=4), TEXTS, st.data())
@settings(deadline=None, max_examples=examples(80))
def test_forced_tokens_end_each_span_within_its_budget(
    start: list[int], end: list[int], prompt: list[int], data: st.DataObject
) -> None:
    """A span has at most its budget of tokens, then the end marker."""
    budget = data.draw(st.integers(0, 6))
    state = ThinkingState(start, end, prompt)
    late = max(0, state.num_tokens - budget)
    for _ in range(40):
        forced = state.forced_token(budget)
        state.advance(data.draw(TOKENS) if forced is None else forced)
        late = late if state.is_open and state.num_ended == 0 else 0
        assert state.num_tokens < budget + late + len(end)


def test_partial_end_marker_is_completed() -> None:
    state = ThinkingState([1], [7, 8, 9], [1])
    state.extend([5, 7, 8])
    assert state.forced_token(4) is None
    assert state.forced_token(3) == 9
    state.advance(9)
    assert (state.is_open, state.num_tokens, state.num_ended, state.forced_token(0)) == (False, 0, 1, None)


def test_first_token_of_an_end_marker_does_not_end_a_span() -> None:
    state = ThinkingState([1], [7, 8], [1])
    state.extend([7, 5, 7, 7])
    assert (state.is_open, state.num_tokens) == (True, 4)
    assert state.forced_token(4) == 8


def test_marker_may_begin_in_the_prompt_and_end_in_the_answer() -> None:
    state = ThinkingState([1, 2], [3, 4], [9, 1])
    assert not state.is_open
    state.advance(2)
    assert (state.is_open, state.num_tokens, state.forced_token(0)) == (True, 0, 3)
    ending = ThinkingState([1], [3, 4], [1, 9, 3])
    assert (ending.num_tokens, ending.forced_token(2)) == (2, 4)
    ending.advance(4)
    assert (ending.is_open, ending.num_ended) == (False, 1)


@pytest.mark.parametrize(("start", "end"), [([], [7]), ([1], []), ([], [])])
def test_no_span_opens_without_both_markers(start: list[int], end: list[int]) -> None:
    state = ThinkingState(start, end, [1, 1])
    state.extend([1, 5, 7])
    assert (state.is_open, state.num_ended, state.forced_token(0)) == (False, 0, None)


def test_each_span_has_its_own_budget() -> None:
    state = ThinkingState([1], [7], [])
    state.extend([1, 5, 7, 1, 5])
    assert (state.num_ended, state.num_tokens, state.forced_token(2), state.forced_token(1)) == (1, 1, None, 7)
