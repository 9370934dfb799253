"""Programs: finds the program of each request, and follows its turns."""

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.wire.front_end_messages import HINTS, MAX_TOOL_NAME, EndReason, ProgramCounts, Statistics
from quire.scheduler_proc.costs.costs import Costs
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.programs.limit import Cache, ProgramLimit, Queue
from quire.scheduler_proc.programs.match import Matcher
from quire.scheduler_proc.programs.pins import Pins
from quire.scheduler_proc.requests.program_state import ProgramState
from quire.scheduler_proc.requests.reasons import Decision
from quire.scheduler_proc.requests.request import Program, Request
from quire.scheduler_proc.requests.step_clock import StepClock

MAX_PROGRAMS = 4096
"""Programs that are remembered. Beyond, the least recently seen program without a request is forgotten."""


def make_programs(
    config: EngineConfig,
    kv: KVCacheManager,
    waiting: Queue,
    costs: Costs,
    clock: StepClock,
    note: Callable[[Decision], None],
) -> "Programs":
    """Return the programs with what the policy of ``config`` needs.

    Raises:
        ConfigError: the policy does not fit the other settings.
    """
    limit = None
    if config.scheduling_policy == "program":
        limit = ProgramLimit(kv, waiting, kv.pool.num_usable_blocks, config, clock, note)
    return Programs(config, Pins(config, kv, costs, clock, note), kv, limit)


class JobEnded(Exception):
    """A request names a job whose last step has arrived."""


