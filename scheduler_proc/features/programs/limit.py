"""The limit of programs: which programs keep their contexts in the KV pool between their turns."""

from bisect import bisect_left, insort

from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.features.programs.program_state import IS_OVERDUE, PROGRAM, ProgramState
from quire.scheduler_proc.features.programs.tools import PauseCounts
from quire.scheduler_proc.requests.reasons import Decision
from quire.scheduler_proc.requests.request import Request, RequestStatus
from quire.scheduler_proc.requests.request_queue import RequestQueue

ADMIT_SHARE = 0.8
"""Share of the pool that the contexts of admitted programs may fill when another program is admitted."""
KEEP_SHARE = 1.0
"""Share of the pool above which the youngest admitted program is released, because contexts have grown."""
GROWTH = 1.1
"""Size for which room is kept, by the size of the context now: contexts grow with each turn."""
FIRST_PATIENCE_S = 200.0
"""Seconds after which the first turn of a program is scheduled before all others."""
PATIENCE_S, PATIENCE_WAITS = 300.0, 2.5
"""Any other turn is scheduled before all others after these seconds, and this many times the mean wait. Not all turns
can wait for a multiple of the mean: the rule limits itself, and leaves the order as it is while all wait."""
WAIT_SHARE = 1 / 128
"""Weight of the newest turn in the mean wait."""
IDLE_QUANTILE, IDLE_FACTOR = 0.95, 1.5
"""An admitted program may pause for this many times the quantile of pauses before another one takes its place."""
MIN_IDLE_S, MAX_IDLE_S = 10.0, 600.0
"""Bounds of that pause, which is MAX_IDLE_S while few pauses are known."""
IDLE_CHECK_S = 1.0
"""Seconds between two searches for programs that have been idle for too long."""
WINDOW_STEPS = 256
"""Fewest steps after which the number of requests beside the pins is adapted."""
WINDOW_SHARE = 0.2
"""Weight of the newest window in the share of recomputed tokens."""
MUCH_RECOMPUTED, LITTLE_RECOMPUTED = 0.1, 0.05
"""Shares of the token budget that recompute lost contexts, above and below which that number falls and grows."""
MAX_CANDIDATES = 16
"""Programs, the oldest ones, that are considered when there is room for another one."""


