"""ValueEviction: the order of evictions under ``--eviction-policy value``, with a guard."""

from collections.abc import Sequence

import msgspec

from quire.protocol.wire.front_end_messages import EvictionShadow, Statistics
from quire.scheduler_proc.eviction.shadow import Shadow
from quire.scheduler_proc.eviction.turns import NOT_ENDED, NUM_CLASSES, Turn, Turns
from quire.scheduler_proc.kv.releases import Freed

FIRST_LEAD = 0.005
"""Share of the looked up contents by which value must lead in the shadow before it is used the first time."""
LONG_LEAD = 0.001
"""The same over a long time, before it is used and while it is."""
HALF_LIFE, LONG_HALF_LIFE = 8, 200
"""Shadow capacities of looked up contents after which a hit counts half, in the short and in the long time."""
LEARN_S = 1.0
"""Seconds between two updates of the ranks, so that they cost little per eviction."""


class _Lead:
    """By how many hits value leads in the shadow. Older hits count less."""

    def __init__(self, half_life: float) -> None:
        """``half_life``: looked up contents after which a hit counts half."""
        self._fade = 0.5 ** (1.0 / half_life)
        self._hits = self._looked_up = 0.0

    def add(self, looked_up: int, hits: int) -> None:
        """Add the hits of value, less those of LRU, among the contents that were looked up."""
        fade = self._fade**looked_up
        self._looked_up = self._looked_up * fade + looked_up
        self._hits = self._hits * fade + hits

    @property
    def share(self) -> float:
        """The lead as a share of the looked up contents."""
        return self._hits / max(self._looked_up, 1.0)


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
        self._before: dict[int, tuple[int, int, bool]] = {}
        """By handle: number of the turn, prompt tokens of the turn before, and whether that called a tool."""
        self._lead = _Lead(HALF_LIFE * self.shadow.capacity)
        self._long_lead = _Lead(LONG_HALF_LIFE * self.shadow.capacity)
        self._needed = FIRST_LEAD
        self._learned_at = -LEARN_S

    @property
    def policy(self) -> str:
        """The policy that is used now."""
        return "value" if self.is_by_value else "lru"

    def rank(self, freed: Freed) -> float:
        if not self.is_by_value:
            return freed.order
        return self._turns.hazard(freed.turn_class, self._learned_at - freed.at)

    def clock(self, now: float) -> None:
        """Set the time. Every LEARN_S, update the ranks and choose the policy."""
        self.now = now
        if now - self._learned_at < LEARN_S:
            return
        self._learned_at = now
        self._turns.learn(now)
        was = self.is_by_value
        self.is_by_value = self._lead.share > (0.0 if was else self._needed) and self._long_lead.share > LONG_LEAD
        if was or self.is_by_value:
            self.version += 1
        if was != self.is_by_value:
            self.num_switches += 1
            self._needed *= 2.0 if was else 1.0

    def arrived(self, handle: int, hashes: Sequence[bytes], *, called_tool: bool = False) -> None:
        """Learn from a new request, by the hashes of its prompt. ``called_tool``: by the answer before it."""
        self._before[handle] = (*self._turns.arrived(hashes, self.now), called_tool)

    def forget(self, handle: int) -> None:
        """Forget a request that has ended."""
        self._before.pop(handle, None)

    def ended(self, handle: int, hashes: Sequence[bytes], turn: Turn, turn_class: int = NOT_ENDED) -> int:
        """Return the class of a request that ends, and learn from it.

        Args:
            hashes: of its prompt and output.
            turn: its ``number`` is 0 if it is unknown, and then found by the prompt. ``num_new_tokens`` and
                ``follows_tool`` are ignored, because ``arrived`` has found them.
            turn_class: its class, if it does not depend on the turn.
        """
        num_prompt_hashes = (turn.num_prompt_tokens - 1) // self._unit
        prompt = hashes[:num_prompt_hashes]
        if not prompt:
            return NOT_ENDED
        number, num_known, follows_tool = self._before.get(handle, (1, 0, False))
        num_new = turn.num_prompt_tokens - num_known
        turn = turn._replace(number=turn.number or number, num_new_tokens=num_new, follows_tool=follows_tool)
        number = self._turns.ended(prompt[-1], turn, turn_class or turn.turn_class, self.now)
        if (seen := self.shadow.ended(hashes, num_prompt_hashes, number, self.now)) is not None:
            looked_up, lru, value = seen
            self._lead.add(looked_up, value - lru)
            self._long_lead.add(looked_up, value - lru)
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
