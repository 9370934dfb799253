"""Programs: finds the program of each request, and follows its turns."""

from quire.protocol.config import EngineConfig
from quire.scheduler_proc.programs.pins import Pins
from quire.scheduler_proc.requests.program_state import ProgramState
from quire.scheduler_proc.requests.request import Program, Request

MAX_PROGRAMS = 4096
"""Programs that are remembered. Beyond, the one that was not seen for the longest time and has no request is
forgotten."""


class JobEnded(Exception):
    """A request names a job whose last step has arrived."""


class Programs:
    """Owns the programs, by job id. Without a policy that needs them, nothing is remembered.

    Attributes:
        is_enabled: whether a policy needs programs.
        now: seconds, as of the last ``Clock``.
        pins: blocks that are kept between two turns.
        known: programs by (tenant, job id), the one that was not seen for the longest time first.
    """

    def __init__(self, config: EngineConfig, pins: Pins) -> None:
        self.is_enabled = config.uses_programs
        self.pins = pins
        self.now = 0.0
        self.known: dict[tuple[int, str], Program] = {}

    def clock(self, now: float) -> None:
        """Set the time. It never goes back."""
        self.now = max(self.now, now)
        self.pins.clock(self.now)

    def find(self, tenant: int, job_id: str) -> Program | None:
        """Return the program of an arrival, or None without one. A new program is forgotten unless ``arrived`` follows.

        Raises:
            JobEnded: the last step of this job has arrived.
        """
        if not self.is_enabled or not job_id:
            return None
        program = self.known.get((tenant, job_id))
        if program is None:
            return ProgramState(0, tenant, job_id, self.now)
        if program.has_ended:
            raise JobEnded(f"job_id {job_id!r} has ended: a request with is_last_step has arrived")
        return program

    def arrived(self, request: Request, *, is_last_step: bool) -> None:
        """Add an accepted request to its program."""
        program = request.program
        if program is None:
            return
        self.pins.returned(program)
        key = program.tenant, program.job_id
        program.number = program.number or request.number
        self.known.pop(key, None)
        self.known[key] = program
        program.live[request.handle] = request
        program.last_request = request.client, request.request_id
        program.last_seen = self.now
        program.num_tokens = request.num_tokens
        program.has_ended, program.tool = is_last_step, ""
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        while len(self.known) > MAX_PROGRAMS:
            oldest = next((key for key, program in self.known.items() if program.is_paused), None)
            if oldest is None:
                return
            self.pins.forget(self.known.pop(oldest))

    def admitted(self, request: Request, num_hit_tokens: int) -> None:
        """Note that a request is admitted, with this many tokens from the prefix cache."""
        if (program := request.program) is not None:
            program.num_served_tokens += request.num_tokens - num_hit_tokens
            self.pins.admitted(program)

    def ended(self, request: Request) -> None:
        """Note that a request has ended."""
        program = request.program
        if program is None or program.live.pop(request.handle, None) is None:
            return
        program.num_turns += 1
        program.num_tokens = request.num_tokens
        program.num_served_tokens += request.num_output_tokens
        program.last_seen = self.now
        self.pins.turn_ended(program)

    def calls_tool(self, client: int, request_id: str, tool: str) -> None:
        """Note which tool the answer of a request calls, if its program still waits for the result."""
        for program in reversed(self.known.values()):
            if program.last_request == (client, request_id):
                program.tool = tool
                self.pins.tool_called(program)
                return

    def check(self) -> None:
        """Raise AssertionError unless the programs and their requests refer to each other."""
        for (tenant, job_id), program in self.known.items():
            assert (program.tenant, program.job_id) == (tenant, job_id), f"{program!r} has another key"
            assert all(request.program is program for request in program.live.values()), f"{program!r}: wrong requests"
        self.pins.check()
