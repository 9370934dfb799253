"""Mutation tests without simulation: the test of each recurring bug must fail when its guard is removed.

``tests/simulation/test_mutations.py`` has the mutations that need a simulation; ``tests/simulation/README.md`` lists
both by number. Defences against hostile input are removed in the same way; ``tests/abuse/findings.md`` lists them.
"""

import gc
import re
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

import mutations
import pytest
import torch
import without_guards as without
from kv_cases import full, layout_of
from tiers import thinned
from without_defences import DEFENCES, Row

from quire.scheduler_proc.core.in_flight import WorkerFault

TESTS = Path(__file__).parent


def load(path: str) -> Any:
    """Load a test module whose tests are called as functions."""
    spec = spec_from_file_location(f"guarded_{Path(path).stem}", TESTS / path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bugs = load("scheduler_proc/core/test_recurring_bugs.py")
prefixes = load("scheduler_proc/kv/test_prefix_caching.py")
prompts = load("scheduler_proc/core/test_prompt_logprobs.py")
grammars = load("scheduler_proc/structured/test_manager.py")
masking = load("scheduler_proc/structured/test_masking.py")
holds = load("scheduler_proc/core/test_holds_and_pauses.py")
drafts = load("worker_proc/execute/test_draft_steps.py")
attention = load("worker_proc/attention/test_cpu_attention.py")
processors = load("worker_proc/sampling/test_processors.py")


def with_grammars(test: Callable[..., object]) -> None:
    """Run a test with grammar managers, and close those that it creates."""
    made: list[Any] = []

    def make(**settings: Any) -> Any:
        made.append(grammars.Case(**settings))
        return made[-1]

    try:
        test(make)
    finally:
        for case in made:
            case.close()


drafts_and_thinking = grammars.TestMasks().test_drafts_across_the_end_of_thinking
slow_matching = grammars.TestLimits().test_slow_matching_fails_the_request_and_refuses_its_grammar


def unwritten_slots() -> None:
    """Attention over blocks whose unwritten slots are NaN, which uninitialized 8-bit data can contain."""
    attention.test_equals_reference_attention("torch", "steady decode", (4, 2, 16), 4, torch.float32)


def batches_that_change() -> None:
    """Run the test of changing batches with some seeds."""
    for seed in range(4):
        processors.check_changing_batch([], seed)


def all_lengths(steady_decode: bool) -> None:
    for young in (1, 2, 3):
        for length in range(26, 30):
            bugs.test_bug_06_scheduled_and_preempted_in_the_same_step(length, young, steady_decode)


NOTICED = (AssertionError, WorkerFault, KeyError, ValueError)
"""Errors by which a mutation is detected: in the test, ``check()``, the scheduler, the pool or the worker model."""


class Guard(NamedTuple):
    """A guard against ``bug``: ``check`` passes normally, and fails while ``patch`` removes the guard."""

    bug: int
    patch: Callable[[], without.Patch]
    check: Callable[[], object]

    @property
    def name(self) -> str:
        return f"{self.bug}_without_{self.patch.__name__.strip('_')}"


GUARDS = (
    Guard(1, mutations.resumed_without_answer, bugs.test_bug_01_resumed_with_all_its_tokens),
    Guard(
        2,
        without.readmission_waits_for_the_result,
        partial(bugs.test_bug_02_not_admitted_before_its_result, 6, 4, 5),
    ),
    Guard(2, without.handles_stay_reserved_until_removed, bugs.test_bug_02_late_result_of_an_ended_request),
    Guard(3, without.samples_are_counted_at_the_last_token, partial(bugs.test_bug_03_chunked_prefills_side_by_side, 9)),
    Guard(4, without.rejected_drafts_are_subtracted, partial(bugs.test_bug_04_no_placeholder_reaches_the_model, 0.5)),
    Guard(5, mutations.removals_not_sent, partial(bugs.test_bug_05_blocks_freed_while_a_step_is_in_flight, "abort")),
    Guard(6, without.preempted_requests_lose_their_step_tokens, partial(all_lengths, False)),
    Guard(7, without.priority_claims_a_row, bugs.test_bug_07_higher_priority_does_not_wait_for_a_row),
    Guard(
        7,
        without.the_oldest_request_is_not_preempted,
        partial(bugs.test_bug_07_equals_do_not_preempt_each_other, "priority"),
    ),
    Guard(
        8,
        without.admission_needs_room_for_the_prompt,
        partial(bugs.test_bug_08_long_prefill_is_not_preempted_repeatedly, "fcfs", False),
    ),
    Guard(9, without.logprobs_follow_accepted_positions, drafts.test_logprobs_of_accepted_tokens_only),
    Guard(
        9,
        without.prompt_logprobs_skip_the_prefix_cache,
        partial(prompts.test_prompt_logprobs_disable_prefix_cache_hits, layout_of(full(4))),
    ),
    Guard(10, without.the_grammar_checks_each_draft, partial(with_grammars, drafts_and_thinking)),
    Guard(10, without.drafts_read_for_masks_are_undone, partial(with_grammars, drafts_and_thinking)),
    Guard(
        10,
        without.late_masks_hold_their_request,
        partial(
            with_grammars,
            masking.TestLateMasks().test_the_request_is_held_until_its_masks_are_there_and_continues_with_them,
        ),
    ),
    Guard(
        10,
        without.samples_of_held_requests_do_not_count,
        partial(holds.test_a_running_request_is_preempted_and_its_samples_in_flight_do_not_count, 1, True),
    ),
    Guard(
        10,
        without.outputs_move_when_their_helper_dies,
        partial(with_grammars, masking.TestDeaths().test_another_helper_continues_with_the_same_masks),
    ),
    Guard(
        10,
        without.masks_are_filled_between_tokens_read_again,
        partial(with_grammars, masking.test_many_tokens_are_read_as_one_by_one),
    ),
    Guard(10, without.matching_has_a_budget, partial(with_grammars, slow_matching)),
    Guard(
        10,
        without.a_private_helper_has_a_budget,
        partial(with_grammars, masking.TestMemory().test_growth_of_its_helper_fails_the_request),
    ),
    Guard(11, without.the_null_block_is_not_counted, bugs.test_bug_11_null_block_is_never_held),
    Guard(12, without.shared_blocks_are_reference_counted, bugs.test_bug_12_shared_window_blocks_are_freed_once),
    Guard(13, without.unwritten_slots_are_cleared, unwritten_slots),
    Guard(14, without.hashes_cover_earlier_blocks, prefixes.test_hashes_always_match_block_contents),
    Guard(
        16,
        without.bad_blocks_are_invalidated,
        partial(bugs.test_bug_16_bad_row_frees_everything_and_the_next_runs, None),
    ),
    Guard(19, mutations.never_reconsidered, bugs.test_bug_19_held_head_does_not_block_the_queue),
    Guard(20, without.removals_are_sent_once, bugs.test_bug_20_no_container_grows_from_step_to_step),
    Guard(21, without.hits_are_counted_at_admission, bugs.test_bug_21_hits_are_counted_at_admission),
    Guard(22, without.released_requests_wait_for_blocks, bugs.test_bug_22_released_but_no_blocks),
    Guard(23, without.processor_state_moves_with_the_row, batches_that_change),
    Guard(24, without.room_is_checked_before_blocks_are_taken, bugs.test_bug_24_failed_admission_holds_nothing),
    Guard(25, without.preempted_requests_lose_their_step_blocks, partial(all_lengths, True)),
)
NOT_HERE = {15, 17, 18}
"""Bugs of features that do not exist here: states of recurrent layers, remote loads of KV, an encoder cache."""


@pytest.mark.parametrize("guard", thinned(GUARDS, keep=8), ids=lambda guard: guard.name)
def test_guarded_test_fails_without_its_guard(guard: Guard) -> None:
    guard.check()
    with guard.patch(), pytest.raises(NOTICED):
        guard.check()


ROWS = thinned((pytest.param(row, marks=pytest.mark.full) if row.is_long else row for row in DEFENCES), keep=3)


@pytest.mark.parametrize("row", ROWS, ids=[f"without_{row.defence.__name__}" for row in DEFENCES])
def test_defended_test_fails_without_its_defence(row: Row, capfd: pytest.CaptureFixture[str]) -> None:
    """The test runs in a session of its own, which collects it with its fixtures."""
    options = ["-x", "-q", "-m", "", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:unraisableexception"]
    with row.defence(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the failed test may leave a socket open
        status = pytest.main([*options, str(TESTS / row.test)])
        gc.collect()
    assert status == pytest.ExitCode.TESTS_FAILED, capfd.readouterr().out


def test_every_finding_has_a_defence_and_a_row_in_the_table() -> None:
    rows = re.findall(
        r"^\| (\d+) \|.* \| ([^|]*) \| ([^|]*) \|$", (TESTS / "abuse/findings.md").read_text(), re.MULTILINE
    )
    assert [int(number) for number, _, _ in rows] == list(range(1, 26))
    guards = {guard.patch.__name__ for guard in GUARDS}
    for number, removed, tests in rows:
        expected = [row for row in DEFENCES if row.finding == int(number)]
        names = set(re.findall(r"`(\w+)`", removed))
        assert names == {row.defence.__name__ for row in expected} or (not expected and names and names <= guards), (
            number
        )
        assert {row.test.rpartition("::")[2] for row in expected} <= set(re.findall(r"`(\w+)`", tests)), number


def test_guards_are_patched_by_public_names() -> None:
    """A search for a renamed public symbol also finds its name in these strings."""
    for file in (
        "support/scheduler/without_guards.py",
        "support/abuse/without_defences.py",
        "simulation/mutations.py",
    ):
        assert not re.findall(r"patch(?:\.object)?\([^)\n]*?[\".]_[a-z]\w*\"", (TESTS / file).read_text()), file


def test_every_bug_has_a_guard_and_a_row_in_the_table() -> None:
    """Each bug has a guard here or is in NOT_HERE, and has a row in the table of tests/simulation/README.md."""
    assert {guard.bug for guard in GUARDS} == set(range(1, 26)) - NOT_HERE
    page = (TESTS / "simulation" / "README.md").read_text()
    numbers = [int(found) for found in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    assert sorted(set(numbers)) == list(range(1, 26)) and numbers == sorted(numbers)
    listed = set(re.findall(r"`(\w+)`", page))
    missing = {guard.patch.__name__ for guard in GUARDS} - listed
    assert not missing, f"not in the table: {missing}"
    assert not {m.name for m in mutations.MUTATIONS if f"| {m.name} |" not in page}


def test_each_test_in_the_tables_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (TESTS / "simulation" / "README.md").read_text()))
    written = {name for path in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert len(named) > 40 and not named - written
