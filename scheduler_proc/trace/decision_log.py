"""The inner events of a Scheduler, collected as lists."""

from typing import NamedTuple

from quire.protocol.block_hash import SHORT_HASH_BYTES
from quire.protocol.wire.front_end_messages import Ended
from quire.scheduler_proc.costs.choice import LoadChoice
from quire.scheduler_proc.features.programs.program_state import JOB_ID
from quire.scheduler_proc.features.transfers import CHOICE
from quire.scheduler_proc.requests.hooks import SchedulerHooks
from quire.scheduler_proc.requests.request import Request

NO_CHOICE = LoadChoice("")


class Hit(NamedTuple):
    """An admission, first or after a preemption, with its number of tokens from the prefix cache.

    ``choice``: as of ``CHOICE``.
    """

    handle: int
    request_id: str
    num_hit_tokens: int
    num_prompt_tokens: int
    num_tokens: int
    job_id: str
    choice: LoadChoice

    @property
    def num_loaded_tokens(self) -> int:
        """How many of its tokens from the prefix cache were loaded for it from host memory or disk."""
        return self.choice.num_loaded(self.num_hit_tokens)


class DecisionLog(SchedulerHooks):
    """SchedulerHooks that keep what they are called with, until the reader clears it.

    Attributes:
        hashes: (handle, first ``SHORT_HASH_BYTES`` bytes of the name) of each block that became full.
        ended_requests: endings of accepted requests.
        hits: admissions.
        choices: (handle, parents) of requests that go on with other parts.
    """

    def __init__(self) -> None:
        self.hashes: list[tuple[int, bytes]] = []
        self.ended_requests: list[Ended] = []
        self.hits: list[Hit] = []
        self.choices: list[tuple[int, list[int]]] = []

    def block_filled(self, handle: int, name: bytes) -> None:
        self.hashes.append((handle, name[:SHORT_HASH_BYTES]))

    def admitted(self, request: Request, num_hit_tokens: int) -> None:
        known = (request.num_prompt_tokens, request.num_tokens)
        more = JOB_ID.of(request), CHOICE.of(request) or NO_CHOICE
        self.hits.append(Hit(request.handle, request.request_id, num_hit_tokens, *known, *more))

    def continued(self, handle: int, parents: list[int]) -> None:
        self.choices.append((handle, parents))

    def ended(self, ended: Ended) -> None:
        self.ended_requests.append(ended)

    def take_hashes(self) -> list[tuple[int, bytes]]:
        """Return and clear ``hashes``."""
        taken, self.hashes = self.hashes, []
        return taken

    def clear(self) -> None:
        self.hashes.clear()
        self.ended_requests.clear()
        self.hits.clear()
        self.choices.clear()
