"""ValueEviction: the order of evictions under ``--eviction-policy value``, with a guard."""

from collections.abc import Sequence

import msgspec

from quire.protocol.wire.front_end_messages import EvictionShadow, Statistics
from quire.scheduler_proc.eviction.shadow import Shadow
from quire.scheduler_proc.eviction.turns import NOT_ENDED, NUM_CLASSES, Turn, Turns
from quire.scheduler_proc.kv.releases import Freed

FIRST_LEAD = 0.005
"""Share of the looked up contents by which value must lead in the shadow before it is used."""
HALF_LIFE = 20
"""Shadow capacities of looked up contents after which a hit counts half."""


class ValueEviction:
    """Ranks contents by the probability that their conversation continues now, or by last use where that is better.

    The guard: LRU is used until a shadow of both policies shows that value has more hits, and as soon as it has fewer.
    After each return to LRU twice the lead is needed, so that a workload without a clear winner keeps LRU.

    Attributes:
        now: seconds of the last event ``Clock``.
        version: number of changes of the ranks.
        num_classes: classes of requests.
        is_by_value: whether value is used now; otherwise LRU.
        num_switches: changes between the two.
    """

    num_classes = NUM_CLASSES

    def __init__(self, unit: int, num_contents: int) -> None:
        """
        Args:
            unit: tokens per hash of a request.
            num_contents: contents of ``unit`` tokens that the pool can have.
        """
        self.now = 0.0
        self.version = self.num_switches = 0
        self.is_by_value = False
        self._unit = unit
        self._turns = Turns()
        self.shadow = Shadow(num_contents, self._turns)
        self._before: dict[int, tuple[int, int]] = {}
        """By handle: number of the turn in its conversation, and prompt tokens of the turn before."""
        self._lead, self._looked_up = 0.0, 0.0
        """Hits of value less those of LRU, and contents looked up; older ones count less."""
        self._needed = FIRST_LEAD
        self._fade = 0.5 ** (1.0 / (HALF_LIFE * self.shadow.capacity))

    @property
    def policy(self) -> str:
        """The policy that is used now."""
        return "value" if self.is_by_value else "lru"

    def rank(self, freed: Freed) -> float:
        if not self.is_by_value:
            return freed.order
        return self._turns.hazard(freed.turn_class, self.now - freed.at)

    def clock(self, now: float) -> None:
        """Set the time, and choose the policy until the next call."""
        self.now = now
        self._turns.learn(now)
        was = self.is_by_value
        self.is_by_value = self._lead > (0.0 if was else self._needed * self._looked_up)
        if was or self.is_by_value:
            self.version += 1
        if was != self.is_by_value:
            self.num_switches += 1
            self._needed *= 2.0 if was else 1.0

    def arrived(self, handle: int, hashes: Sequence[bytes]) -> None:
        """Learn from a new request, by the hashes of its prompt."""
        self._before[handle] = self._turns.arrived(hashes, self.now)

    def forget(self, handle: int) -> None:
        """Forget a request that has ended."""
        self._before.pop(handle, None)

    def ended(self, handle: int, hashes: Sequence[bytes], turn: Turn, turn_class: int = NOT_ENDED) -> int:
        """Return the class of a request that ends, and learn from it.

        Args:
            hashes: of its prompt and output.
            turn: its ``number`` is 0 if it is unknown, and then found by the prompt. ``num_new_tokens`` is ignored.
            turn_class: its class, if it does not depend on the turn.
        """
        num_prompt_hashes = (turn.num_prompt_tokens - 1) // self._unit
        prompt = hashes[:num_prompt_hashes]
        if not prompt:
            return NOT_ENDED
        number, num_known = self._before.get(handle, (1, 0))
        turn = turn._replace(number=turn.number or number, num_new_tokens=turn.num_prompt_tokens - num_known)
        number = self._turns.ended(prompt[-1], turn, turn_class or turn.turn_class, self.now)
        if (seen := self.shadow.ended(hashes, num_prompt_hashes, number, self.now)) is not None:
            looked_up, lru, value = seen
            fade = self._fade**looked_up
            self._looked_up = self._looked_up * fade + looked_up
            self._lead = self._lead * fade + value - lru
        return number

    def add_to(self, statistics: Statistics) -> Statistics:
        """Return ``statistics`` with the figures of the shadow."""
        shadow = self.shadow
        state = EvictionShadow(
            shadow.num_looked_up,
            shadow.num_lru_hits,
            shadow.num_value_hits,
            self.num_switches,
            is_by_value=self.is_by_value,
        )
        return msgspec.structs.replace(statistics, eviction_shadow=state)
