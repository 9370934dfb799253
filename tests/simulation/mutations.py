"""Guards of the engine, removed one at a time: each removal must make the simulation fail.

A mutation patches one part of the engine while it is entered. ``bug`` is the number of the recurring bug of other
engines that the guard prevents (1 to 25), or the fault (F) or invariant (I) that it is for.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import msgspec

from quire.frontend.engine import session, streams
from quire.launch.supervision import supervision_policy
from quire.protocol import block_hash
from quire.protocol.wire import channel, codec
from quire.scheduler_proc import scheduler
from quire.scheduler_proc.core import in_flight, planner, results, step
from quire.scheduler_proc.features import suspects, transfers
from quire.scheduler_proc.features.adapters import adapter_state, slots, turns
from quire.scheduler_proc.features.items import encoder_cache, items
from quire.scheduler_proc.kv import block_pool, forks, manager
from quire.scheduler_proc.process import front_ends, worker_group
from quire.scheduler_proc.process import loop as scheduler_loop
from quire.scheduler_proc.requests import request_table
from quire.scheduler_proc.requests.request import Request, RequestStatus


class Mutation(NamedTuple):
    """``patch`` removes the guard while it is entered; ``seed``: a seed that fails with it, as scenarios are drawn
    today.
    """

    name: str
    bug: str
    patch: Callable[[], contextlib.AbstractContextManager[Any]]
    seed: int = 0


def _link_without(check: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a patch for a link that does not check ``epoch``, or ``seq``."""

    def incoming(self: Any, frames: Any) -> Any:
        envelope = self._codec.decode(frames)
        if check != "epoch" and envelope.worker_epoch != self.worker_epoch:
            raise codec.ProtocolError("epoch", "another epoch")
        if check != "seq" and envelope.seq != self._accepted + 1:
            raise codec.ProtocolError("gap", "a gap")
        self._accepted = envelope.seq
        return channel.Received(envelope.message, list(frames))

    return lambda: mock.patch.object(channel.Link, "incoming", incoming)


@contextlib.contextmanager
def _no_crc() -> Iterator[None]:
    real = codec.Codec.decode

    def decode(self: Any, frames: Any) -> Any:
        first = bytes(frames[0])
        crc = codec.crc32(first[4:])
        for frame in frames[1:]:
            crc = codec.crc32(frame, crc)
        return real(self, [crc.to_bytes(4, "little") + first[4:], *frames[1:]])

    with mock.patch.object(codec.Codec, "decode", decode):
        yield


def _ignore_disagreement(self: Any) -> Any:
    if not self._held:
        return None
    digests = self._digests.get(self._held[0].message.step, {})
    return (0, self._held.popleft()) if len(digests) == self.size else None


def _from_the_start(self: Any, link_number: int) -> Any:
    return msgspec.structs.replace(self.request, resubmitted=self.link_number > 0)


def _never_again(self: Any, link_number: int) -> Any:
    if not self.tokens:
        return self.request
    return msgspec.structs.replace(self.request, output_token_ids=streams.np.array(self.tokens, streams.np.int32))


@contextlib.contextmanager
def _cache_survives() -> Iterator[None]:
    """Keep the prefix cache when a new worker epoch begins."""
    real = scheduler.Scheduler.begin_worker_epoch

    def begin_worker_epoch(self: Any, *, new_workers: bool = False) -> None:
        with mock.patch.object(manager.KVCacheManager, "drop_device_contents", lambda self: None):
            real(self, new_workers=new_workers)

    with mock.patch.object(scheduler.Scheduler, "begin_worker_epoch", begin_worker_epoch):
        yield


@contextlib.contextmanager
def _rows_survive() -> Iterator[None]:
    """Send new workers the removal of rows that they never held."""
    real = scheduler.Scheduler.begin_worker_epoch
    with mock.patch.object(scheduler.Scheduler, "begin_worker_epoch", lambda self, **_: real(self)):
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


@contextlib.contextmanager
def _bad_results_pass() -> Iterator[None]:
    """Apply results without checking handles, counts and step."""
    with (
        mock.patch("quire.scheduler_proc.core.in_flight.check_handles", _nothing),
        mock.patch("quire.scheduler_proc.messages.results.check_counts", _nothing),
        mock.patch.object(in_flight.StepsInFlight, "expected_step", lambda self, step: self.records[0]),
    ):
        yield


