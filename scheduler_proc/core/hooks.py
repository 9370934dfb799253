"""What happens inside one event or one step, for whoever records it."""

from dataclasses import dataclass, field
from typing import NamedTuple

from quire.protocol.wire.front_end_messages import Ended


class Hit(NamedTuple):
    """A request was let in: at its first time or after a preemption, with so many tokens from the prefix cache."""

    handle: int
    request_id: str
    num_hit_tokens: int
    num_prompt_tokens: int
    num_tokens: int


@dataclass(slots=True)
class Tap:
    """Lists that the Scheduler fills while it has one (``Scheduler.listen``); whoever reads them clears them.

    Attributes:
        hashes: (handle, name) of each block that became full after its request had arrived; of the name the first
            ``kv.block_hash.NAME_BYTES`` bytes.
        ended: endings of accepted requests.
        hits: admissions.
    """

    hashes: list[tuple[int, bytes]] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)

    def clear(self) -> None:
        self.hashes.clear()
        self.ended.clear()
        self.hits.clear()
