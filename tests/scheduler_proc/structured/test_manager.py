"""GrammarManager without an engine: compiling once, caching, refusing in time, and masks."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from grammar_cases import demo_config, tokens_of
from grammar_manager_case import Case, arrival, constrained, ready, sample_inputs, step_of

from quire.protocol.errors import ConfigError
from quire.protocol.request.grammar_checks import GrammarRefused
from quire.protocol.wire.worker_messages import Proposed
from quire.scheduler_proc.messages.results import WorkerFault
from quire.scheduler_proc.requests.events import Refuse, Release
from quire.scheduler_proc.requests.request import RequestStatus
from quire.scheduler_proc.requests.tokens import Tokens
from quire.scheduler_proc.structured.backends import check_backend
from quire.scheduler_proc.structured.cache import GrammarCache
from quire.scheduler_proc.structured.limits import NUM_WATCHED, SLOW_SECONDS, SlowSteps


@pytest.fixture
def make_case() -> Iterator[Callable[..., Case]]:
    created: list[Case] = []

    def make(**settings: Any) -> Case:
        created.append(Case(**settings))
        return created[-1]

    yield make
    for case in created:
        case.close()


class TestCompiling:
    def test_equal_grammars_are_compiled_once_and_then_cached(self, make_case: Callable[..., Case]) -> None:
        case = make_case(opened=False)
        assert all(case.manager.begin(client, arrival("1", regex="ab")) for client in (0, 1))
        assert case.manager.poll() == [] and case.manager.has_waiting_requests
        case.gate.waiting.release()
        assert case.outcomes() == [(0, Release("1")), (1, Release("1"))]
        assert not case.manager.begin(2, arrival("1", regex="ab")) and not case.manager.has_waiting_requests
        assert len(case.gate.checked) == 1

    def test_tenants_take_turns(self, make_case: Callable[..., Case]) -> None:
        case = make_case(opened=False)
        for index in range(200):
            case.manager.begin(
                0, msgspec.structs.replace(arrival(f"flood{index}", regex=f"a{{{index + 1}}}"), tenant=1)
            )
        case.manager.begin(0, msgspec.structs.replace(arrival("other", regex="b"), tenant=2))
        case.gate.waiting.release(3)
        outcomes: list[Any] = []
        while len(outcomes) < 3:
            outcomes += case.outcomes()
        assert (0, Release("other")) in outcomes

    def test_grammars_of_ended_requests_are_not_compiled(self, make_case: Callable[..., Case]) -> None:
        case = make_case(opened=False)
        for index in range(50):
            case.manager.begin(0, arrival(str(index), regex=f"a{{{index + 1}}}"))
        case.manager.prune({(0, "7")})
        case.manager.begin(0, arrival("last", regex="b"))
        case.gate.waiting.release(1000)
        outcomes: list[Any] = []
        while case.manager.has_waiting_requests:
            outcomes += case.outcomes()
        assert outcomes == [(0, Release("7")), (0, Release("last"))]
        assert {str(wanted.regex) for wanted in case.gate.checked} <= {"a{1}", "a{8}", "b"}

    def test_refusals_are_cached(self, make_case: Callable[..., Case]) -> None:
        case = make_case()
        for client in (0, 1):
            assert case.manager.begin(client, arrival("1", regex="["))
            ((to, refuse),) = case.manager.poll() if client else case.outcomes()
            assert to == client and isinstance(refuse, Refuse) and refuse.code == "invalid_structured_outputs"
        assert len(case.gate.checked) == 1

    def test_a_reused_id_waits_for_its_own_grammar(self, make_case: Callable[..., Case]) -> None:
        case = make_case(opened=False)
        case.manager.begin(0, arrival("1", regex="a"))
        case.manager.begin(0, arrival("1", regex="b"))
        case.gate.waiting.release(2)
        outcomes = case.outcomes()
        while case.manager.has_waiting_requests:
            outcomes += case.outcomes()
        assert outcomes == [(0, Release("1"))]

    @pytest.mark.full
    def test_many_grammars_do_not_exceed_the_cache(self, make_case: Callable[..., Case]) -> None:
        """Far fewer than an attacker would send: the cache has the same size."""
        case = make_case()
        case.gate.waiting.release(1000)
        for index in range(400):
            ready(case, constrained(str(index), regex=f"a{{{index + 1}}}"))
            case.manager.prune({(0, str(index))})
        assert len(case.manager._cache) == 256 and len(case.manager._masking._outputs) < 130
        assert not case.manager._waiting and not case.manager._compiling

    def test_a_missing_library_is_a_configuration_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"needs the package xgrammar: pip install 'quire-serve\[xgrammar\]'"):
            check_backend(demo_config(structured_outputs_backend="xgrammar"))
        with pytest.raises(ConfigError, match="must be llguidance or xgrammar"):
            check_backend(demo_config(structured_outputs_backend="outlines"))


class TestMasks:
    def test_finished_requests_have_no_mask(self, make_case: Callable[..., Case]) -> None:
        case = make_case()
        one, two, finished = (constrained(i, regex="a+") for i in ("1", "2", "3"))
        ready(case, one, two, finished)
        finished.status = RequestStatus.FINISHED_ABORTED
        inputs, failures = sample_inputs(case.manager, step_of(one, two, finished))
        assert (inputs.step, inputs.handles, inputs.counts, failures) == (7, [1, 2], [1, 1], [])
        assert inputs.bitmask is not None and inputs.bitmask.dtype == np.int32 and len(inputs.bitmask) == 2 * 32

    def test_masks_are_a_function_of_the_tokens(self, make_case: Callable[..., Case]) -> None:
        case = make_case()
        steady, late = constrained("1", regex="abc"), constrained("2", "ab", regex="abc")
        ready(case, steady, late)
        for token in tokens_of("ab"):
            sample_inputs(case.manager, step_of(steady))
            steady.tokens.append(token)
        inputs, _ = sample_inputs(case.manager, step_of(steady, late))
        assert inputs.bitmask is not None
        first, second = inputs.bitmask.reshape(2, -1)
        assert first.tolist() == second.tolist() and first.any()
        repeated, _ = sample_inputs(case.manager, step_of(steady))
        assert repeated.bitmask is not None and repeated.bitmask.tolist() == first.tolist()

    def test_drafts_leave_no_trace_and_a_refused_draft_ends_its_masks(self, make_case: Callable[..., Case]) -> None:
        case = make_case()
        one, two = constrained("1", regex="[ab]{4}"), constrained("2", regex="[ab]{4}")
        ready(case, one, two)
        before, _ = sample_inputs(case.manager, step_of(one))
        drafts = [*tokens_of("a"), *tokens_of("c"), *tokens_of("a")]
        proposed = Proposed(7, np.array([1], np.int32), np.array([3], np.int32), np.array(drafts, np.int32))
        inputs, failures = sample_inputs(case.manager, step_of(one, two, drafts=3), proposed)
        assert (inputs.handles, inputs.counts, failures) == ([1, 2], [4, 1], [])
        assert inputs.bitmask is not None and before.bitmask is not None
        masks = inputs.bitmask.reshape(5, -1).tolist()
        assert masks[0] == masks[1] == masks[4] == before.bitmask.tolist()
        assert masks[2] == masks[3] == [-1] * 32
        after, _ = sample_inputs(case.manager, step_of(one))
        assert after.bitmask is not None and after.bitmask.tolist() == before.bitmask.tolist()

    def test_invalid_drafts_are_a_worker_fault(self, make_case: Callable[..., Case]) -> None:
        case = make_case()
        one = constrained("1", regex="a+")
        ready(case, one)
        two = Proposed(7, np.array([1], np.int32), np.array([2], np.int32), np.array([5, 5], np.int32))
        with pytest.raises(WorkerFault, match="drafts of step 7: 2 for handle 1, more than requested"):
            sample_inputs(case.manager, step_of(one, drafts=1), two)

    def test_a_failing_request_does_not_affect_others(self, make_case: Callable[..., Case]) -> None:
        case = make_case()
        bad, good = constrained("1", "xyz", regex="a+"), constrained("2", regex="a+")
        ready(case, bad, good)
        inputs, ((client, fail),) = sample_inputs(case.manager, step_of(bad, good))
        assert inputs.handles == [2] and (client, fail.request_id) == (0, "1")
        assert fail.detail.startswith("request_failed: a sampled token is not allowed")

    def test_thinking_allows_everything_but_the_end_of_text(self, make_case: Callable[..., Case]) -> None:
        case = make_case(thinking_start_token_ids=[70], thinking_end_token_ids=[71])
        one = constrained("1", regex="a+")
        ready(case, one)
        inputs, failures = sample_inputs(case.manager, step_of(one))
        assert (inputs.handles, failures) == ([1], []) and inputs.bitmask is not None
        thinking = constrained("2", regex="a+")
        thinking.tokens = Tokens(np.array([3, 5, 70], np.int32), None)
        ready(case, thinking)
        inputs, failures = sample_inputs(case.manager, step_of(thinking))
        assert (inputs.handles, inputs.counts, failures) == ([2], [1], []) and inputs.bitmask is not None
        allowed = np.unpackbits(inputs.bitmask.view(np.uint8), bitorder="little")[: demo_config().model.vocab_size]
        assert np.flatnonzero(allowed == 0).tolist() == list(demo_config().model.eos_token_ids)

    def test_drafts_across_the_end_of_thinking(self, make_case: Callable[..., Case]) -> None:
        """#44297, #53046, #36138: the grammar starts after the marker within the step, and is rolled back with it."""
        case = make_case(thinking_start_token_ids=[70], thinking_end_token_ids=[71])
        one, plain = constrained("1", regex="ab"), constrained("2", regex="ab")
        one.tokens = Tokens(np.array([3, 5, 70], np.int32), None)
        ready(case, one, plain)
        drafts = [60, 71, *tokens_of("a")]
        proposed = Proposed(7, np.array([1], np.int32), np.array([3], np.int32), np.array(drafts, np.int32))
        first, _ = sample_inputs(case.manager, step_of(plain))
        for _ in range(2):
            inputs, failures = sample_inputs(case.manager, step_of(one, drafts=3), proposed)
            assert (inputs.counts, failures) == ([4], []) and inputs.bitmask is not None and first.bitmask is not None
            thought, last_thought, started, second = inputs.bitmask.reshape(4, -1).tolist()
            assert thought == last_thought and started == first.bitmask.tolist() != thought
            assert second not in (started, thought) and any(second)


