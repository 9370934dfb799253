"""Request table: the state of each request (waiting, held, running, leaving), and all transitions."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Protocol

from quire.protocol.config import EngineConfig
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.requests.handles import HandlePool
from quire.scheduler_proc.requests.reasons import WaitReason
from quire.scheduler_proc.requests.request import Request, RequestStatus
from quire.scheduler_proc.requests.request_queue import OUTPUT_WEIGHT, RequestQueue
from quire.scheduler_proc.requests.steady_decode import SteadyDecode
from quire.scheduler_proc.requests.stop_table import StopTable

_by_order = attrgetter("order")


class TableFeature(Protocol):
    """The view of a feature that the table calls, as of ``Feature``."""

    def added(self, request: Request) -> None: ...
    def started(self, request: Request) -> None: ...
    def stopped(self, request: Request) -> None: ...
    def pause_reason(self, request: Request) -> WaitReason | None: ...


class TableCalls:
    """The features that have each of these hooks."""

    added: Sequence[TableFeature] = ()
    started: Sequence[TableFeature] = ()
    stopped: Sequence[TableFeature] = ()
    pause_reason: Sequence[TableFeature] = ()


class RequestTable:
    """Owns the requests, their handles, and the lists of requests by state. Does not know blocks or clients.

    Invariants (``check``): a live request is in exactly one of ``waiting``, ``skipped_waiting``, ``running`` and
    ``leaving``; a running request is either in steady decode or in ``unsteady``; a handle is free only when no message
    can refer to it.

    Attributes:
        skipped_waiting: by handle, held requests: they wait for an event, and no other request waits behind them.
        running: by handle, in order of admission.
        unsteady: running requests outside of steady decode.
        leaving: requests whose last token is in flight: removed from the workers, but not yet ended.
        last_number: number of the newest request.
    """

    def __init__(
        self,
        policy: str,
        steady_decode: SteadyDecode,
        vocab_size: int,
        calls: TableCalls,
        left_steady: Callable[[Request], None],
    ) -> None:
        """``left_steady``: called with a request that has left steady decode."""
        self.requests: dict[tuple[int, str], Request] = {}
        self.waiting = RequestQueue(policy)
        self.skipped_waiting: dict[int, Request] = {}
        self.running: dict[int, Request] = {}
        self.unsteady: dict[int, Request] = {}
        self.leaving: dict[int, Request] = {}
        self.steady_decode = steady_decode
        self._calls, self._left_steady = calls, left_steady
        self.stops = StopTable(vocab_size)
        self.handles = HandlePool()
        self._removed: list[int] = []
        self._retired: list[int] = []
        self._num_retired_in_flight = 0
        self.last_number = self._num_admitted = 0

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.skipped_waiting)

    def add(self, request: Request, number: int = 0) -> None:
        """Queue a new request, and set its handle and number. ``number``: another request's; 0 for the next."""
        request.handle = self.handles.allocate()
        self.last_number += not number
        request.number = number or self.last_number
        self.requests[request.client, request.request_id] = request
        self.waiting.add_request(request)
        self.stops.add(request.stop_tokens)
        for feature in self._calls.added:
            feature.added(request)

    def hold(self, request: Request, reason: WaitReason) -> None:
        """Hold a waiting request. Raises KeyError unless it is in the queue."""
        self.waiting.remove_request(request)
        request.wait_reason = reason
        self.skipped_waiting[request.handle] = request

    def release(self, request: Request) -> None:
        """Return a held request to its place in the queue. Raises KeyError unless it is held."""
        del self.skipped_waiting[request.handle]
        request.wait_reason = WaitReason.QUEUED
        self.waiting.add_request(request)

    def start(self, request: Request) -> None:
        """Move a waiting request to ``running``."""
        self.waiting.take_request(request)
        # A number of its own, because the order of a dictionary is lost when a request leaves steady decode and returns
        # to ``unsteady``.
        request.order = self._num_admitted = self._num_admitted + 1
        request.status = RequestStatus.RUNNING
        self.running[request.handle] = self.unsteady[request.handle] = request
        for feature in self._calls.started:
            feature.started(request)

    def join_steady(self, request: Request, until: int, room: int) -> None:
        """Move a running request to steady decode, for the steps after the newest one and before ``until``.

        ``room``: see ``SteadyDecode.join``.
        """
        del self.unsteady[request.handle]
        self.steady_decode.join(request, until, room)

    def leave_steady(self, request: Request) -> None:
        """Take a request out of steady decode, and give it rows of its own in the steps in flight."""
        if request.is_steady:
            self.steady_decode.leave(request)
            self.unsteady[request.handle] = request
            self._left_steady(request)

    def move_to_leaving(self) -> None:
        """Move the running requests that need no more steps to ``leaving``; only their last results are missing.

        Length limits are known a step ahead (protocol law 4).
        """
        if not self.unsteady:
            return
        # A part of another request may still continue.
        found = [r for r in self.unsteady.values() if r.part_of is None and r.needs_no_more_steps]
        for request in sorted(found, key=_by_order):
            self._leave_running(request)
            self.leaving[request.handle] = request

    def pause_reason(self, request: Request) -> WaitReason | None:
        """Return why steps may not compute a running request, or None if they may."""
        return next(filter(None, (feature.pause_reason(request) for feature in self._calls.pause_reason)), None)

    def computed(self) -> list[Request]:
        """Return the running requests outside of steady decode which steps may compute."""
        requests = list(self.unsteady.values())
        return [each for each in requests if not self.pause_reason(each)] if self._calls.pause_reason else requests

    def to_compute(self) -> tuple[list[Request], list[Request]]:
        """Return the prefills and the decodes that the next step may compute outside of steady decode, each in order of
        admission. A request that the workers do not have yet is a prefill."""
        if not self.unsteady:
            return [], []
        running = sorted(self.computed(), key=_by_order)
        prefills = [r for r in running if r.num_tokens_to_compute > 1 or not r.on_worker]
        return prefills, [r for r in running if r.num_tokens_to_compute <= 1 and r.on_worker]

    def preempt(self, request: Request) -> None:
        """Return a running or leaving request to the queue and reset its progress."""
        if request.handle in self.leaving:
            del self.leaving[request.handle]
        else:
            self._leave_running(request)
        request.status = RequestStatus.PREEMPTED
        request.restart()
        request.num_preemptions += 1
        request.wait_reason = WaitReason.QUEUED
        self.waiting.add_request(request)

    def end(self, request: Request, status: RequestStatus) -> None:
        """Remove a request. Its handle stays allocated until the workers have released it."""
        if request.handle in self.leaving:
            del self.leaving[request.handle]
        elif request.handle in self.running:
            self._leave_running(request)
        elif request.handle in self.skipped_waiting:
            del self.skipped_waiting[request.handle]
        else:
            self.waiting.remove_request(request)
        request.status = status
        # Not free yet: a diff in flight may name the handle, and a new request with it would get the old one's tokens.
        self.retire(request.handle)
        self.stops.remove(request.stop_tokens)
        del self.requests[request.client, request.request_id]
        self.waiting.charge_for(request, OUTPUT_WEIGHT * request.num_output_tokens)
        if not self.requests:
            self.waiting.forget_service()

    def retire(self, handle: int) -> None:
        """Mark the handle of an ended request, which the workers may still hold, for release."""
        self._retired.append(handle)

    def take_removed(self) -> list[int]:
        """Return and clear the handles that the next diff removes from the workers."""
        removed, self._removed = self._removed, []
        return removed

    def take_retired(self) -> list[int]:
        """Return and clear the handles of ended requests; ``release_handles`` them when the next diff is answered."""
        retired, self._retired = self._retired, []
        self._num_retired_in_flight += len(retired)
        return retired

    def release_handles(self, handles: list[int]) -> None:
        self._num_retired_in_flight -= len(handles)
        for handle in handles:
            self.handles.free(handle)

    def retire_later(self, handles: list[int]) -> None:
        """Retire ``handles`` with the next diff, because the diff that retired them will not be answered."""
        self._num_retired_in_flight -= len(handles)
        self._retired += handles

    @property
    def ended_handles(self) -> tuple[list[int], list[int]]:
        """Handles that the next diff removes, and those that it retires: the remains of ended requests."""
        return self._removed.copy(), self._retired.copy()

    def _leave_running(self, request: Request) -> None:
        self.leave_steady(request)
        del self.unsteady[request.handle], self.running[request.handle]
        for feature in self._calls.stopped:
            feature.stopped(request)
        if request.on_worker:
            self._removed.append(request.handle)
            request.on_worker = request.parked = False

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold. O(requests)."""
        self.waiting.check()
        self.steady_decode.check()
        self.stops.check(r.stop_tokens for r in self.requests.values())
        for request in self.requests.values():
            handle = request.handle
            places = (
                self.running.get(handle) is request,
                request in self.waiting,
                self.skipped_waiting.get(handle) is request,
                self.leaving.get(handle) is request,
            )
            assert sum(places) == 1, f"{request!r} is in {sum(places)} lists"
            assert (request.status is RequestStatus.RUNNING) == (places[0] or places[3]), f"{request!r}: wrong list"
            if places[0]:
                assert (handle in self.unsteady) != (handle in self.steady_decode.batch), f"{request!r}: steady state"
                assert (handle in self.steady_decode.batch) == request.is_steady
        assert len(self.requests) == len(self.running) + self.num_waiting + len(self.leaving)
        assert len(self.running) == len(self.unsteady) + len(self.steady_decode)
        orders = [r.order for r in self.running.values()]
        assert orders == sorted(orders), "running requests are not in order of admission"
        retired = len(self._retired) + self._num_retired_in_flight
        assert self.handles.num_taken == len(self.requests) + retired, "a handle leaked"


def check_requests(
    table: RequestTable, kv: KVCacheManager, config: EngineConfig, steps: Iterable[dict[int, Request]]
) -> None:
    """Raise AssertionError unless counters are within limits, and exactly the running requests hold blocks."""
    requests = table.requests.values()
    for request in requests:
        running = request.status is RequestStatus.RUNNING
        most = request.num_in_flight * (1 + config.num_speculative_tokens)
        assert 0 <= request.num_output_placeholders <= most, f"{request!r}: more placeholders than steps in flight"
        assert request.num_in_flight <= config.pipeline_depth, f"{request!r}: too many steps in flight"
        assert 0 <= request.num_acknowledged_tokens <= request.num_computed_tokens, f"{request!r}: not computed"
        for manager in kv.coordinator.managers[:1]:
            held = manager.req_to_blocks.get(request.handle)
            assert bool(held) == running, f"{request!r}: holds blocks although not running, or the reverse"
    assert len(table.running) <= config.max_num_seqs
    live = {r.handle for r in requests}
    for manager in kv.coordinator.managers:
        assert manager.req_to_blocks.keys() <= live, "blocks are held by requests that have ended"
    named = {request.handle: request for request in requests}
    for step in steps:
        for handle, request in step.items():
            assert named.get(handle, request) is request, f"handle {handle} refers to two requests"
