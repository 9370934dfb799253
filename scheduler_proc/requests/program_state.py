"""ProgramState: the scheduler's state of one program, to which its requests refer."""

from typing import Generic, TypeVar

R = TypeVar("R")
"""Request, which refers to this class."""


class ProgramState(Generic[R]):
    """One program: the turns of an agent or of a conversation. Only ``scheduler_proc/features/programs`` changes it.

    Times are seconds of the events ``Clock``.

    Attributes:
        number: number of its first request; 0 until that is accepted.
        tenant: tenant of its requests; another tenant's program is another one, even with the same job id.
        job_id: id that its requests name, or "" if it was found by its prefix.
        live: by handle, its requests that have not ended.
        num_turns: requests that have ended.
        num_tokens: tokens of its newest context, prompt and output.
        last_seen: time of its last arrival or ending.
        last_request: (client, request id) of its newest turn.
        tool: name of the tool that its last answer calls, or "".
        is_admitted: its turns are scheduled before those of programs that are not admitted.
        has_ended: its last step has arrived.
    """

    __slots__ = (
        "has_ended",
        "is_admitted",
        "job_id",
        "last_request",
        "last_seen",
        "live",
        "num_tokens",
        "num_turns",
        "number",
        "tenant",
        "tool",
    )

    def __init__(self, number: int, tenant: int, job_id: str, now: float) -> None:
        self.number, self.tenant, self.job_id = number, tenant, job_id
        self.live: dict[int, R] = {}
        self.num_turns = self.num_tokens = 0
        self.last_seen = now
        self.last_request = (-1, "")
        self.tool = ""
        self.is_admitted = self.has_ended = False

    @property
    def is_paused(self) -> bool:
        """Whether no request of it exists."""
        return not self.live

    def __repr__(self) -> str:
        return f"ProgramState({self.number}, job {self.job_id!r}, {self.num_turns} turns, {len(self.live)} live)"
