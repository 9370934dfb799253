"""Places of adapters: the slots of the device and the copies in host memory, and which one is given up for another."""

from quire.protocol.wire.adapter_messages import AdapterLoaded, AdapterRef, LoadAdapter
from quire.scheduler_proc.features.adapters.adapter_state import AdapterState
from quire.scheduler_proc.requests.step_clock import StepClock

ADAPTER_SLICE = 16
"""Steps that an adapter has before another one gets its turn, or its slot. Measured: docs/log/2026-11-27.md."""
HELD_PATIENCE = 16 * ADAPTER_SLICE
"""Steps without an admission after which an adapter yields its slot to one with held requests."""


class AdapterSlots:
    """Knows the adapters, by digest, and what is in each slot and in host memory.

    An adapter that has neither a place nor a request is forgotten, so that the number of known ones is bounded.

    Invariants (``check``): a slot holds one adapter. An adapter in a slot has a copy in host memory, of which there are
    at most ``max_copies``. A slot or a copy is given up only when every step that uses it has been answered.

    Attributes:
        known: adapters by digest.
        last_number: number of the newest adapter.
        num_evicted: adapters that lost their slot to another one, since start.
    """

    def __init__(self, num_slots: int, max_copies: int, clock: StepClock) -> None:
        self.slots: list[AdapterState | None] = [None] * num_slots
        self.known: dict[bytes, AdapterState] = {}
        self.last_number = self.num_evicted = 0
        self._max_copies = max_copies
        self._clock = clock
        self._copies: dict[int, AdapterState] = {}
        """Adapters with a copy in host memory, by number."""
        self.dropped: list[int] = []
        """Numbers of adapters whose copies the next load drops; they are not in ``known`` any more, or failed."""

    def find(self, ref: AdapterRef) -> AdapterState:
        """Return the adapter with this digest, with the name and folder of ``ref``; a new one if it is not known."""
        adapter = self.known.get(ref.digest)
        if adapter is None:
            self.last_number += 1
            adapter = self.known[ref.digest] = AdapterState(self.last_number, ref)
        adapter.ref = ref
        return adapter

    # ---- loads

    def slot_for(self, idle_steps: int | None) -> int | None:
        """Return a slot to load an adapter to: a free one, or that of the adapter whose loss costs least, or None.

        Args:
            idle_steps: as for ``can_give_up``.
        """
        for slot, held in enumerate(self.slots):
            if held is None:
                return slot
        candidates = [held for held in self.slots if held is not None and self.can_give_up(held, idle_steps)]
        return min(candidates, key=_by_demand_and_use).slot if candidates else None

    def can_give_up(self, held: AdapterState, idle_steps: int | None) -> bool:
        """Whether an adapter can lose its slot to another one.

        With requests it keeps the slot for the steps of a whole turn.

        Args:
            idle_steps: steps after which it yields all the same, if none of its requests was admitted; None: it does
                not.
        """
        if held.is_loading or held.is_in_use or held.last_step > self._clock.acknowledged:
            return False
        if not held.num_requests or held.num_turn_steps >= ADAPTER_SLICE:
            return True
        return not held.running and idle_steps is not None and self._clock.sent - held.last_step >= idle_steps

    def load(self, adapter: AdapterState, slot: int) -> LoadAdapter:
        """Give ``slot`` to an adapter. Returns the message to the workers."""
        if (before := self.slots[slot]) is not None:
            before.slot = -1
            self.num_evicted += 1
        if not adapter.is_cached:
            self._make_room()
            adapter.is_cached, self._copies[adapter.number] = True, adapter
        self.slots[slot] = adapter
        adapter.slot, adapter.is_loading = slot, True
        adapter.num_turn_steps, adapter.last_step = 0, self._clock.acknowledged
        dropped, self.dropped = self.dropped, []
        return LoadAdapter(adapter.number, adapter.ref.digest, adapter.ref.path, slot, dropped)

    def _make_room(self) -> None:
        """Drop copies of adapters without a slot until there is room for one more."""
        while len(self._copies) >= self._max_copies:
            victim = min((each for each in self._copies.values() if each.slot < 0), key=_by_demand_and_use)
            self.drop(victim)

    def loading(self, answer: AdapterLoaded) -> AdapterState | None:
        """Return the adapter whose load ``answer`` ends, or None."""
        held = self.slots[answer.slot] if 0 <= answer.slot < len(self.slots) else None
        return held if held is not None and held.is_loading and held.number == answer.number else None

    def drop(self, adapter: AdapterState) -> None:
        """Give up slot and copy of an adapter that no step uses."""
        if adapter.slot >= 0:
            self.slots[adapter.slot] = None
            adapter.slot, adapter.is_loading = -1, False
        if adapter.is_cached:
            del self._copies[adapter.number]
            adapter.is_cached = False
            self.dropped.append(adapter.number)
        self.forget_unused(adapter)

    def forget_unused(self, adapter: AdapterState) -> None:
        """Forget an adapter that has neither a place nor a request."""
        if not adapter.num_requests and adapter.slot < 0 and not adapter.is_cached:
            self.known.pop(adapter.ref.digest, None)

    def drop_all(self) -> None:
        """Give up all places, because the workers were replaced."""
        for adapter in list(self.known.values()):
            self.drop(adapter)
        self.dropped.clear()

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        for slot, held in enumerate(self.slots):
            assert held is None or held.slot == slot, f"slot {slot} holds {held!r}"
            assert held is None or held.is_cached, f"{held!r} has no copy in host memory"
        for digest, adapter in self.known.items():
            assert adapter.ref.digest == digest, f"{adapter!r} has another digest"
            assert adapter.slot < 0 or self.slots[adapter.slot] is adapter, f"{adapter!r} is not in its slot"
            assert adapter.is_cached == (adapter.number in self._copies), f"{adapter!r}: wrong copies"
            assert adapter.num_requests or adapter.is_cached, f"{adapter!r} was not forgotten"
        assert len(self._copies) <= self._max_copies, "too many adapters in host memory"
        assert not set(self.dropped) & self._copies.keys(), "an adapter in use is dropped"


def _by_demand_and_use(adapter: AdapterState) -> tuple[bool, int, int]:
    """Order of eviction: first those without requests, then by last use."""
    return adapter.num_requests > 0, adapter.last_step, adapter.number