@contextlib.contextmanager
def _resumed_without_answer() -> Iterator[None]:
    """A preempted request loses the output tokens that it already has."""
    real = request_table.RequestTable.preempt

    def preempt(self: Any, request: Any) -> None:
        real(self, request)
        request.tokens = type(request.tokens)(request.tokens.array()[: request.num_prompt_tokens].copy(), None)

    with mock.patch.object(request_table.RequestTable, "preempt", preempt):
        yield


@contextlib.contextmanager
def _double_free() -> Iterator[None]:
    real = block_pool.BlockPool.free_blocks

    def free_blocks(self: Any, blocks: Any) -> Any:
        blocks = list(blocks)
        return real(self, [*blocks, *blocks[:1]])

    with mock.patch.object(block_pool.BlockPool, "free_blocks", free_blocks):
        yield


@contextlib.contextmanager
def _leak_on_end() -> Iterator[None]:
    """Blocks of some aborted requests are not freed."""
    real = manager.KVCacheManager.free

    def free(self: Any, request: Any) -> None:
        if request.status is not RequestStatus.RUNNING or request.num_output_tokens % 5 != 3:
            real(self, request)

    with mock.patch.object(manager.KVCacheManager, "free", free):
        yield


@contextlib.contextmanager
def _cached_before_written() -> Iterator[None]:
    """Contents can be found in the cache before any step writes them."""
    real = manager.KVCacheManager.cache_blocks

    def cache_blocks(self: Any, request: Any, num_tokens: int) -> None:
        held = [len(m.req_to_blocks.get(request.handle, ())) * m.block_size for m in self.coordinator.managers]
        real(self, request, max(num_tokens, min(num_tokens + 2 * self.block_size, request.num_tokens, *held)))

    with mock.patch.object(manager.KVCacheManager, "cache_blocks", cache_blocks):
        yield


@contextlib.contextmanager
def _never_reconsidered() -> Iterator[None]:
    """A request that could not be admitted once is never considered again."""
    real = planner.Planner.admission_obstacle
    refused: dict[int, Any] = {}

    def admission_obstacle(self: Any, plan: Any, request: Any) -> Any:
        reason = refused.get(id(request)) or real(self, plan, request)
        if reason is not None:
            refused[id(request)] = reason
        return reason

    with mock.patch.object(planner.Planner, "admission_obstacle", admission_obstacle):
        yield


@contextlib.contextmanager
def _copies_at_once() -> Iterator[None]:
    """Copies are sent with the step that writes their source."""
    real = forks.BlockForks.take

    def take(self: Any) -> Any:
        for copies in self._copies.values():
            for copy in copies:
                copy.is_written = True
        return real(self)

    with mock.patch.object(forks.BlockForks, "take", take):
        yield


def _removals_not_sent() -> contextlib.AbstractContextManager[Any]:
    """Ended requests stay on the workers."""
    return mock.patch.object(request_table.RequestTable, "take_removed", lambda self: [])


def _any_slot(self: Any, held: Any, *of_wanted: bool) -> bool:
    """Return whether an adapter can lose its slot: whether it is used does not matter."""
    return not held.is_loading


def _hits_of_any_adapter() -> contextlib.AbstractContextManager[Any]:
    real = block_hash.BlockHasher.chain
    return mock.patch.object(
        block_hash.BlockHasher, "chain", lambda self, salt="", adapter="", *rest, **names: real(self, salt, **names)
    )


def _hits_of_any_image() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(items.Items, "hashing", lambda self, event, chain: chain)


@contextlib.contextmanager
def _failed_pages_are_used() -> Iterator[None]:
    """Pages that a load refused count as loaded."""
    real = transfers.Transfers.moved

    def moved(self: Any, answer: Any, *client: int) -> None:
        real(self, msgspec.structs.replace(answer, failed=[]), *client)

    with mock.patch.object(transfers.Transfers, "moved", moved):
        yield


@contextlib.contextmanager
def _no_turns() -> Iterator[None]:
    real = turns.AdapterTurns.__init__

    def __init__(self: Any, max_active: int, clock: Any) -> None:
        real(self, 100, clock)

    with mock.patch.object(turns.AdapterTurns, "__init__", __init__):
        yield