class Programs:
    """Owns the programs. Without a policy that needs them, nothing is remembered.

    Attributes:
        is_enabled: whether a policy needs programs.
        now: seconds, as of the last ``Clock``.
        pins: blocks that are kept between two turns.
        limit: the programs that are admitted; None without ``--scheduling-policy program``.
        known: programs by (tenant, job id), or by (tenant, number) if no request has named a job; the least
            recently seen first.
        found: number of turns by how their program was found: a hint, ``prefix``, ``new`` or ``none``.
    """

    def __init__(
        self,
        config: EngineConfig,
        pins: Pins,
        cache: Cache,
        limit: ProgramLimit | None = None,
    ) -> None:
        """
        Args:
            cache: the blocks that are pinned.
            limit: what decides which programs are admitted, or None.
        """
        self._cache = cache
        self.limit = limit
        self.is_enabled = config.uses_programs
        self.pins = pins
        self.now = 0.0
        self._later_tokens = 0, 0
        """Prompt tokens of all turns but first ones, and hits among them."""
        self.known: dict[tuple[int, str | int], Program] = {}
        self._paused: dict[Program, None] = {}
        """Programs without a request, the least recently seen first."""
        self.found = Counter({**dict.fromkeys(HINTS, 0), "prefix": 0, "new": 0, "none": 0})
        self._matcher = Matcher(config.block_size)

    def clock(self, now: float) -> None:
        """Set the time. It never goes back."""
        self.now = max(self.now, now)
        if self.limit is not None:
            self.limit.clock(self.now)
        self.pins.clock(self.now)

    def find(
        self, tenant: int, job_id: str, hashes: Sequence[bytes] = (), num_tokens: int = 0, *, resubmitted: bool = False
    ) -> Program | None:
        """Return the program of an arrival, or None without one. A new program is forgotten unless ``arrived`` follows.

        An unknown job is the program that the request continues if no turn of that has named a job: the first response
        of a chain has no id when it is requested.

        Args:
            hashes: of the full blocks of its tokens; none without prefix caching.
            num_tokens: its tokens.
            resubmitted: a previous scheduler has accepted it, even if another one is the last step of its job.

        Raises:
            JobEnded: the last step of this job has arrived.
        """
        if not self.is_enabled or not (job_id or hashes):
            return None
        program = self.known.get((tenant, job_id)) if job_id else None
        if program is None:
            program = self._matcher.find(tenant, hashes, num_tokens, contains_first=bool(job_id))
        if program is None:
            return ProgramState(0, tenant, job_id, self.now)
        if program.has_ended and not resubmitted:
            raise JobEnded(f"job_id {job_id!r} has ended: a request with is_last_step has arrived")
        return program

    def arrived(self, request: Request, *, job_id: str = "", hint: str = "", is_last_step: bool = False) -> None:
        """Add an accepted request to its program.

        Args:
            job_id: the job that it names; that of a program found by its prefix becomes this one.
            hint: how its client named the job, one of HINTS.
        """
        program = request.program
        if self.limit is not None:
            self.limit.waits(request, self.now)
        if program is None:
            self.found["none"] += self.is_enabled
            return
        named = hint if hint in HINTS else "job_id"
        self.found[named if job_id else "prefix" if program.number else "new"] += 1
        self.known.pop(_key(program), None)
        self._paused.pop(program, None)
        self.pins.returned(program)
        program.number = program.number or request.number
        if job_id and not program.job_id:
            self._matcher.forget(program)
            program.job_id = job_id
        self.known[_key(program)] = program
        if not program.job_id:
            self._matcher.arrived(program, request.block_hashes, request.num_tokens)
        pause = self.now - program.last_seen if program.num_turns and program.is_paused else -1.0
        program.live[request.handle] = request
        program.last_request = request.client, request.request_id
        program.last_seen = self.now
        program.num_tokens = request.num_tokens
        program.has_ended |= is_last_step
        program.tool = ""
        if self.limit is not None:
            self.limit.arrived(program, pause)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        while len(self.known) > MAX_PROGRAMS and self._paused:
            program = next(iter(self._paused))
            del self._paused[program], self.known[_key(program)]
            self._matcher.forget(program)
            self.pins.forget(program)
            if self.limit is not None:
                self.limit.release(program, "forgotten")

    def admitted(self, request: Request, num_hit_tokens: int) -> None:
        """Note that a request is admitted, with this many tokens from the prefix cache."""
        if self.limit is not None:
            self.limit.admitted(request, num_hit_tokens)
        if (program := request.program) is not None:
            if program.num_turns and request.num_cached_tokens < 0:  # otherwise it was preempted
                prompt, hits = self._later_tokens
                self._later_tokens = prompt + request.num_tokens, hits + num_hit_tokens
            self.pins.admitted(program)

    def refused(self, request: Request) -> None:
        """Note that an accepted request is rejected after all. Its job continues: the client may send it again."""
        program = request.program
        if program is not None and program.last_request == (request.client, request.request_id):
            program.has_ended = False
        self.ended(request)

    def ended(self, request: Request) -> None:
        """Note that a request has ended."""
        if self.limit is not None:
            self.limit.forget(request)
        program = request.program
        if program is None or program.live.pop(request.handle, None) is None:
            return
        program.num_turns += 1
        self._matcher.ended(program, request.block_hashes)
        program.num_tokens = request.num_tokens
        program.last_seen = self.now
        if program.is_paused:
            self._paused[program] = None
            self.known[_key(program)] = self.known.pop(_key(program))
        self.pins.turn_ended(program)
        if self.limit is not None:
            self.limit.ended(program)

    def pin_of(self, request: Request, reason: EndReason) -> int:
        """Return the number of the pin with which the blocks of a request that ends are freed, or 0."""
        program = request.program
        if program is not None and program.is_admitted:
            return program.number
        return self.pins.turn_ends(request, reason)

    def pinned(self) -> list[tuple[str, int]]:
        """Return (job id, number of blocks) of each program with pinned blocks, for traces."""
        pins, limit = self._cache.pins, self.limit
        if limit is not None:
            return [(limit.job_id(number), num_blocks) for number, num_blocks in pins.items()]
        return [(self.pins.pauses[number].job_id, num_blocks) for number, num_blocks in pins.items()]

    def protected_blocks(self, request: Request) -> int:
        """Return how many free blocks a waiting request must leave to the contents of admitted programs."""
        return 0 if self.limit is None else self.limit.protected_blocks(request)

    def add_to(self, statistics: Statistics) -> Statistics:
        """Return ``statistics`` with the counts of programs."""
        if not self.is_enabled:
            return statistics
        counts = ProgramCounts(len(self.known), dict(self.found), *self._later_tokens)
        if (limit := self.limit) is not None:
            counts = msgspec.structs.replace(
                counts,
                num_admitted=limit.num_admitted,
                num_waiting=limit.num_waiting,
                num_released=dict(limit.num_released),
            )
        return self.pins.add_to(msgspec.structs.replace(statistics, programs=counts))

    def calls_tool(self, client: int, request_id: str, tool: str) -> None:
        """Note which tool the answer of a request calls, if its program still waits for the result."""
        for program in reversed(self.known.values()):
            if program.last_request == (client, request_id):
                program.tool = tool[:MAX_TOOL_NAME]
                self.pins.tool_called(program)
                return

    def check(self) -> None:
        """Raise AssertionError unless the programs and their requests refer to each other."""
        for key, program in self.known.items():
            assert _key(program) == key, f"{program!r} has another key"
            assert all(request.program is program for request in program.live.values()), f"{program!r}: wrong requests"
        paused = [program for program in self.known.values() if program.is_paused]
        assert paused == list(self._paused), "programs without a request are not in the order in which they were seen"
        self._matcher.check()
        self.pins.check()
        if self.limit is not None:
            self.limit.check()


def _key(program: Program) -> tuple[int, str | int]:
    return program.tenant, program.job_id or program.number
