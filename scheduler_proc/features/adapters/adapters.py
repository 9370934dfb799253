"""Adapters: loads the adapters of requests into slots, and decides of which adapters a step computes requests."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec

from quire.protocol.block_hash import HashChain
from quire.protocol.errors import ConfigError
from quire.protocol.wire.adapter_messages import DIGEST_BYTES, AdapterLoaded, UnloadAdapter
from quire.protocol.wire.front_end_messages import AdapterCounts, EndReason, Statistics
from quire.protocol.wire.worker_messages import NewRequestData
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.feature import Feature, Handler
from quire.scheduler_proc.features.adapters.adapter_state import ADAPTER, ADAPTER_NAME, AdapterState
from quire.scheduler_proc.features.adapters.slots import ADAPTER_SLICE, HELD_PATIENCE, AdapterSlots
from quire.scheduler_proc.features.adapters.turns import AdapterTurns
from quire.scheduler_proc.messages.arrivals import Refusal
from quire.scheduler_proc.requests.reasons import Decision, WaitReason
from quire.scheduler_proc.requests.request import Request

PLACES = ("active", "ready", "loading", "host", "absent")
"""Values of ``AdapterState.place``."""
MAX_LISTED = 32
"""Most adapters in a Statistics message: those with the most requests."""


MAX_NAME = 256
MAX_PATH = 4096


class Adapters(Feature):
    """Decides loads of adapters and follows them, and gives adapters their turns. Idle if no request has an adapter.

    A request whose adapter is not loaded is held (WaitReason.ADAPTER) when it could be admitted otherwise. Loads do not
    wait for that: an adapter is wanted since its first request arrived, or since it lost its slot with requests, and is
    loaded as soon as a slot can be given up.

    Invariants (``check``): requests in steps in flight use adapters in slots. A request in steady decode has an adapter
    with a turn. An adapter with requests and without a slot is wanted.
    """

    name = "adapters"

    def __init__(self, core: Core) -> None:
        """Raises ConfigError if host memory has no room for the adapters in slots."""
        config, self._core = core.config, core
        self.is_enabled = config.enable_lora
        num_slots = config.max_loras + 1 if config.enable_lora else 0
        if config.max_cpu_loras < num_slots:
            raise ConfigError(
                f"--max-cpu-loras must be at least {num_slots}, --max-loras + 1 (got {config.max_cpu_loras})"
            )
        self._table, self._clock, self._note = core.table, core.clock, core.decisions.note
        self.slots = AdapterSlots(num_slots, config.max_cpu_loras, self._clock)
        self.turns = AdapterTurns(config.max_loras, self._clock)
        self._wanted: dict[int, AdapterState] = {}
        """Adapters with requests and without a slot, by number, in the order in which they lacked one."""
        self.num_open = 0
        """Loads that are not answered."""
        self.num_loaded = self.num_failed = 0
        self.load_seconds = 0.0
        if core.kv.pool.events is not None:
            core.kv.pool.events.label = self._label

    @staticmethod
    def _label(request: Request) -> tuple[int, str] | None:
        adapter = ADAPTER.of(request)
        return None if adapter is None else (adapter.number, ADAPTER_NAME.of(request))

    def is_busy(self) -> bool:
        return self.num_open > 0

    @property
    def is_settled(self) -> bool:
        """Whether steps change nothing here until a load is answered or a request is admitted."""
        return not self._wanted and not self.turns.waiting

    # ---- requests

    def validate(self, event: Any, num_prompt_tokens: int) -> None:
        adapter = event.adapter
        if adapter is None:
            return
        if not self.slots.slots:
            raise Refusal("unsupported", "model", f"this engine serves no adapters (got {adapter.name!r})")
        if len(adapter.digest) != DIGEST_BYTES:
            text = f"the digest of an adapter must have {DIGEST_BYTES} bytes (got {len(adapter.digest)})"
            raise Refusal("invalid_value", "model", text)
        for what, text, most in (("name", adapter.name, MAX_NAME), ("path", adapter.path, MAX_PATH)):
            if len(text) > most:
                text = f"the {what} of an adapter must have at most {most} characters (got {len(text)})"
                raise Refusal("invalid_value", "model", text)

    def check_parent(self, event: Any, parent: Request) -> None:
        adapter = ADAPTER.of(parent)
        if event.adapter is not None and (adapter is None or event.adapter.digest != adapter.ref.digest):
            text = f"a forked request must have the adapter of its parent (got {event.adapter.name!r})"
            raise Refusal("invalid_value", "model", text)

    def prepare(self, request: Request, event: Any, parent: Request | None) -> None:
        """Give a request its adapter, or that of its parent.

        A new adapter is known from here on, although it has no request. So no feature may refuse the request
        after this one.
        """
        if parent is not None:
            ADAPTER.put(request, ADAPTER.of(parent))
            ADAPTER_NAME.put(request, ADAPTER_NAME.of(parent))
        elif event.adapter is not None:
            ADAPTER.put(request, self.slots.find(event.adapter))
            ADAPTER_NAME.put(request, event.adapter.name)

    def hashing(self, event: Any, chain: Callable[..., HashChain]) -> Callable[..., HashChain]:
        return chain if event.adapter is None else partial(chain, adapter=event.adapter.digest.hex())

    def added(self, request: Request) -> None:
        if (adapter := ADAPTER.of(request)) is not None:
            adapter.num_requests += 1

    def arrived(self, request: Request, event: Any) -> None:
        """Want the adapter of a request that was accepted."""
        adapter = ADAPTER.of(request)
        if adapter is None:
            return
        if adapter.num_requests == 1:
            self.turns.forget(adapter)
        if adapter.slot < 0:
            self._wanted.setdefault(adapter.number, adapter)

    def obstacle(self, request: Request) -> WaitReason | None:
        """Hold a waiting request whose adapter is in no slot. It can be in the queue, because the slot may be lost
        while it waits there for a row or blocks."""
        adapter = ADAPTER.of(request)
        if adapter is None or adapter.is_ready:
            return None
        self._table.hold(request, WaitReason.ADAPTER)
        adapter.held[request.handle] = request
        self._decide("wait", request, WaitReason.ADAPTER)
        return WaitReason.ADAPTER

    def version(self, request: Request) -> object:
        adapter = ADAPTER.of(request)
        return adapter is None or adapter.is_ready

    def pause_reason(self, request: Request) -> WaitReason | None:
        adapter = ADAPTER.of(request)
        return None if adapter is None or adapter.is_active else WaitReason.ADAPTER_TURN

    def may_run(self, request: Request) -> bool:
        """Whether the step may compute a request that was just admitted. Otherwise its adapter waits for a turn."""
        adapter = ADAPTER.of(request)
        if adapter is None or adapter.is_active or self.turns.take(adapter):
            return True
        self.turns.wait(adapter, request)
        self._decide("wait", request, WaitReason.ADAPTER_TURN)
        return False

    def building(self, request: Request, data: NewRequestData) -> NewRequestData:
        adapter = ADAPTER.of(request)
        return data if adapter is None else msgspec.structs.replace(data, adapter=adapter.number)

    def describe(self, request: Request) -> dict[str, Any]:
        return {"adapter": ADAPTER_NAME.of(request)}

    def started(self, request: Request) -> None:
        if (adapter := ADAPTER.of(request)) is not None:
            adapter.running[request.handle] = request

    def stopped(self, request: Request) -> None:
        if (adapter := ADAPTER.of(request)) is not None:
            del adapter.running[request.handle]
            adapter.last_step = self._clock.sent

    def stop_waiting(self, request: Request) -> None:
        adapter = ADAPTER.of(request)
        if request.wait_reason is WaitReason.ADAPTER and adapter is not None:
            del adapter.held[request.handle]
            self._table.release(request)

    def ended(self, request: Request) -> None:
        adapter = ADAPTER.of(request)
        if adapter is None:
            return
        adapter.num_requests -= 1
        adapter.held.pop(request.handle, None)
        if not adapter.num_requests:
            self._wanted.pop(adapter.number, None)
            self.slots.forget_unused(adapter)

    def _decide(self, kind: str, request: Request, reason: WaitReason) -> None:
        adapter = ADAPTER.of(request)
        detail = "" if adapter is None else adapter.ref.name
        self._note(Decision(self._clock.sent + 1, kind, request.request_id, reason, detail=detail))

    # ---- steps

    def before_rows(self) -> None:
        """End and begin turns. Requests that end must not count as running any more: they need no turn."""
        if self.turns.active or self.turns.waiting:
            for adapter in self.turns.next_step():
                for request in adapter.running.values():
                    self._table.leave_steady(request)

    def give_way(self) -> Iterator[None]:
        """End all turns. No request of the adapters with a turn could run, for example for lack of blocks, and those
        of the others would wait for ever if no step were sent."""
        for _ in range(len(self.turns.waiting)):
            for adapter in list(self.turns.active.values()):
                self.turns.pause(adapter)
                adapter.num_turn_steps = ADAPTER_SLICE  # it may lose its slot, too
            yield

    # ---- loads

    def after_event(self) -> None:
        self._plan_loads()

    def after_step(self, *, is_quiet: bool) -> None:
        self._plan_loads(is_quiet=is_quiet)

    def _plan_loads(self, *, is_quiet: bool = False) -> None:
        """Load wanted adapters to slots that can be given up."""
        if not self._wanted:
            return
        is_quiet = is_quiet or not (self._table.running or self._table.waiting)
        is_stuck = is_quiet and self._clock.acknowledged == self._clock.sent
        while self._wanted and (place := self._next_load(is_stuck)) is not None:
            adapter, slot = place
            before = self.slots.slots[slot]
            del self._wanted[adapter.number]
            self._core.side_jobs.append(self.slots.load(adapter, slot))
            self.num_open += 1
            if before is not None and before.num_requests:
                self._wanted[before.number] = before

    def _next_load(self, is_stuck: bool) -> tuple[AdapterState, int] | None:
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

    def consumes(self) -> Mapping[type, Handler]:
        return {AdapterLoaded: self._loaded, UnloadAdapter: self._unload_and_reply}

    def _loaded(self, answer: AdapterLoaded, client: int) -> None:
        """Continue with the requests of an adapter, or end them if it could not be loaded."""
        adapter = self.slots.loading(answer)
        if adapter is None:
            self._core.stats.num_stray_messages += 1
            return
        self.num_open -= 1
        self.load_seconds += answer.seconds
        if answer.problem:
            self._failed(adapter, answer.problem)
            return
        self.num_loaded += 1
        adapter.is_loading, adapter.last_step = False, self._clock.sent
        for request in list(adapter.held.values()):
            self.stop_waiting(request)

    def _failed(self, adapter: AdapterState, problem: str) -> None:
        self.num_failed += 1
        self.slots.drop(adapter)
        if adapter.num_requests:
            self._wanted[adapter.number] = adapter
        for request in [r for r in self._table.requests.values() if ADAPTER.of(r) is adapter and r.client >= 0]:
            self._core.fail(request, Refusal("adapter_not_loaded", "model", problem))

    def _unload_and_reply(self, event: UnloadAdapter, client: int) -> None:
        self._core.replies.append((client, self._core.statistics(event.query, self._unload(event))))

    def _unload(self, event: UnloadAdapter) -> bool:
        """Drop an adapter if no request has it under this name. Returns whether that is so now."""
        adapter = self.slots.known.get(event.digest)
        if adapter is None:
            return True
        live = self._table.requests.values()
        named = [r for r in live if ADAPTER.of(r) is adapter and ADAPTER_NAME.of(r) == event.name]
        if event.force:
            for request in named:
                self._core.finish(request, EndReason.ABORTED)
        elif named:
            return False
        return adapter.num_requests > 0 or event.digest not in self.slots.known or self._give_up(adapter)

    def _give_up(self, adapter: AdapterState) -> bool:
        """Give up the places of an adapter without requests. Returns whether it has none now."""
        is_used = adapter.is_loading or adapter.last_step > self._clock.acknowledged
        if not is_used:
            self.slots.drop(adapter)
        return not is_used

    def new_epoch(self, *, new_workers: bool) -> bool:
        """Begin without turns, because no request runs. New workers have no adapters."""
        self.turns.clear()
        if new_workers:
            self.num_open = 0
            self.slots.drop_all()
            self._wanted |= {each.number: each for each in self.slots.known.values()}
        self._plan_loads()
        return False

    # ---- statistics and checks

    def statistics(self, found: Statistics, *, is_listing: bool) -> Statistics:
        """O(known adapters)."""
        if not self.slots.slots:
            return found
        known = self.slots.known.values()
        busy = sorted(known, key=lambda each: (-each.num_requests, each.number))[:MAX_LISTED]
        return msgspec.structs.replace(
            found,
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

    def check(self) -> None:
        self.slots.check()
        self.turns.check()
        numbers: Counter[AdapterState] = Counter()
        for request in self._table.requests.values():
            adapter = ADAPTER.of(request)
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
            running = [request for request in self._table.running.values() if ADAPTER.of(request) is adapter]
            assert list(adapter.running.values()) == running, f"{adapter!r}: wrong running requests"
        for request in [each for step in self._core.in_flight.records for each in step.requests().values()]:
            adapter = ADAPTER.of(request)
            assert adapter is None or adapter.is_ready, f"{request!r} is in flight, and {adapter!r} is not loaded"
        assert self.num_open == sum(each is not None and each.is_loading for each in self.slots.slots)
