"""Guards of the engine against bugs that recurred in other engines, each removed within a context.

``tests/test_guards.py`` and ``tests/simulation/mutations.py`` name the bug behind each guard and the test that fails
without it.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from quire.protocol import block_hash
from quire.scheduler_proc.core import arrivals, request_table, results, step
from quire.scheduler_proc.core.preemption import Preemption
from quire.scheduler_proc.kv import block_pool, manager
from quire.scheduler_proc.requests.reasons import PreemptReason
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.structured import constrained_output, helpers, limits, mask_maker, masking
from quire.worker_proc.attention import cpu_plan
from quire.worker_proc.execute import pending_result
from quire.worker_proc.sampling.builtin import base

Patch = contextlib.AbstractContextManager[Any]


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


def readmission_waits_for_the_result() -> Patch:
    """A preempted request is admitted again although its token is in flight."""
    return mock.patch.object(Request, "awaits_result", False)


def handles_stay_reserved_until_removed() -> Patch:
    """A handle is reused before the workers have removed it."""
    return mock.patch.object(request_table.RequestTable, "retire", lambda self, handle: self.handles.free(handle))


@contextlib.contextmanager
def samples_are_counted_at_the_last_token() -> Iterator[None]:
    """A chunk that ends before the last known token counts a sample that never arrives."""
    real = Request.sent

    def sent(self: Any, num_tokens: int, num_drafts: int) -> bool:
        samples = real(self, num_tokens, num_drafts)
        if num_tokens > 1 and not samples:
            self._num_output_placeholders += 1
        return samples

    with mock.patch.object(Request, "sent", sent):
        yield


def rejected_drafts_are_subtracted() -> Patch:
    """Drafts that were missing or wrong stay counted as computed."""
    return mock.patch.object(results.Results, "apply_draft_results", nothing)


def preempted_requests_lose_their_step_tokens() -> Patch:
    """A preempted request keeps the blocks that it was given in the same step."""
    return mock.patch.object(step.StepPlan, "withdraw", nothing)


@contextlib.contextmanager
def preempted_requests_lose_their_step_blocks() -> Iterator[None]:
    """A preempted request is still sent the block that it was given in the same step."""
    real = step.StepPlan.withdraw

    def withdraw(self: Any, request: Any) -> None:
        grown, blocks = self.grown, self.new_blocks
        self.grown, self.new_blocks = [], step.NewBlocks([], [], [])
        real(self, request)
        self.grown, self.new_blocks = grown, blocks

    with mock.patch.object(step.StepPlan, "withdraw", withdraw):
        yield


def priority_claims_a_row() -> Patch:
    """A request of higher priority waits until the lower one has finished."""
    return mock.patch.object(Preemption, "for_a_row", lambda self, plan, request: False)


def the_oldest_request_is_not_preempted() -> Patch:
    """When blocks run out, the request that was admitted first is preempted."""

    def victim(self: Any) -> Any:
        return next(iter(self._table.running.values())), PreemptReason.LEAST_LOSS

    return mock.patch.object(Preemption, "victim", victim)


def admission_needs_room_for_the_prompt() -> Patch:
    """A prompt is admitted as soon as its first chunk fits, even right after its preemption."""
    return mock.patch.object(manager.KVCacheManager, "can_fit_full_sequence", lambda *args, **kwargs: True)


@contextlib.contextmanager
def logprobs_follow_accepted_positions() -> Iterator[None]:
    """Log probabilities are assigned to tokens in the order of positions, including rejected ones."""
    real = pending_result.SampledResult.sent_logprobs

    def fields(self: Any, kept: Any, arrays: Any) -> Any:
        return real(self, np.arange(len(self.sampled.tokens)), arrays)

    with mock.patch.object(pending_result.SampledResult, "sent_logprobs", fields):
        yield


@contextlib.contextmanager
def prompt_logprobs_skip_the_prefix_cache() -> Iterator[None]:
    """A request that wants log probabilities of its prompt gets prefix cache hits as well."""
    real = manager.KVCacheManager.get_computed_blocks

    def computed(self: Any, request: Any) -> Any:
        skips, request.skip_reading_prefix_cache = request.skip_reading_prefix_cache, False
        found = real(self, request)
        request.skip_reading_prefix_cache = skips
        return found

    with mock.patch.object(manager.KVCacheManager, "get_computed_blocks", computed):
        yield


@contextlib.contextmanager
def the_grammar_checks_each_draft() -> Iterator[None]:
    """The grammar is checked once per step, before the drafts."""
    real = mask_maker.MaskMaker.fill_masks

    def fill(self: Any, found: Any) -> None:
        free = [positions for positions in found if positions.reader.is_unconstrained]
        real(self, found)
        for positions in free:
            self._masks[positions.places] = self._thinking_mask

    with mock.patch.object(mask_maker.MaskMaker, "fill_masks", fill):
        yield


@contextlib.contextmanager
def late_masks_hold_their_request() -> Iterator[None]:
    """A step waits for its masks, however late they are."""
    names = ("PATIENCE_SECONDS", "PRIVATE_PATIENCE_SECONDS")
    patches = [mock.patch.multiple(module, **dict.fromkeys(names, 1e9)) for module in (limits, masking)]
    with patches[0], patches[1]:
        yield


@contextlib.contextmanager
def samples_of_held_requests_do_not_count() -> Iterator[None]:
    """What the steps in flight sample for a request that is held then is taken as its tokens."""
    real = arrivals.Arrivals.hold_or_release

    def hold(self: Any, event: Any, request: Any) -> None:
        before = request.ignore_results_until
        real(self, event, request)
        request.ignore_results_until = before

    with mock.patch.object(arrivals.Arrivals, "hold_or_release", hold):
        yield


def outputs_move_when_their_helper_dies() -> Patch:
    """The death of a mask helper is not noticed."""
    return mock.patch.object(helpers.MaskHelpers, "take_dead", lambda self, now: [])


def masks_are_filled_between_tokens_read_again() -> Patch:
    """A mask helper that replaces another reads the tokens of an output in one go."""
    return mock.patch.object(
        mask_maker.MaskMaker, "read_again", lambda self, output, tokens, place: output.read(tokens)
    )


def matching_has_a_budget() -> Patch:
    """An output may take any amount of CPU time."""
    return mock.patch.object(masking, "exceeds_limit", lambda seconds, *_: seconds > 2.0)


def a_private_helper_has_a_budget() -> Patch:
    """A private helper may take any amount of memory."""
    return mock.patch.object(helpers, "MAX_PRIVATE_BYTES", 2**60)


def drafts_read_for_masks_are_undone() -> Patch:
    """Drafts that were read for their masks stay read."""
    return mock.patch.object(constrained_output.GrammarReader, "undo", nothing)


@contextlib.contextmanager
def the_null_block_is_not_counted() -> Iterator[None]:
    """The null block is reference-counted as any other."""
    real = block_pool.BlockPool.touch

    def touch(self: Any, blocks: Any) -> None:
        blocks = list(blocks)
        real(self, blocks)
        self.null_block.ref_cnt += sum(block.is_null for block in blocks)

    with mock.patch.object(block_pool.BlockPool, "touch", touch):
        yield


@contextlib.contextmanager
def shared_blocks_are_reference_counted() -> Iterator[None]:
    """The first request that releases a shared block frees it for all."""
    real = block_pool.BlockPool.free_blocks

    def free_blocks(self: Any, blocks: Any) -> None:
        blocks = list(blocks)
        for block in blocks:
            block.ref_cnt = min(block.ref_cnt, 1)
        real(self, blocks)

    with mock.patch.object(block_pool.BlockPool, "free_blocks", free_blocks):
        yield


@contextlib.contextmanager
def unwritten_slots_are_cleared() -> Iterator[None]:
    """Content of an earlier owner after a row's last token is read, with a weight of zero."""
    real = cpu_plan.decode_tile

    def tile(*args: Any) -> Any:
        made = real(*args)
        return dataclasses.replace(made, tail=made.tail[:0])

    with mock.patch.object(cpu_plan, "decode_tile", tile):
        yield


