"""Adapters: loads the adapters of requests into slots, and decides of which adapters a step computes requests."""

from collections import Counter
from collections.abc import Callable, Iterable, Sized
from typing import Protocol

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.wire.adapter_messages import AdapterLoaded, AdapterRef, LoadAdapter
from quire.protocol.wire.front_end_messages import AdapterCounts, Statistics
from quire.scheduler_proc.adapters.slots import ADAPTER_SLICE, HELD_PATIENCE, AdapterSlots
from quire.scheduler_proc.adapters.turns import Turns
from quire.scheduler_proc.requests.reasons import Decision, WaitReason
from quire.scheduler_proc.requests.request import Adapter, Request
from quire.scheduler_proc.requests.step_clock import StepClock

PLACES = ("active", "ready", "loading", "host", "absent")
"""Values of ``AdapterState.place``."""
MAX_LISTED = 32
"""Most adapters in a Statistics message: those with the most requests."""


class Table(Protocol):
    """What this package does with the lists of requests."""

    @property
    def running(self) -> Sized: ...
    @property
    def waiting(self) -> Sized: ...
    def hold(self, request: Request, reason: WaitReason) -> None: ...
    def release(self, request: Request) -> None: ...
    def leave_steady(self, request: Request) -> None: ...


class Adapters:
    """Decides loads of adapters and follows them, and gives adapters their turns. Idle if no request has an adapter.

    A request whose adapter is not loaded is held (WaitReason.ADAPTER) when it could be admitted otherwise. Loads do not
    wait for that: an adapter is wanted since its first request arrived, or since it lost its slot with requests, and is
    loaded as soon as a slot can be given up.

    Invariants (``check``): requests in steps in flight use adapters in slots. A request in steady decode has an adapter
    with a turn. An adapter with requests and without a slot is wanted.
    """

    def __init__(self, config: EngineConfig, table: Table, clock: StepClock, note: Callable[[Decision], None]) -> None:
        """Raises ConfigError if host memory has no room for the adapters in slots."""
        num_slots = config.max_loras + 1 if config.enable_lora else 0
        if config.max_cpu_loras < num_slots:
            raise ConfigError(
                f"--max-cpu-loras must be at least {num_slots}, --max-loras + 1 (got {config.max_cpu_loras})"
            )
        self.slots = AdapterSlots(num_slots, config.max_cpu_loras, clock)
        self.turns = Turns(config.max_loras, clock)
        self._table, self._clock, self._note = table, clock, note
        self._wanted: dict[int, Adapter] = {}
        """Adapters with requests and without a slot, by number, in the order in which they lacked one."""
        self._loads: list[LoadAdapter] = []
        self.num_open = 0
        """Loads that are not answered."""
        self.num_loaded = self.num_failed = 0
        self.load_seconds = 0.0

    def __len__(self) -> int:
        """Number of loads that are not answered."""
        return self.num_open

    @property
    def is_settled(self) -> bool:
        """Whether steps change nothing here until a load is answered or a request is admitted."""
        return not self._wanted and not self.turns.waiting

    # ---- requests

    def find(self, ref: AdapterRef | None) -> Adapter | None:
        """Return the adapter of an arrival, or None. A new adapter is forgotten unless ``arrived`` follows."""
        return None if ref is None else self.slots.find(ref)

    def arrived(self, request: Request) -> None:
        """Want the adapter of a request that was accepted."""
        adapter = request.adapter
        if adapter is None:
            return
        if adapter.num_requests == 1:
            self.turns.forget(adapter)
        if adapter.slot < 0:
            self._wanted.setdefault(adapter.number, adapter)

    def is_loaded(self, request: Request) -> bool:
        """Whether the adapter of a waiting request is in a slot, if it has one; otherwise the request is held."""
        adapter = request.adapter
        if adapter is None or adapter.is_ready:
            return True
        self._table.hold(request, WaitReason.ADAPTER)
        adapter.held[request.handle] = request
        self._decide("wait", request, WaitReason.ADAPTER)
        return False

    def may_run(self, request: Request) -> bool:
        """Whether the step that is planned may compute a request that was just admitted. Otherwise its adapter waits
        for a turn."""
        adapter = request.adapter
        if adapter is None or adapter.is_active or self.turns.take(adapter):
            return True
        self.turns.wait(adapter, request)
        self._decide("wait", request, WaitReason.ADAPTER_TURN)
        return False

    def stop_waiting(self, request: Request) -> None:
        """Return a request that is held for its adapter to the queue."""
        if request.wait_reason is WaitReason.ADAPTER and request.adapter is not None:
            del request.adapter.held[request.handle]
            self._table.release(request)

    def ended(self, request: Request) -> None:
        """Continue without a request that has ended."""
        adapter = request.adapter
        if adapter is None:
            return
        adapter.held.pop(request.handle, None)
        if not adapter.num_requests:
            self._wanted.pop(adapter.number, None)
            self.slots.forget_unused(adapter)

    def _decide(self, kind: str, request: Request, reason: WaitReason) -> None:
        detail = "" if request.adapter is None else request.adapter.ref.name
        self._note(Decision(self._clock.sent + 1, kind, request.request_id, reason, detail=detail))

    # ---- steps

    def next_step(self) -> None:
        """End and begin turns before a step is planned."""
        if self.turns.active or self.turns.waiting:
            for adapter in self.turns.next_step():
                for request in adapter.running.values():
                    self._table.leave_steady(request)

    def pass_turns(self) -> None:
        """End all turns, because a step without any request would be planned and other adapters wait."""
        for adapter in list(self.turns.active.values()):
            self.turns.pause(adapter)
            adapter.num_turn_steps = ADAPTER_SLICE  # it may lose its slot, too

    # ---- loads

    def plan_loads(self, *, is_quiet: bool = False) -> None:
        """Load wanted adapters to slots that can be given up. Called after each step and each event.

        ``is_quiet``: no request could be computed in the step that was planned.
        """
        if not self._wanted:
            return
        is_quiet = is_quiet or not (self._table.running or self._table.waiting)
        is_stuck = is_quiet and self._clock.acknowledged == self._clock.sent
        while self._wanted and (place := self._next_load(is_stuck)) is not None:
            adapter, slot = place
            before = self.slots.slots[slot]
            del self._wanted[adapter.number]
            self._loads.append(self.slots.load(adapter, slot))
            self.num_open += 1
            if before is not None and before.num_requests:
                self._wanted[before.number] = before

    def _next_load(self, is_stuck: bool) -> tuple[Adapter, int] | None:
        """Return the wanted adapter that has lacked a slot longest, of those for which there is one, and that slot."""
        for_running = self.slots.slot_for(0 if is_stuck else ADAPTER_SLICE)
        if for_running is None:
            return None
        for_held = self.slots.slot_for(0 if is_stuck else HELD_PATIENCE)
        for_others = self.slots.slot_for(None)
        for adapter in self._wanted.values():
            slot = for_running if adapter.running else (for_held if adapter.held else for_others)
            if slot is not None:
                return adapter, slot
        return None

    def take_loads(self) -> list[LoadAdapter]:
        """Return and clear the loads to send."""
        loads, self._loads = self._loads, []
        return loads

    def loaded(self, answer: AdapterLoaded) -> Adapter | None:
        """Apply the answer of all ranks to a load, and release the requests that were held for it.

        Returns the adapter, if the answer was expected. After a failure the caller ends its requests.
        """
        adapter = self.slots.loading(answer)
        if adapter is None:
            return None
        self.num_open -= 1
        self.load_seconds += answer.seconds
        if answer.problem:
            self.num_failed += 1
            self.slots.drop(adapter)
            if adapter.num_requests:
                self._wanted[adapter.number] = adapter
            return adapter
        self.num_loaded += 1
        adapter.is_loading, adapter.last_step = False, self._clock.sent
        for request in list(adapter.held.values()):
            self.stop_waiting(request)
        return adapter

    def unload(self, digest: bytes) -> bool:
        """Give up the places of an adapter. Returns whether it has none now, and no request."""
        adapter = self.slots.known.get(digest)
        if adapter is None:
            return True
        is_used = adapter.num_requests or adapter.is_loading or adapter.last_step > self._clock.acknowledged
        if not is_used:
            self.slots.drop(adapter)
        return not is_used

    def begin_epoch(self, *, new_workers: bool) -> None:
        """Continue after all running requests have returned to the queue. New workers have no adapters."""
        self.turns.clear()
        if new_workers:
            self._loads, self.num_open = [], 0
            self.slots.drop_all()
            self._wanted |= {each.number: each for each in self.slots.known.values()}
        self.plan_loads()

    # ---- statistics and checks

    def add_to(self, statistics: Statistics) -> Statistics:
        """Return ``statistics`` with those of adapters. O(known adapters)."""
        if not self.slots.slots:
            return statistics
        known = self.slots.known.values()
        busy = sorted(known, key=lambda each: (-each.num_requests, each.number))[:MAX_LISTED]
        return msgspec.structs.replace(
            statistics,
            adapters=[
                AdapterCounts(each.ref.name, each.place, len(each.running), each.num_requests - len(each.running))
                for each in busy
            ],
            adapters_by_place=dict.fromkeys(PLACES, 0) | Counter(each.place for each in known),
            num_adapters_loaded=self.num_loaded,
            num_adapters_failed=self.num_failed,
            num_adapters_evicted=self.slots.num_evicted,
            adapter_load_seconds=self.load_seconds,
        )

    def check(self, requests: Iterable[Request], in_flight: Iterable[Request]) -> None:
        """Raise AssertionError unless the invariants hold.

        Args:
            requests: all that have not ended.
            in_flight: those of the steps in flight; some may have ended.
        """
        self.slots.check()
        self.turns.check()
        numbers: Counter[Adapter] = Counter()
        for request in requests:
            adapter = request.adapter
            if adapter is None:
                continue
            assert self.slots.known.get(adapter.ref.digest) is adapter, f"{adapter!r} has requests and was forgotten"
            assert not request.is_steady or adapter.is_in_use, f"{request!r} is computed without a turn"
            is_held = request.wait_reason is WaitReason.ADAPTER
            assert is_held == (request.handle in adapter.held), f"{request!r}: wrong place"
            assert not (is_held and adapter.is_ready), f"{request!r} waits for an adapter that is loaded"
            numbers[adapter] += 1
        for adapter in self.slots.known.values():
            assert adapter.num_requests == numbers[adapter], f"{adapter!r}: wrong number of requests"
            is_wanted = adapter.number in self._wanted
            assert is_wanted == (adapter.slot < 0 and adapter.num_requests > 0), f"{adapter!r}: wanted {is_wanted}"
            has_place = adapter.is_in_use or adapter.number in self.turns.waiting
            assert has_place or not adapter.running, f"{adapter!r} waits for no turn"
        for request in in_flight:
            adapter = request.adapter
            assert adapter is None or adapter.is_ready, f"{request!r} is in flight, and {adapter!r} is not loaded"
        assert self.num_open == sum(each is not None and each.is_loading for each in self.slots.slots)
