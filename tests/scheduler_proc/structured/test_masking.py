"""Masks that are late, helpers that die or grow, and grammars that are expensive: only their own requests notice."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from grammar_cases import EOS
from grammar_manager_case import PROMPT, Case, arrival, constrained, ready, sample_inputs, step_of

from quire.protocol.wire.front_end_messages import AddRequest
from quire.scheduler_proc.messages.steps import InFlightStep
from quire.scheduler_proc.requests.events import Fail, Hold, Refuse, Release
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.structured.limits import (
    EXPENSIVE_BYTES,
    LATE_SHARE,
    MAX_PRIVATE_BYTES,
    MAX_PRIVATE_HELPERS_OF_TENANT,
    MAX_SHARED_BYTES,
    MAX_STRIKES,
    PATIENCE_SECONDS,
    PRIVATE_PATIENCE_SECONDS,
    RETRY_SECONDS,
    ROW_PATIENCE_SECONDS,
    STALLED_SECONDS,
)
from quire.scheduler_proc.structured.masking import CROWDED, TOO_LARGE, TOO_SLOW

MakeCase = Callable[..., Case]


@pytest.fixture
def make_case() -> Iterator[MakeCase]:
    created: list[Case] = []

    def make(**settings: Any) -> Case:
        created.append(Case(**settings))
        return created[-1]

    yield make
    for case in created:
        case.close()


def expensive(case: Case, *requests: Request) -> None:
    """Make the grammars of requests take much memory."""
    for request in requests:
        assert request.sampling.structured_outputs is not None
        case.gate.num_bytes[str(request.sampling.structured_outputs.regex)] = EXPENSIVE_BYTES + 1


def masks_of(inputs: Any) -> list[list[int]]:
    return np.asarray(inputs.bitmask).reshape(sum(inputs.counts), -1).tolist()


def beside(free: Request, *requests: Request) -> InFlightStep:
    """Return a step of requests, and of one without a grammar."""
    record = step_of(*requests)
    record.steady = {free.handle: free}
    return record


class TestLateMasks:
    @pytest.mark.parametrize(("private", "patience"), [(False, PATIENCE_SECONDS), (True, PRIVATE_PATIENCE_SECONDS)])
    def test_a_step_waits_as_long_as_its_masks_are_worth(
        self, make_case: MakeCase, private: bool, patience: float
    ) -> None:
        case = make_case()
        free, late = constrained("1", regex="a+"), constrained("2", regex="b+")
        if private:
            expensive(case, late)
        ready(case, free, late)
        (helper,) = [helper for helper in case.helpers.opened if helper.private == private]
        helper.stopped = True
        case.manager.ask(beside(free, late))
        case.now += 0.9 * patience
        assert case.manager.result() is None and case.manager.deadline() == pytest.approx(patience)
        case.now = patience
        assert case.manager.result() is not None and case.manager.deadline() is None

    @pytest.mark.parametrize("has_free", [True, False])
    def test_only_steps_that_could_continue_stop_waiting_for_masks_that_are_often_late(
        self, make_case: MakeCase, has_free: bool
    ) -> None:
        case = make_case()
        free, late = constrained("1", regex="a+"), constrained("2", regex="b+")
        ready(case, free, late)
        (helper,) = case.helpers.opened
        helper.stopped = True
        for _ in range(100):
            case.manager.ask(beside(free, late) if has_free else step_of(late))
            while case.manager.result() is None:
                case.now = case.manager.deadline()
        often_late = 100 * (PRIVATE_PATIENCE_SECONDS + ROW_PATIENCE_SECONDS) + PATIENCE_SECONDS
        expected = often_late / (1 - LATE_SHARE) if has_free else 100 * PATIENCE_SECONDS
        assert case.now == pytest.approx(expected, rel=0.1)

    def test_the_request_is_held_until_its_masks_are_there_and_continues_with_them(self, make_case: MakeCase) -> None:
        case = make_case()
        one, late = constrained("1", regex="[ab]+"), constrained("2", regex="[ab]{2}")
        expensive(case, late)
        ready(case, one, late)
        expected, _ = sample_inputs(case.manager, step_of(late))
        _shared, private = case.helpers.opened
        private.stopped = True
        case.manager.ask(step_of(one, late))
        assert case.manager.result() is None
        case.now += PATIENCE_SECONDS
        inputs, events = case.result()
        assert inputs.handles == [1] and events == [(0, Hold("2", "grammar"))]
        assert case.manager.poll() == [] and case.manager.has_waiting_requests
        private.stopped = False
        assert case.manager.poll() == [(0, Release("2"))] and not case.manager.has_waiting_requests
        private.stopped = True
        inputs, events = sample_inputs(case.manager, step_of(late))
        assert masks_of(inputs) == masks_of(expected) and not events and not private.messages

    def test_a_step_of_one_expensive_request_waits_for_it(self, make_case: MakeCase) -> None:
        case = make_case()
        alone = constrained("1", regex="a+")
        expensive(case, alone)
        ready(case, alone)
        case.helpers.opened[0].stopped = True
        case.manager.ask(step_of(alone))
        case.now += 2 * PRIVATE_PATIENCE_SECONDS
        assert case.manager.result() is None

    def test_a_step_can_repeat_the_question_of_a_lost_one(self, make_case: MakeCase) -> None:
        case = make_case()
        one = constrained("1", regex="a+")
        ready(case, one)
        expected, _ = sample_inputs(case.manager, step_of(one))
        (helper,) = case.helpers.opened
        helper.stopped = True
        case.manager.ask(step_of(one))
        case.manager.abandon()
        case.manager.ask(step_of(one))
        helper.stopped = False
        inputs, events = case.result()
        assert masks_of(inputs) == masks_of(expected) and not events

    def test_an_abort_while_held_leaves_nothing(self, make_case: MakeCase) -> None:
        case = make_case()
        one = constrained("1", regex="a+")
        expensive(case, one)
        ready(case, one)
        case.helpers.opened[0].stopped = True
        case.manager.ask(step_of(one))
        case.now += PATIENCE_SECONDS
        assert case.manager.result() is not None
        case.manager.prune(set())
        assert not case.manager.has_waiting_requests and case.helpers.opened[0].is_dead


class TestDeaths:
    def test_another_helper_continues_with_the_same_masks(self, make_case: MakeCase) -> None:
        """The new helper reads all tokens again; neither the outstanding nor the next masks differ."""
        case, undisturbed = make_case(), make_case()
        texts = ["", "ab", "abba"]
        for at, text in enumerate(texts):
            found = []
            for each in (case, undisturbed):
                one, two = (constrained(i, text, regex="[ab]{2,9}") for i in ("1", "2"))
                if not at:
                    ready(each, one, two)
                if each is case:
                    case.helpers.opened[-1].stopped = True
                each.manager.ask(step_of(one, two))
                if each is case:
                    case.helpers.opened[-1].is_dead = True
                inputs, events = each.result()
                assert inputs.handles == [1, 2] and not events
                found.append(masks_of(inputs))
            assert found[0] == found[1]
        assert len(case.helpers.opened) == 1 + len(texts)

    def test_a_waiting_grammar_is_prepared_again(self, make_case: MakeCase) -> None:
        case = make_case()
        case.gate.num_bytes["a"] = EXPENSIVE_BYTES + 1
        opened = case.helpers.open

        def stopped(*, private: bool) -> Any:
            helper = opened(private=private)
            helper.stopped = len(case.helpers.opened) == 1
            return helper

        case.helpers.open = stopped  # type: ignore[method-assign]
        case.manager.begin(0, arrival("1", regex="a"))
        while not case.helpers.opened:
            case.manager.poll()
        case.manager.poll()  # the helper has started
        case.helpers.opened[0].is_dead = True
        case.manager.poll()
        assert case.manager.poll() == [(0, Release("1"))] and len(case.helpers.opened) == 2

    def test_an_output_that_ends_its_helpers_fails_alone(self, make_case: MakeCase) -> None:
        case = make_case()
        good, bad = constrained("1", regex="a+"), constrained("2", regex="b+")
        ready(case, good, bad)
        sample_inputs(case.manager, step_of(good, bad))
        for strike in range(MAX_STRIKES):
            helper = case.helpers.opened[-1]
            helper.stopped = True
            case.manager.ask(step_of(good, bad))
            helper.works_on = case.manager._masking._outputs[0, "2"].number
            helper.is_dead = True
            found = case.result()
            assert found is not None
            failed = [(0, Fail("2", f"request_failed: {TOO_SLOW}"))]
            assert found[1] == (failed if strike == MAX_STRIKES - 1 else [])
        assert found[0].handles == [1] and case.helpers.opened[-1].private

    def test_a_stopped_helper_is_replaced(self, make_case: MakeCase) -> None:
        case = make_case()
        one, free = constrained("1", regex="a+"), constrained("2", regex="b+")
        ready(case, one, free)
        (helper,) = case.helpers.opened
        helper.stopped = True
        case.manager.ask(step_of(one, free))
        case.now += PATIENCE_SECONDS
        assert len(case.result()[1]) == 2
        case.now += STALLED_SECONDS
        case.manager.poll()
        assert helper.is_dead and case.manager.poll() == [(0, Release("1")), (0, Release("2"))]
        assert len(case.helpers.opened) == 2 and not case.manager.has_waiting_requests

    def test_a_helper_is_opened_when_descriptors_are_free_later(self, make_case: MakeCase) -> None:
        case = make_case()
        one = constrained("1", regex="a+")
        ready(case, one)
        opened, refusals = case.helpers.open, [OSError(24, "too many open files")]

        def scarce(*, private: bool) -> Any:
            if refusals:
                raise refusals.pop()
            return opened(private=private)

        case.helpers.open = scarce  # type: ignore[method-assign]
        case.helpers.opened[0].is_dead = True
        case.manager.ask(step_of(one))
        assert case.manager.result() is None and not refusals
        case.now += PATIENCE_SECONDS
        assert case.result()[1] == [(0, Hold("1", "grammar"))]
        case.now += RETRY_SECONDS
        case.manager.poll()
        assert case.manager.poll() == [(0, Release("1"))]


class TestMemory:
    def test_an_expensive_grammar_has_its_own_helper_which_ends_with_its_requests(self, make_case: MakeCase) -> None:
        case = make_case()
        one, two, cheap = constrained("1", regex="a+"), constrained("2", regex="a+"), constrained("3", regex="b+")
        expensive(case, one)
        ready(case, one, two, cheap)
        assert [helper.private for helper in case.helpers.opened] == [True, False]
        sample_inputs(case.manager, step_of(one, two, cheap))
        case.manager.prune({(0, "2"), (0, "3")})
        assert not case.helpers.opened[0].is_dead
        case.manager.prune({(0, "3")})
        assert [helper.is_dead for helper in case.helpers.opened] == [True, False]

    def test_growth_of_its_helper_fails_the_request(self, make_case: MakeCase) -> None:
        case = make_case()
        one, cheap = constrained("1", regex="a+"), constrained("2", regex="b+")
        expensive(case, one)
        ready(case, one, cheap)
        sample_inputs(case.manager, step_of(one, cheap))
        case.helpers.opened[0].grow(MAX_PRIVATE_BYTES + 1)
        assert case.manager.poll() == [(0, Fail("1", f"request_failed: {TOO_LARGE}"))]
        case.manager.prune({(0, "2")})
        assert [helper.is_dead for helper in case.helpers.opened] == [True, False]
        assert case.manager.begin(0, arrival("3", regex="a+"))
        ((_, refuse),) = case.manager.poll()
        assert isinstance(refuse, Refuse) and refuse.message == "structured_outputs take too much memory to match"

    def test_a_shared_helper_that_has_grown_is_replaced_for_later_outputs(self, make_case: MakeCase) -> None:
        case = make_case()
        early, late = constrained("1", regex="a+"), constrained("2", regex="a+")
        ready(case, early)
        expected, _ = sample_inputs(case.manager, step_of(early))
        case.helpers.opened[0].grow(MAX_SHARED_BYTES + 1)
        case.manager.poll()
        ready(case, late)
        inputs, events = sample_inputs(case.manager, step_of(early, late))
        assert masks_of(inputs) == 2 * masks_of(expected) and not events and len(case.helpers.opened) == 2
        case.manager.prune({(0, "2")})
        assert [helper.is_dead for helper in case.helpers.opened] == [True, False]

    def test_a_second_replacement_moves_the_oldest_outputs(self, make_case: MakeCase) -> None:
        case = make_case()
        requests = [constrained(str(i), "aa", regex="a+") for i in (1, 2)]
        for request in requests:
            ready(case, request)
            sample_inputs(case.manager, step_of(request))
            case.helpers.opened[-1].grow(MAX_SHARED_BYTES + 1)
            case.manager.poll()
        assert [helper.is_dead for helper in case.helpers.opened] == [True, False]
        inputs, events = sample_inputs(case.manager, step_of(*requests))
        assert inputs.handles == [1, 2] and not events


class TestTenants:
    def begin(self, case: Case, request: Request, tenant: int) -> Any:
        wanted = request.sampling.structured_outputs
        event = AddRequest(request.request_id, np.array(PROMPT, np.int32), request.sampling, 0, tenant=tenant)
        assert wanted is not None
        expensive(case, request)
        case.manager.begin(0, event)
        return case.decide()[0][1]

    def test_one_tenant_cannot_take_all_helpers(self, make_case: MakeCase) -> None:
        case = make_case()
        requests = [constrained(str(i), regex=f"a{{{i + 1}}}") for i in range(MAX_PRIVATE_HELPERS_OF_TENANT + 2)]
        *first, surplus, other = requests
        assert all(isinstance(self.begin(case, request, 1), Release) for request in first)
        refused = self.begin(case, surplus, 1)
        assert isinstance(refused, Refuse) and refused.code == "queue_full"
        assert isinstance(self.begin(case, other, 2), Release)

    def test_an_output_without_room_for_its_helper_fails(self, make_case: MakeCase) -> None:
        case = make_case()
        for index in range(MAX_PRIVATE_HELPERS_OF_TENANT):
            self.begin(case, constrained(str(index), regex=f"a{{{index + 1}}}"), 0)
        slow, good = constrained("90", regex="z+"), constrained("91", regex="b+")
        ready(case, slow, good)
        failures: Any = []
        while not failures:
            inputs, failures = sample_inputs(case.manager, step_of(slow, good))
        assert failures == [(0, Fail("90", f"request_failed: {CROWDED}"))] and inputs.handles == [91]


def test_many_tokens_are_read_as_one_by_one(make_case: MakeCase) -> None:
    """As by a helper that replaces another; the limits of the library count from one mask to the next."""
    terminals = [f"T{i}: /[a-{chr(100 + i % 20)} ]{{1,{i + 100}}}/" for i in range(200)]
    start = "start: (" + " | ".join(f"T{i}" for i in range(200)) + ")+"
    case = make_case()
    request = constrained("1", grammar="\n".join([start, *terminals]))
    request.max_total_tokens = 1000
    ready(case, request)
    for at in range(100):
        inputs, failures = sample_inputs(case.manager, step_of(request))
        assert not failures
        tokens = np.flatnonzero(np.unpackbits(np.asarray(inputs.bitmask).view(np.uint8), bitorder="little"))
        tokens = tokens[~np.isin(tokens, EOS)]
        request.tokens.append(int(tokens[(37 * at + 11) % len(tokens)]))
    expected, _ = sample_inputs(case.manager, step_of(request))
    case.helpers.opened[0].is_dead = True
    case.manager.ask(step_of(request))
    inputs, failures = case.result()
    assert not failures and masks_of(inputs) == masks_of(expected)


@pytest.mark.parametrize("in_step", [True, False])
def test_a_failure_that_is_noticed_during_a_step_is_part_of_its_result(make_case: MakeCase, in_step: bool) -> None:
    """Otherwise the failed request could be in the next step, and nothing would know its grammar."""
    case = make_case()
    one, other = constrained("1", regex="a+"), constrained("2", regex="b+")
    expensive(case, one)
    ready(case, one, other)
    sample_inputs(case.manager, step_of(one, other))
    case.helpers.opened[0].grow(MAX_PRIVATE_BYTES + 1)
    inputs, events = sample_inputs(case.manager, step_of(one, other) if in_step else step_of(other))
    assert inputs.handles == [2] and events == [(0, Fail("1", f"request_failed: {TOO_LARGE}"))]
    assert case.manager.poll() == []