def hashes_cover_earlier_blocks() -> Patch:
    """The hash of a block covers its own tokens alone."""

    def append_blocks(self: Any, raw: bytes, size: int) -> None:
        for at in range(0, len(raw) - size + 1, size):
            state = self._hasher._new()
            state.update(raw[at : at + size])
            self.hashes.append(state.digest())

    def extend(self: Any, data: Any, added: bytes = b"") -> None:
        append_blocks(self, bytes(data)[len(self.hashes) * self._size :], self._size)

    return mock.patch.multiple(block_hash.HashChain, _append_blocks=append_blocks, extend=extend)


def bad_blocks_are_invalidated() -> Patch:
    """Blocks written on the way to logits that are not finite are found again."""
    return mock.patch.object(manager.KVCacheManager, "invalidate", nothing)


def removals_are_sent_once() -> Patch:
    """Data that was already sent to the workers is sent once more."""
    return mock.patch.object(request_table.RequestTable, "take_removed", lambda self: self.ended_handles[0])


@contextlib.contextmanager
def hits_are_counted_at_admission() -> Iterator[None]:
    """Prefix cache hits of an attempt are reported to the client even if the attempt failed."""
    real = manager.KVCacheManager.get_computed_blocks

    def computed(self: Any, request: Any) -> Any:
        hits, num_tokens = real(self, request)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_tokens
        return hits, num_tokens

    with mock.patch.object(manager.KVCacheManager, "get_computed_blocks", computed):
        yield


@contextlib.contextmanager
def released_requests_wait_for_blocks() -> Iterator[None]:
    """A held request runs as soon as it is released, even without free blocks."""
    real = request_table.RequestTable.release

    def release(self: Any, request: Any) -> None:
        real(self, request)
        self.admit(request)

    with mock.patch.object(request_table.RequestTable, "release", release):
        yield


@contextlib.contextmanager
def processor_state_moves_with_the_row() -> Iterator[None]:
    """The state of a row's processors does not move when the row moves."""
    real = base.apply_update

    def apply_update(states: Any, update: Any, make: Any) -> Any:
        return real(states, None if update is None else dataclasses.replace(update, moved=[]), make)

    with mock.patch.object(base, "apply_update", apply_update):
        yield


@contextlib.contextmanager
def room_is_checked_before_blocks_are_taken() -> Iterator[None]:
    """Cached blocks are taken before it is known whether the other tokens fit."""
    real = manager.KVCacheManager.allocate_slots

    def allocate(self: Any, request: Any, num_tokens: int, computed: Any = None, *args: Any, **own: Any) -> Any:
        new = real(self, request, num_tokens, computed, *args, **own)
        if new is None and computed is not None:
            for blocks in computed:
                self.pool.touch(blocks)
        return new

    with mock.patch.object(manager.KVCacheManager, "allocate_slots", allocate):
        yield