@contextlib.contextmanager
def _samples_are_counted_at_the_last_token() -> Iterator[None]:
    """A chunk that ends before the last known token counts a sample that never arrives."""
    real = Request.sent

    def sent(self: Any, num_tokens: int, num_drafts: int) -> bool:
        samples = real(self, num_tokens, num_drafts)
        if num_tokens > 1 and not samples:
            self._num_output_placeholders += 1
        return samples

    with mock.patch.object(Request, "sent", sent):
        yield


def _rejected_drafts_are_subtracted() -> contextlib.AbstractContextManager[Any]:
    """Drafts that were missing or wrong stay counted as computed."""
    return mock.patch.object(results.Results, "apply_draft_results", _nothing)


def _preempted_requests_lose_their_step_tokens() -> contextlib.AbstractContextManager[Any]:
    """A preempted request keeps the blocks that it was given in the same step."""
    return mock.patch.object(step.StepPlan, "withdraw", _nothing)


@contextlib.contextmanager
def _prompt_logprobs_skip_the_prefix_cache() -> Iterator[None]:
    """A request that wants log probabilities of its prompt gets prefix cache hits as well."""
    real = manager.KVCacheManager.get_computed_blocks

    def computed(self: Any, request: Any) -> Any:
        skips, request.skip_reading_prefix_cache = request.skip_reading_prefix_cache, False
        found = real(self, request)
        request.skip_reading_prefix_cache = skips
        return found

    with mock.patch.object(manager.KVCacheManager, "get_computed_blocks", computed):
        yield


def _hashes_cover_earlier_blocks() -> contextlib.AbstractContextManager[Any]:
    """The hash of a block covers its own tokens alone."""

    def append_blocks(self: Any, raw: bytes, size: int) -> None:
        for at in range(0, len(raw) - size + 1, size):
            state = self._hasher._new()
            state.update(raw[at : at + size])
            self.hashes.append(state.digest())

    def extend(self: Any, data: Any, added: bytes = b"") -> None:
        append_blocks(self, bytes(data)[len(self.hashes) * self._size :], self._size)

    return mock.patch.multiple(block_hash.HashChain, _append_blocks=append_blocks, extend=extend)


def _removals_are_sent_once() -> contextlib.AbstractContextManager[Any]:
    """Data that was already sent to the workers is sent once more."""
    return mock.patch.object(request_table.RequestTable, "take_removed", lambda self: self.ended_handles[0])