class ProgramLimit:
    """Admits programs in the order of their first arrival while their contexts fit into the pool together.

    The contexts of admitted programs are pinned between turns, and their turns are scheduled before others. Each tenant
    can run ``max_others`` requests beside those, even if pinned contents are evicted for them; more only beside the
    pins, for which no running request is preempted. So a program that is not admitted advances too.

    ``max_others`` adapts: it is halved while steps recompute many tokens that the cache has lost, down to one, and
    grows while they recompute few. Long contexts are then kept, and short ones do not stop others from running.

    A program that has paused for longer than most pauses last makes room for others that wait. No turn waits for ever:
    a first turn is *overdue*, and scheduled first, after FIRST_PATIENCE_S; another one after PATIENCE_S and a
    multiple of ``wait``, because each evicts contexts that others need.

    Invariants (``check``): ``size`` is the number of blocks of the admitted programs; a candidate is not admitted and
    has requests.

    Attributes:
        size: blocks for which the admitted programs count.
        wait: mean seconds from the arrival of recent turns to their first admission.
        max_others: requests of other programs that may run at the cost of pins, from 1 to the rows of a step.
        recomputed: share of the budget of recent steps for tokens that the turn before had, and the cache has lost.
        num_released: number of released programs by reason.
    """

    def __init__(self, core: Core) -> None:
        config = core.config
        self._cache, self._waiting, self._num_blocks = core.kv, core.table.waiting, core.kv.pool.num_usable_blocks
        self._max_programs = config.max_programs
        """Most programs to admit, of any size; 0: as many as fit."""
        self._rows, self._budget = config.max_num_seqs, config.step_tokens
        self._clock, self._note = core.clock, core.decisions.note
        self._admitted: dict[int, ProgramState] = {}
        self._sizes: dict[int, int] = {}
        self._candidates: list[int] = []
        self._programs: dict[int, ProgramState] = {}
        """Candidates by number."""
        self._first_turns: dict[int, tuple[float, Request]] = {}
        self._turns: dict[int, tuple[float, Request]] = {}
        """Requests that are not overdue, with their arrival, by handle, the oldest first. Those of no program are first
        turns. Running ones are among them, because they wait again after a preemption."""
        self._others: dict[int, Request] = {}
        """Running requests that may be of programs that are not admitted."""
        self._pauses = PauseCounts()
        self._now = self._idle_checked = self.wait = 0.0
        self._new: dict[int, tuple[float, int]] = {}
        """By handle of a request that was not admitted yet: its arrival, and the tokens of the context before it."""
        self._num_missed = self._window_began = 0
        self.max_others, self.recomputed = config.max_num_seqs, 0.0
        self.size = 0
        self.num_released = dict.fromkeys(("idle", "grown", "ended", "forgotten"), 0)

    @property
    def num_admitted(self) -> int:
        return len(self._admitted)

    @property
    def num_waiting(self) -> int:
        """Number of programs with requests that are not admitted."""
        return len(self._candidates)

    @property
    def idle_limit(self) -> float:
        """Seconds of a pause after which an admitted program makes room for others."""
        limit = IDLE_FACTOR * self._pauses.quantile(IDLE_QUANTILE, MAX_IDLE_S)
        return min(max(limit, MIN_IDLE_S), MAX_IDLE_S)

    def protected_blocks(self, request: Request) -> int:
        """Return how many free blocks a waiting request must leave, because admitted programs need their contents."""
        if not self._admitted or len(self._others) < self.max_others or IS_OVERDUE.of(request) or is_admitted(request):
            return 0  # most often by the length, so that a step does not look at each running request
        num_others = 0
        for handle, other in list(self._others.items()):
            if other.status is not RequestStatus.RUNNING or is_admitted(other):
                del self._others[handle]
            else:
                num_others += other.account == request.account
        return sum(self._cache.pins.values()) if num_others >= self.max_others else 0

    def job_id(self, number: int) -> str:
        """Return the job id of an admitted program."""
        return self._admitted[number].job_id

    # ---- what happens to requests

    def waits(self, request: Request, now: float) -> None:
        """Note that a request was accepted."""
        program, self._now = PROGRAM.of(request), now
        is_later = program is not None and program.num_turns > 0
        (self._turns if is_later else self._first_turns)[request.handle] = now, request
        self._new[request.handle] = now, program.num_tokens if program is not None and is_later else 0

    def arrived(self, program: ProgramState, pause: float) -> None:
        """Consider the program of a request that was accepted. ``pause``: since its last turn; negative without one."""
        if pause >= 0:
            self._pauses.add(pause, was_late=False)
        if program.is_admitted:
            self._resize(program)
        elif program.number not in self._programs:
            insort(self._candidates, program.number)
            self._programs[program.number] = program
        self._admit()

    def admitted(self, request: Request, num_hit_tokens: int) -> None:
        """Note that a request runs now, with this many tokens from the prefix cache."""
        if (new := self._new.pop(request.handle, None)) is not None:
            self.wait += WAIT_SHARE * (self._now - new[0] - self.wait)
            self._num_missed += max(min(new[1], request.num_tokens) - num_hit_tokens, 0)
        self._adapt()
        if request.client >= 0 and not is_admitted(request):  # the ending of others is not reported
            self._others[request.handle] = request

    def _adapt(self) -> None:
        """Adapt ``max_others``: it grows by a quarter, and is halved."""
        if (steps := self._clock.sent - self._window_began) < WINDOW_STEPS:
            return
        share = self._num_missed / (steps * self._budget)
        self.recomputed += WINDOW_SHARE * (share - self.recomputed)
        self._num_missed, self._window_began = 0, self._clock.sent
        if self.recomputed > MUCH_RECOMPUTED:
            self.max_others = max(self.max_others // 2, 1)
        elif self.recomputed < LITTLE_RECOMPUTED:
            self.max_others = min(self.max_others + max(self.max_others // 4, 1), self._rows)

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._new.pop(request.handle, None)
        for line in (self._first_turns, self._turns, self._others):
            line.pop(request.handle, None)

    def ended(self, program: ProgramState) -> None:
        """Note that a request has ended, which is not among the live ones of its program any more."""
        self._rerank(program)  # what was its first turn is one of several now
        if program.is_paused:
            self._remove_candidate(program)
            if program.has_ended:
                self.release(program, "ended")
        if program.is_admitted:
            self._resize(program)
        self._admit()

    def clock(self, now: float) -> None:
        """Find turns that have waited, and programs that have paused, for too long."""
        self._now = now
        while len(self._waiting) and (overdue := self._overdue(now)) is not None:
            IS_OVERDUE.put(overdue, True)
            self._waiting.rerank(overdue)
        if len(self._waiting) and now - self._idle_checked >= IDLE_CHECK_S:
            self._idle_checked = now
            since = now - self.idle_limit
            for number in sorted(self._admitted):
                program = self._admitted[number]
                if program.is_paused and program.last_seen < since:
                    self.release(program, "idle")
            self._admit()

    def _overdue(self, now: float) -> Request | None:
        """Return a waiting request to schedule first, and forget its arrival; or None."""
        overdue = _pop_waiting(self._first_turns, now - FIRST_PATIENCE_S, self._waiting)
        return overdue or _pop_waiting(self._turns, now - PATIENCE_S - PATIENCE_WAITS * self.wait, self._waiting)

    # ---- admitted programs

    def release(self, program: ProgramState, reason: str) -> None:
        """Let the contents of a program be evicted like others, if it is admitted."""
        if self._admitted.pop(program.number, None) is None:
            return
        self.size -= self._sizes.pop(program.number)
        program.is_admitted = False
        self.num_released[reason] += 1
        self._cache.unpin(program.number)
        self._others.update((r.handle, r) for r in program.live.values() if r.status is RequestStatus.RUNNING)
        if program.live:
            insort(self._candidates, program.number)
            self._programs[program.number] = program
        self._rerank(program)
        self._decided(program, reason)

    def _admit(self) -> None:
        """Release the youngest programs while contexts exceed the pool, and admit the oldest that fit."""
        room = int(ADMIT_SHARE * self._num_blocks)
        while self.size > KEEP_SHARE * self._num_blocks and len(self._admitted) > 1 and not self._max_programs:
            self.release(self._admitted[max(self._admitted)], "grown")
        for number in self._candidates[:MAX_CANDIDATES]:
            program = self._programs[number]
            size = self._size(program)
            if len(self._admitted) < self._max_programs or (not self._max_programs and self.size + size <= room):
                self._remove_candidate(program)
                self._admitted[number] = program
                self._sizes[number] = size
                self.size += size
                program.is_admitted = True
                self._rerank(program)
                self._decided(program, "admitted")

    def _decided(self, program: ProgramState, reason: str) -> None:
        detail = f"{self.size} of {self._num_blocks} blocks are for {self.num_admitted} programs"
        self._note(Decision(self._clock.sent + 1, "program", program.last_request[1], reason, detail=detail))

    def _size(self, program: ProgramState) -> int:
        """Return the blocks of the contexts of a program; parallel turns have one each.

        Outputs count from the end of their turn: which of them are known while a result is applied depends on details.
        """
        tokens = max(sum(request.num_prompt_tokens for request in program.live.values()), program.num_tokens)
        return self._cache.num_blocks_for(int(GROWTH * tokens))

    def _resize(self, program: ProgramState) -> None:
        size = max(self._size(program), self._cache.pins.get(program.number, 0))
        self.size += size - self._sizes[program.number]
        self._sizes[program.number] = size

    def _remove_candidate(self, program: ProgramState) -> None:
        if self._programs.pop(program.number, None) is not None:
            del self._candidates[bisect_left(self._candidates, program.number)]

    def _rerank(self, program: ProgramState) -> None:
        for request in program.live.values():
            if request in self._waiting:
                self._waiting.rerank(request)

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert self._admitted.keys() == self._sizes.keys() and self.size == sum(self._sizes.values()), "wrong size"
        assert all(program.is_admitted for program in self._admitted.values()), "an admitted program does not know it"
        assert self._cache.pins.keys() <= self._admitted.keys(), "contents of other programs are pinned"
        assert self._candidates == sorted(self._programs), "candidates are not in order of first arrival"
        for program in self._programs.values():
            assert program.live and not program.is_admitted, f"{program!r} is a candidate without requests, or admitted"
        expected = [request for _, request in (*self._first_turns.values(), *self._turns.values())]
        for request in (*expected, *self._others.values()):
            assert not request.status.is_finished, f"{request!r} has ended, and is not forgotten"


def is_admitted(request: Request) -> bool:
    """Whether a request is a turn of a program that is admitted."""
    program = PROGRAM.of(request)
    return program is not None and program.is_admitted


def _pop_waiting(line: dict[int, tuple[float, Request]], until: float, waiting: RequestQueue) -> Request | None:
    """Remove and return the oldest request that has arrived by then and is not held; or None."""
    for handle, (arrived, request) in line.items():
        if arrived > until:
            return None
        if request in waiting:
            del line[handle]
            return request
    return None
