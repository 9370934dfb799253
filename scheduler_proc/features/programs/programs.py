"""Programs: finds the program of each request, and follows its turns."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.protocol.wire.front_end_messages import (
    HINTS,
    MAX_JOB_ID,
    MAX_TOOL_NAME,
    CallsTool,
    EndReason,
    ProgramCounts,
    Statistics,
)
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.feature import Feature, Handler, Reserve
from quire.scheduler_proc.costs.costs import Costs
from quire.scheduler_proc.features.programs.limit import ProgramLimit, is_admitted
from quire.scheduler_proc.features.programs.match import Matcher
from quire.scheduler_proc.features.programs.pins import Pins
from quire.scheduler_proc.features.programs.program_state import IS_OVERDUE, JOB_ID, PROGRAM, ProgramState
from quire.scheduler_proc.messages.arrivals import Refusal
from quire.scheduler_proc.requests.events import Clock
from quire.scheduler_proc.requests.reasons import PreemptReason, WaitReason
from quire.scheduler_proc.requests.request import Request

_OVERDUE, _ADMITTED, _NEW, _OTHER = range(4)
"""Ranks in the queue under the policy ``program``."""
MAX_PROGRAMS = 4096
"""Programs that are remembered. Beyond, the least recently seen program without a request is forgotten."""


class Programs(Feature):
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

    name = "programs"
    policies = ("program", "continuum")

    def __init__(self, core: Core, costs: Costs) -> None:
        """Raises ConfigError if the policy does not fit the other settings."""
        config, kv, note = core.config, core.kv, core.decisions.note
        self._kv = kv
        self.pins = Pins(config, kv, costs, core.clock, note)
        self.limit: ProgramLimit | None = None
        if config.scheduling_policy == "program":
            self.limit = ProgramLimit(core)
        self.is_enabled = config.uses_programs
        if config.scheduling_policy in self.policies:
            core.table.waiting.rank = self._rank
        self.now = 0.0
        self._later_tokens = 0, 0
        """Prompt tokens of all turns but first ones, and hits among them."""
        self.known: dict[tuple[int, str | int], ProgramState] = {}
        self._paused: dict[ProgramState, None] = {}
        """Programs without a request, the least recently seen first."""
        self.found = Counter({**dict.fromkeys(HINTS, 0), "prefix": 0, "new": 0, "none": 0})
        self._matcher = Matcher(config.block_size)

    def _rank(self, request: Request) -> tuple[float, ...]:
        """Return the sort key of a request in the queue.

        Under ``continuum``: by the first arrival of its program. Under ``program``: overdue requests by arrival, then
        turns of admitted programs and then first turns, both by the first arrival of their program, then other turns,
        the shortest prompt first, because the cache has lost it.
        """
        program = PROGRAM.of(request)
        first = request.number if program is None else program.number or request.number
        if self.limit is None:
            return first, request.number
        if IS_OVERDUE.of(request):
            return _OVERDUE, request.number
        if program is not None and program.is_admitted:
            return _ADMITTED, first, request.number
        if program is None or not program.num_turns:
            return _NEW, first, request.number
        return _OTHER, request.num_prompt_tokens, request.number

    def consumes(self) -> Mapping[type, Handler]:
        return {Clock: self._clock, CallsTool: self._calls_tool}

    def _clock(self, event: Clock, client: int) -> None:
        """Set the time. It never goes back."""
        self.now = max(self.now, event.now)
        if self.limit is not None:
            self.limit.clock(self.now)
        self.pins.clock(self.now)

    def validate(self, event: Any, num_prompt_tokens: int) -> None:
        if len(event.job_id) > MAX_JOB_ID:
            text = f"job_id must have at most {MAX_JOB_ID} characters (got {len(event.job_id)})"
            raise Refusal("invalid_value", "job_id", text)
        if event.is_last_step and not event.job_id:
            raise Refusal("invalid_value", "is_last_step", "is_last_step needs a job_id, whose last step it is")

    def prepare(self, request: Request, event: Any, parent: Request | None) -> None:
        """Find the program of a request. A new program is forgotten unless ``arrived`` follows."""
        if event is None:  # a part of a search that runs, which no program limit may stop
            IS_OVERDUE.put(request, self.limit is not None)
            return
        if not request.generates:  # a vector is no turn of a conversation
            return
        JOB_ID.put(request, event.job_id)
        if parent is not None and event.job_id in ("", JOB_ID.of(parent)):
            PROGRAM.put(request, PROGRAM.of(parent))
        else:
            hashes, num_tokens = request.tokens.block_hashes, len(request.tokens)
            found = self.find(event.tenant, event.job_id, hashes, num_tokens, resubmitted=event.resubmitted)
            PROGRAM.put(request, found)

    def find(
        self, tenant: int, job_id: str, hashes: Sequence[bytes] = (), num_tokens: int = 0, *, resubmitted: bool = False
    ) -> ProgramState | None:
        """Return the program of an arrival, or None without one.

        An unknown job is the program that the request continues if no turn of that has named a job: the first response
        of a chain has no id when it is requested.

        Args:
            hashes: of the full blocks of its tokens; none without prefix caching.
            num_tokens: its tokens.
            resubmitted: a previous scheduler has accepted it, even if another one is the last step of its job.

        Raises:
            Refusal: the last step of this job has arrived.
        """
        if not self.is_enabled or not (job_id or hashes):
            return None
        program = self.known.get((tenant, job_id)) if job_id else None
        if program is None:
            program = self._matcher.find(tenant, hashes, num_tokens, contains_first=bool(job_id))
        if program is None:
            return ProgramState(0, tenant, job_id, self.now)
        if program.has_ended and not resubmitted:
            text = f"job_id {job_id!r} has ended: a request with is_last_step has arrived"
            raise Refusal("job_ended", "job_id", text)
        return program

    def arrived(self, request: Request, event: Any) -> None:
        """Add an accepted request to its program. The job id of one found by its prefix becomes that of the event."""
        program, job_id = PROGRAM.of(request), event.job_id
        if self.limit is not None:
            self.limit.waits(request, self.now)
        if program is None:
            self.found["none"] += self.is_enabled
            return
        named = event.hint if event.hint in HINTS else "job_id"
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
        program.has_ended |= event.is_last_step
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

    def admitted(self, request: Request, num_hit_tokens: int, *, is_first: bool) -> None:
        if self.limit is not None:
            self.limit.admitted(request, num_hit_tokens)
        if (program := PROGRAM.of(request)) is not None:
            if program.num_turns and is_first:  # otherwise it was preempted
                prompt, hits = self._later_tokens
                self._later_tokens = prompt + request.num_tokens, hits + num_hit_tokens
            self.pins.admitted(program)

    def refused(self, request: Request) -> None:
        """Continue the job of a request that is rejected: the client may send it again."""
        program = PROGRAM.of(request)
        if program is not None and program.last_request == (request.client, request.request_id):
            program.has_ended = False

    def ending(self, request: Request) -> None:
        if self.limit is not None:
            self.limit.forget(request)
        program = PROGRAM.of(request)
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

    def keeps_as(self, request: Request, reason: EndReason) -> int:
        program = PROGRAM.of(request)
        if program is not None and program.is_admitted:
            return program.number
        return self.pins.turn_ends(request, reason)

    def pinned(self) -> list[tuple[str, int]]:
        """Return (job id, number of blocks) of each program with pinned blocks, for traces."""
        pins, limit = self._kv.pins, self.limit
        if limit is not None:
            return [(limit.job_id(number), num_blocks) for number, num_blocks in pins.items()]
        return [(self.pins.pauses[number].job_id, num_blocks) for number, num_blocks in pins.items()]

    def reserve(self, request: Request) -> Reserve | None:
        """Keep the contents of admitted programs, which a request of another one would evict."""
        num_blocks = 0 if self.limit is None else self.limit.protected_blocks(request)
        return Reserve(num_blocks, WaitReason.PROGRAM_LIMIT) if num_blocks else None

    def version(self, request: Request) -> object:
        return 0 if self.limit is None else self.limit.protected_blocks(request)

    def spare(self, candidates: list[Request]) -> tuple[list[Request], PreemptReason | None]:
        """Spare the requests of admitted programs, or of those with a pin.

        If all candidates are of admitted programs, the youngest program loses: the oldest one keeps advancing, and all
        end one after the other.
        """
        if self.limit is not None:
            others = [each for each in candidates if not is_admitted(each)]
            if not others:
                numbers = [_number(each) for each in candidates]
                last = max(numbers)
                others = [each for each, number in zip(candidates, numbers, strict=True) if number == last]
            return others, PreemptReason.LAST_PROGRAM
        pins = self._kv.pins
        others = [each for each in candidates if _number(each) not in pins]
        return others or candidates, None

    def statistics(self, found: Statistics, *, is_listing: bool) -> Statistics:
        if not self.is_enabled:
            return found
        counts = ProgramCounts(len(self.known), dict(self.found), *self._later_tokens)
        if (limit := self.limit) is not None:
            counts = msgspec.structs.replace(
                counts,
                num_admitted=limit.num_admitted,
                num_waiting=limit.num_waiting,
                num_released=dict(limit.num_released),
            )
        return self.pins.add_to(msgspec.structs.replace(found, programs=counts))

    def _calls_tool(self, event: CallsTool, client: int) -> None:
        """Note which tool the answer of a request calls, if its program still waits for the result."""
        for program in reversed(self.known.values()):
            if program.last_request == (client, event.request_id):
                program.tool = event.tool[:MAX_TOOL_NAME]
                self.pins.tool_called(program)
                return

    def check(self) -> None:
        """Raise AssertionError unless the programs and their requests refer to each other."""
        for key, program in self.known.items():
            assert _key(program) == key, f"{program!r} has another key"
            assert all(PROGRAM.of(request) is program for request in program.live.values()), (
                f"{program!r}: wrong requests"
            )
        paused = [program for program in self.known.values() if program.is_paused]
        assert paused == list(self._paused), "programs without a request are not in the order in which they were seen"
        self._matcher.check()
        self.pins.check()
        if self.limit is not None:
            self.limit.check()


def _number(request: Request) -> int:
    """Return the number of a request's program, or 0 without one."""
    program = PROGRAM.of(request)
    return 0 if program is None else program.number


def _key(program: ProgramState) -> tuple[int, str | int]:
    return program.tenant, program.job_id or program.number