MUTATIONS = (
    Mutation("a link accepts messages of any epoch", "I10, F16", _link_without("epoch"), seed=2),
    Mutation("a link accepts messages out of order, twice, or with a gap", "F15", _link_without("seq"), seed=3),
    Mutation("checksums are not verified", "F15", _no_crc, seed=20),
    Mutation(
        "ranks need not agree",
        "F9",
        lambda: mock.patch.object(worker_group.WorkerGroup, "agreed", _ignore_disagreement),
        seed=48,
    ),
    Mutation(
        "a new scheduler does not get the delivered tokens",
        "F10, I7",
        lambda: mock.patch.object(streams.Stream, "submission", _from_the_start),
    ),
    Mutation(
        "a full queue rejects resubmitted requests",
        "F10, I9",
        lambda: mock.patch.object(streams.Stream, "submission", _never_again),
        seed=2,
    ),
    Mutation("cached contents survive a restart of the workers", "F1, I5", _cache_survives),
    Mutation("new workers get removals of the old workers' rows", "F1, I6", _rows_survive),
    Mutation(
        "results from before the epoch are applied",
        "2, F16",
        lambda: mock.patch.object(results.Results, "is_stale", lambda self, step: False),
        seed=19,
    ),
    Mutation("results are not checked", "A51, F9", _bad_results_pass),
    Mutation(
        "no request is suspected",
        "F4",
        lambda: mock.patch.object(suspects.Suspects, "before_epoch", _nothing),
        seed=116,
    ),
    Mutation(
        "a suspect is not run alone",
        "F4",
        lambda: mock.patch.object(planner.Planner, "schedule_alone", lambda self, plan, pause, suspect: None),
    ),
    Mutation(
        "no request counts as the cause of scheduler deaths",
        "F30",
        lambda: mock.patch.object(session.Session, "count_scheduler_death", _nothing),
        seed=17,
    ),
    Mutation(
        "a request ends at the second death of the scheduler",
        "F30",
        lambda: mock.patch.object(session, "MAX_SCHEDULER_DEATHS", 2),
        seed=17,
    ),
    Mutation(
        "the engine gives up at the second death",
        "F3",
        lambda: mock.patch.object(supervision_policy, "MAX_DEATHS", 2),
    ),
    Mutation(
        "no step deadline",
        "F5",
        lambda: mock.patch.object(scheduler_loop.StepDeadline, "remaining", _nothing),
        seed=1,
    ),
    Mutation(
        "silent processes count as alive",
        "F5",
        lambda: mock.patch.multiple(supervision_policy, SILENT_S=1e9, START_S=1e9, ADOPTION_S=1e9),
        seed=319,
    ),
    Mutation("front ends send no heartbeats", "F15, I9", lambda: mock.patch.object(session.Session, "beat", _nothing)),
    Mutation(
        "requests of a dead front end continue",
        "F12, I13",
        lambda: mock.patch.multiple(front_ends.FrontEnds, on_process_exit=_nothing, _disconnected=_nothing),
        seed=51,
    ),
    Mutation(
        "workers do not join their new scheduler",
        "F10",
        lambda: mock.patch.object(supervision_policy.SupervisionPolicy, "rejoin_group", _nothing),
        seed=3,
    ),
    Mutation(
        "removals are not sent to the workers",
        "5, I4",
        _removals_not_sent,
    ),
    Mutation("contents are cached before they are written", "I5", _cached_before_written, seed=6),
    Mutation("a request that could not be admitted once never is", "19, I9", _never_reconsidered),
    Mutation("a preempted request loses its output tokens", "1", _resumed_without_answer),
    Mutation("a block is freed twice", "12, 24, I1", _double_free),
    Mutation("blocks of some requests are not freed", "I13", _leak_on_end),
    Mutation("a prefill chunk counts a sample that it does not have", "3", _samples_are_counted_at_the_last_token),
    Mutation("rejected drafts stay counted", "4", _rejected_drafts_are_subtracted),
    Mutation("a preempted request keeps its scheduled tokens", "6", _preempted_requests_lose_their_step_tokens, seed=6),
    Mutation(
        "requests with prompt logprobs get prefix cache hits",
        "9",
        _prompt_logprobs_skip_the_prefix_cache,
    ),
    Mutation("a block hash covers only the block's own tokens", "14, I5", _hashes_cover_earlier_blocks),
    Mutation("removals are sent repeatedly", "20", _removals_are_sent_once),
    Mutation("a copy is sent before its source is written", "I5", _copies_at_once, seed=2),
    Mutation("pages that a load refused are used", "I5", _failed_pages_are_used, seed=56),
    Mutation(
        "sources of copies between tiers are not held",
        "I2, I3",
        lambda: mock.patch.multiple(block_pool.BlockPool, begin_copy=_nothing, end_copy=_nothing),
        seed=2,
    ),
    Mutation("blocks of one adapter are hits for another one", "I5", _hits_of_any_adapter, seed=23),
    Mutation(
        "a slot is given to another adapter while it is used",
        "I5",
        lambda: mock.patch.object(slots.AdapterSlots, "can_give_up", _any_slot),
        seed=7,
    ),
    Mutation(
        "requests run before their adapter is loaded",
        "I5",
        lambda: mock.patch.object(adapter_state.AdapterState, "is_ready", property(lambda self: self.slot >= 0)),
        seed=5,
    ),
    Mutation("a step may use any number of adapters", "I11", _no_turns, seed=7),
    Mutation(
        "new workers are expected to have the adapters of the old ones",
        "F1, I6",
        lambda: mock.patch.object(slots.AdapterSlots, "drop_all", lambda self: None),
        seed=5,
    ),
    Mutation("blocks of one image are hits for another one", "I5", _hits_of_any_image, seed=10),
    Mutation(
        "positions of an image are computed before its rows are there",
        "I5",
        lambda: mock.patch.object(
            encoder_cache.EncoderCache, "ready", lambda self, item: item.key in self.rows or None
        ),
        seed=12,
    ),
    Mutation(
        "rows of images are dropped while a step uses them",
        "I5",
        lambda: mock.patch.object(encoder_cache.EncoderCache, "may_drop", lambda self, rows: rows.is_ready),
        seed=12,
    ),
    Mutation(
        "new workers are expected to have the rows of the old ones",
        "F1",
        lambda: mock.patch.object(encoder_cache.EncoderCache, "drop_all", lambda self: None),
        seed=106,
    ),
)
