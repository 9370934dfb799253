"""Beam searches: the requests that compute the beams of one, the step at which they all have a result, and the next."""

from dataclasses import dataclass, field
from functools import partial

from quire.scheduler_proc.adapters.adapters import Adapters
from quire.scheduler_proc.beams.search import BeamSearch, Candidates, Choice
from quire.scheduler_proc.core.forks import Forks
from quire.scheduler_proc.core.request_table import RequestTable
from quire.scheduler_proc.core.statistics import RecentDecisions
from quire.scheduler_proc.core.transfers import Transfers
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.requests.hooks import NO_HOOKS, SchedulerHooks
from quire.scheduler_proc.requests.reasons import Decision, WaitReason
from quire.scheduler_proc.requests.request import Request, RequestStatus


@dataclass(slots=True)
class BeamGroup:
    """A search.

    Attributes:
        leader: the client's request. It computes the prompt, and is then held until the search ends.
        beams: the requests that compute the beams, in the order of the search; the leader alone at first.
        answered: by handle, the candidates of the beams whose result has arrived.
    """

    leader: Request
    search: BeamSearch
    beams: list[Request]
    answered: dict[int, Candidates] = field(default_factory=dict)
    num_forked: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether all beams have a result."""
        return len(self.answered) == len(self.beams)


class Beams:
    """Turns a request with ``use_beam_search`` into requests for one token each, which are scheduled like others.

    A beam that continues one parent alone, or as the first, is its parent's request with one token more; the others
    are forked from it (forks.py), and a beam that nothing continues ends without a message. A beam with a result is
    not scheduled before all beams of its search have one. Until then it keeps its blocks, unless another beam of the
    search waits for blocks or a row.
    """

    def __init__(
        self,
        table: RequestTable,
        kv: KVCacheManager,
        decisions: RecentDecisions,
        hooks: SchedulerHooks,
        transfers: Transfers,
        forks: Forks,
        adapters: Adapters,
    ) -> None:
        self._table, self._kv = table, kv
        self._decisions = decisions
        self._hooks = hooks
        self._transfers = transfers
        self._forks = forks
        self._adapters = adapters
        self._groups: dict[int, BeamGroup] = {}
        """By handle of the leader."""

    def begin(self, request: Request) -> None:
        """Begin the search of a request that has just arrived, if it asks for one."""
        if request.sampling.use_beam_search:
            request.leader = request
            most = request.max_total_tokens - request.num_prompt_tokens
            search = BeamSearch(request.sampling, request.stop_tokens, most)
            self._groups[request.handle] = BeamGroup(request, search, [request])
            request.max_total_tokens = request.num_tokens + 1

    def wait(self, request: Request) -> bool:
        """Whether a request of a search has computed its part: the prompt, or its token of the current step."""
        if request.leader is None:
            return False
        group = self._groups[request.leader.handle]
        return request not in group.beams if request is group.leader else request.handle in group.answered

    def answered(self, request: Request, candidates: Candidates) -> BeamGroup | None:
        """Record the result of a beam. Returns its search if all beams have a result now."""
        assert request.leader is not None
        group = self._groups[request.leader.handle]
        group.answered[request.handle] = candidates
        request.max_total_tokens = request.num_tokens  # it needs no more steps
        return group if group.is_complete else None

    def advance(self, group: BeamGroup, choice: Choice) -> None:
        """Continue a search of which all beams have a result."""
        old, length = group.beams, group.beams[0].num_tokens
        group.answered.clear()
        group.beams = []
        continued: set[int] = set()
        for parent, token in zip(choice.parents, choice.tokens, strict=True):
            if parent in continued or old[parent] is group.leader:
                group.beams.append(self._fork(group, old[parent], length, token))
            else:
                group.beams.append(self._continue(old[parent], token))
                continued.add(parent)
        for index, beam in enumerate(old):
            if index not in continued and beam is not group.leader:
                self._drop(beam)

    def _continue(self, beam: Request, token: int) -> Request:
        self._table.choose(beam, token)
        beam.max_total_tokens = beam.num_tokens + 1
        if beam.handle in self._table.skipped_waiting and beam.wait_reason is WaitReason.BEAMS:
            self._table.release(beam)
        return beam

    def _fork(self, group: BeamGroup, parent: Request, length: int, token: int) -> Request:
        """Return a new beam with the first ``length`` tokens of another one, and ``token``."""
        leader = group.leader
        group.num_forked += 1
        beam = Request(
            client=-1,  # no front end knows it
            request_id=f"{leader.request_id}/{leader.handle}/{group.num_forked}",
            tokens=parent.tokens.fork(length),
            num_prompt_tokens=leader.num_prompt_tokens,
            sampling=leader.sampling,
            seed=leader.seed,
            stop_tokens=frozenset(),
            max_total_tokens=length + 2,
            priority=leader.priority,
            arrival=leader.arrival,
            tenant=leader.tenant,
            adapter=leader.adapter,
        )
        beam.introduced, beam.num_cached_tokens, beam.turn = True, 0, leader.turn
        beam.leader, beam.parent, beam.diverges = leader, parent, True
        beam.is_overdue = True  # as a part of a search that runs, which no program limit may stop
        self._table.add(beam, number=leader.number)
        if self._hooks is not NO_HOOKS:
            beam.tokens.follow(partial(self._hooks.block_filled, beam.handle))
        beam.tokens.append(token)
        self._forks.hold(beam)
        return beam

    def settle(self) -> None:
        """Hold the beams that need no step but are in the queue after a preemption, before a step is planned.

        While a beam waits for blocks or a row, those with a result release their own, which may be what it lacks.
        """
        for group in self._groups.values():
            unanswered = [beam for beam in group.beams if beam.handle not in group.answered]
            are_running = all(beam.status is RequestStatus.RUNNING for beam in unanswered)
            for beam in group.beams:
                if beam.handle in group.answered and not (are_running and beam.status is RequestStatus.RUNNING):
                    self._suspend(beam)

    def suspend_leaders(self) -> None:
        """Take blocks and row of each leader whose beams have been forked. Those for which there was no room wait."""
        for group in self._groups.values():
            if self.wait(group.leader):
                self._suspend(group.leader)

    def _suspend(self, request: Request) -> None:
        """Hold a request until its search continues or ends."""
        if request.status is RequestStatus.RUNNING:
            self._kv.cache_blocks(request, request.num_computed_tokens)
            self._table.preempt(request)
            self._kv.free(request)
        if request in self._table.waiting:
            self._table.hold(request, WaitReason.BEAMS)
            step = self._table.steady_decode.clock.sent + 1
            self._decisions.note(Decision(step, "wait", request.request_id, WaitReason.BEAMS))
            self._forks.orphan(request)

    def forget(self, leader: Request) -> None:
        """End the beams of a request that ends."""
        group = self._groups.pop(leader.handle, None)
        if group is not None:
            for beam in group.beams:
                if beam is not leader:
                    self._drop(beam)

    def _drop(self, beam: Request) -> None:
        if beam.status is RequestStatus.RUNNING:
            self._kv.cache_blocks(beam, min(beam.num_computed_tokens, beam.num_tokens))
            self._kv.free(beam)
        self._transfers.forget(beam)
        self._forks.forget(beam)
        self._table.end(beam, RequestStatus.FINISHED_ABORTED)
        self._adapters.ended(beam)

    def check(self) -> None:
        """Raise AssertionError unless exactly the beams of searches have a leader, and all have the same length."""
        beams = [beam for group in self._groups.values() for beam in {*group.beams, group.leader}]
        led = [request for request in self._table.requests.values() if request.leader is not None]
        assert set(beams) == set(led) and len(beams) == len(led), "a beam belongs to no search"
        for group in self._groups.values():
            assert group.answered.keys() <= {beam.handle for beam in group.beams}, "a beam that ended has a result"
            assert len({beam.num_tokens for beam in group.beams}) == 1, "beams of one search differ in length"
            assert not group.is_complete, "a search with all results was not continued"
