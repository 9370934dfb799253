"""ProgramState: the scheduler's state of one program, to which its requests refer."""

from dataclasses import dataclass, field

from quire.scheduler_proc.requests.request import Request, RequestPart


@dataclass(slots=True, eq=False, repr=False)
class ProgramState:
    """One program: the turns of an agent or of a conversation.

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

    number: int
    tenant: int
    job_id: str
    last_seen: float
    live: dict[int, Request] = field(default_factory=dict)
    num_turns: int = 0
    num_tokens: int = 0
    last_request: tuple[int, str] = (-1, "")
    tool: str = ""
    is_admitted: bool = False
    has_ended: bool = False

    @property
    def is_paused(self) -> bool:
        """Whether no request of it exists."""
        return not self.live

    def __repr__(self) -> str:
        return f"ProgramState({self.number}, job {self.job_id!r}, {self.num_turns} turns, {len(self.live)} live)"


PROGRAM = RequestPart[ProgramState | None]("program", None)
JOB_ID = RequestPart("job_id", "")
"""As of AddRequest, for traces."""
IS_OVERDUE = RequestPart("is_overdue", False)
"""Whether a request is scheduled before all programs: it has waited for long, or is a part of one that runs."""
