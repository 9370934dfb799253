"""Job: the agent or conversation that a client names for a request."""

import re
from dataclasses import dataclass, replace

from quire.protocol.errors import InvalidRequest, printable
from quire.protocol.wire.front_end_messages import HINTS, MAX_JOB_ID

JOB_ID_PATTERN = rf"^[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{{1,{MAX_JOB_ID}}}\Z"
JOB_ID_RANGE = f"1 to {MAX_JOB_ID} characters, none of them a control character"


@dataclass(frozen=True, slots=True)
class Job:
    """What a client says about the job of a request.

    Attributes:
        id: its id, or "" if the client names none.
        is_last_step: the request is the last one of its job.
        hint: how the client names it, one of HINTS; "" without an id.
    """

    id: str = ""
    is_last_step: bool = False
    hint: str = ""

    def or_by(self, hint: str, job_id: str) -> "Job":
        """Return this job, or that with ``job_id`` if ``hint`` is earlier in HINTS than what this one is named by."""
        is_better = not self.id or HINTS.index(hint) < HINTS.index(self.hint)
        return replace(self, id=job_id, hint=hint) if job_id and is_better else self

    def continued(self) -> "Job":
        """Return the job of a request that others of this job follow."""
        return replace(self, is_last_step=False) if self.is_last_step else self


NO_JOB = Job()


def check_job_id(name: str, value: object) -> str:
    """Return ``value``, or raise InvalidRequest unless it can be a job id. ``name``: of the field that has it."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string of {JOB_ID_RANGE} (got {printable(value)})", name)
    if not re.search(JOB_ID_PATTERN, value):
        raise InvalidRequest(f"{name} must have {JOB_ID_RANGE} (got {len(value)} characters)", name)
    return value