class TestLimits:
    def test_slow_matching_fails_the_request_and_refuses_its_grammar(self, make_case: Callable[..., Case]) -> None:
        case = make_case()
        good, bad, other = constrained("1", regex="a+"), constrained("2", regex="z+"), constrained("3", regex="[ab]+")
        ready(case, good, bad, other)
        steps = 0
        failures: Any = []
        while not failures:
            inputs, failures = sample_inputs(case.manager, step_of(good, bad, other))
            steps += 1
        assert inputs.handles == [1, 3] and [fail.request_id for _, fail in failures] == ["2"]
        assert failures[0][1].detail == "request_failed: the grammar takes too long to match"
        assert 5 <= steps <= 12, "0.25 s in steps of 50 ms, without the first step in each helper"
        assert [helper.private for helper in case.helpers.opened] == [False, True]
        assert case.manager.begin(0, arrival("4", regex="z+"))
        ((_, refuse),) = case.manager.poll()
        assert isinstance(refuse, Refuse) and refuse.message == "structured_outputs take too long to match"
        for _ in range(100):
            inputs, failures = sample_inputs(case.manager, step_of(good, other))
            assert inputs.handles == [1, 3] and not failures

    def test_rows_are_filled_together_again_after_fast_steps(self) -> None:
        steps = SlowSteps(vocab_size=1024)
        steps.record(SLOW_SECONDS, num_rows=32)
        assert not steps.are_watched
        steps.record(3 * SLOW_SECONDS, num_rows=32)
        for _ in range(NUM_WATCHED):
            assert steps.are_watched
            steps.record(0.0, num_rows=32)
        assert not steps.are_watched


class TestCache:
    def test_evicts_the_least_recently_used(self) -> None:
        cache, outcome = GrammarCache(max_count=2), GrammarRefused("x")
        cache.put(("regex", "a"), outcome)
        cache.put(("regex", "b"), outcome)
        assert cache.get(("regex", "a")) is outcome
        cache.put(("regex", "c"), outcome)
        assert cache.get(("regex", "b")) is None and cache.get(("regex", "a")) is outcome and len(cache) == 2

    def test_bytes_are_bounded_and_released(self) -> None:
        cache, outcome = GrammarCache(max_bytes=10), GrammarRefused("x")
        for text in ("aaaa", "bbbb", "cccc", "aaaa", "aaaa"):
            cache.put(("regex", text), outcome)
        assert len(cache) == 2 and cache.num_bytes == 8 and cache.get(("regex", "bbbb")) is None
        cache.discard(("regex", "aaaa"))
        cache.discard(("regex", "aaaa"))
        assert cache.num_bytes == 4
        cache.put(("regex", "d" * 50), outcome)
        assert len(cache) == 1, "a single entry is kept even when it is too large"
