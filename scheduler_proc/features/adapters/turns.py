"""Turns: of which adapters the next step computes requests, when more of them have running requests than it may use."""

from quire.scheduler_proc.features.adapters.adapter_state import AdapterState
from quire.scheduler_proc.features.adapters.slots import ADAPTER_SLICE
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.requests.step_clock import StepClock


class AdapterTurns:
    """Gives adapters their turns.

    While running requests use at most ``max_active`` adapters, each of these has a turn that does not end, and a step
    costs nothing here. Otherwise the adapter that has waited longest gets the place of the one whose turn began first,
    when that turn has lasted ADAPTER_SLICE steps, or one step if a request that waits has no token yet. A turn lasts at
    most twice as long as the last one of an adapter that waits, so that those that are cut short get their share.

    Attributes:
        active: adapters with a turn, in the order in which turns began.
        waiting: adapters with running requests and without a turn, in the order in which they began to wait.
    """

    def __init__(self, max_active: int, clock: StepClock) -> None:
        self.active: dict[int, AdapterState] = {}
        self.waiting: dict[int, AdapterState] = {}
        self._max_active = max_active
        self._clock = clock

    def take(self, adapter: AdapterState) -> bool:
        """Begin a turn in the step that is being planned, if there is room and the adapter is ready."""
        if len(self.active) >= self._max_active or not adapter.is_ready:
            return False
        self.waiting.pop(adapter.number, None)
        self.active[adapter.number] = adapter
        adapter.is_active, adapter.turn_began = True, self._clock.sent + 1
        return True

    def wait(self, adapter: AdapterState, request: Request) -> None:
        """Let an adapter wait for a turn, since ``request`` of it was admitted."""
        self.waiting.setdefault(adapter.number, adapter)
        adapter.awaits_first_token |= _awaits_first_token(request)

    def next_step(self) -> list[AdapterState]:
        """End and begin turns before a step is planned. Returns the adapters whose turn ended with running requests."""
        for adapter in [each for each in self.active.values() if not each.running]:
            self._end(adapter)
        ended: list[AdapterState] = []
        if not self.waiting:
            return ended
        for adapter in [each for each in self.waiting.values() if not each.running]:
            del self.waiting[adapter.number]
            adapter.awaits_first_token = False
        ready = [adapter for adapter in self.waiting.values() if adapter.is_ready]
        most = min([ADAPTER_SLICE, *(2 * adapter.last_turn for adapter in ready if adapter.last_turn)])
        if any(adapter.awaits_first_token for adapter in ready):
            most = 1
        for adapter in ready:
            first = next(iter(self.active.values()), None)
            if first is not None and len(self.active) >= self._max_active:
                if self._clock.sent + 1 - first.turn_began < most:
                    break
                self.pause(first)
                ended.append(first)
            self.take(adapter)
        return ended

    def pause(self, adapter: AdapterState) -> None:
        """End a turn of an adapter with running requests, which waits for the next one."""
        self._end(adapter)
        self.waiting[adapter.number] = adapter
        adapter.awaits_first_token = any(_awaits_first_token(request) for request in adapter.running.values())

    def _end(self, adapter: AdapterState) -> None:
        del self.active[adapter.number]
        adapter.is_active = False
        num_steps = self._clock.sent + 1 - adapter.turn_began
        adapter.num_turn_steps += num_steps
        adapter.last_turn = num_steps if adapter.running else 0
        if adapter.running:
            adapter.last_step = self._clock.sent

    def forget(self, adapter: AdapterState) -> None:
        """Forget the turns of an adapter that had no request, so that what it did before it was idle has no effect."""
        if adapter.is_active:
            self._end(adapter)
        adapter.num_turn_steps = adapter.last_turn = 0

    def clear(self) -> None:
        """End the turns of all adapters. No request may be running."""
        for adapter in [*self.active.values(), *self.waiting.values()]:
            adapter.is_active = adapter.awaits_first_token = False
        self.active.clear()
        self.waiting.clear()

    def check(self) -> None:
        """Raise AssertionError unless each adapter with running requests has a turn or waits for one."""
        assert len(self.active) <= self._max_active, "more adapters have a turn than a step may use"
        for number, adapter in self.active.items():
            assert adapter.number == number and adapter.is_active and number not in self.waiting
            assert adapter.is_ready or not adapter.running, f"{adapter!r} has a turn and is not loaded"


def _awaits_first_token(request: Request) -> bool:
    return not request.num_output_tokens and not request.num_output_placeholders
