"""Beam searches: the requests that compute the beams of one, the step at which they all have a result, and the next."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from quire.protocol.wire.front_end_messages import EndReason, Hypothesis
from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.endings import Ending, Endings
from quire.scheduler_proc.core.feature import Feature
from quire.scheduler_proc.core.step import StepPlan
from quire.scheduler_proc.features.beams.search import BeamChoice, BeamSearch, Candidates
from quire.scheduler_proc.features.forks import Forks
from quire.scheduler_proc.messages.arrivals import Refusal
from quire.scheduler_proc.messages.results import Sampled
from quire.scheduler_proc.requests.hooks import NO_HOOKS
from quire.scheduler_proc.requests.reasons import Decision, WaitReason
from quire.scheduler_proc.requests.request import Request, RequestStatus


class SearchEnding(NamedTuple):
    """``hypotheses``: the outputs of a search, the best first; ``num_output_tokens``: tokens of all of them."""

    ending: Ending
    num_output_tokens: int
    hypotheses: list[Hypothesis]


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


@runtime_checkable
class SearchEndings(Protocol):
    """Endings that are not decided by the tokens, but recorded, and how searches continued."""

    def search_outcome(self, group: BeamGroup) -> BeamChoice | SearchEnding:
        """Return how a search continues of which all beams have a result."""
        ...


def search_outcome(group: BeamGroup) -> BeamChoice | SearchEnding:
    """Return how a search continues of which all beams have a result, by their candidates."""
    choice = group.search.step([group.answered[beam.handle] for beam in group.beams])
    if choice is not None:
        return choice
    found = group.search.ended
    if not found:
        return SearchEnding(Ending(EndReason.ERROR, detail="request_failed: no token is allowed"), 0, [])
    ending = Ending(EndReason(found[0].reason), found[0].stop_reason)
    return SearchEnding(ending, sum(len(each.tokens) for each in found), found)


class Beams(Feature):
    """Turns a request with ``use_beam_search`` into requests for one token each, which are scheduled like others.

    A beam that continues one parent alone, or as the first, is its parent's request with one token more; the others
    are forked from it (forks.py), and a beam that nothing continues ends without a message. A beam with a result is
    not scheduled before all beams of its search have one. Until then it keeps its blocks, unless another beam of the
    search waits for blocks or a row.
    """

    name = "beams"

    def __init__(self, core: Core, forks: Forks) -> None:
        self._core, self._table, self._kv, self._forks = core, core.table, core.kv, forks
        self._groups: dict[int, BeamGroup] = {}
        """By handle of the leader."""
        self._chosen: dict[int, int] = {}
        """By handle, the tokens of beams on the workers, which they have not sampled and get with the next step."""

    def validate(self, event: Any, num_prompt_tokens: int) -> None:
        width, most = event.sampling.beam_width, self._core.config.max_num_seqs
        if width is not None and width > most and len(event.prompt_token_ids):  # a replay may have fewer rows
            text = f"beam_width must be from 1 to {most}, the engine's max_num_seqs (got {width})"
            raise Refusal("invalid_value", "beam_width", text)

    def check_parent(self, event: Any, parent: Request) -> None:
        if event.sampling.use_beam_search or parent.part_of is not None:
            text = "use_beam_search cannot be combined with a fork, neither of this request nor of the one to fork"
            raise Refusal("unsupported_value", "use_beam_search", text)

    def arrived(self, request: Request, event: Any) -> None:
        """Begin the search of a request that has just arrived, if it asks for one."""
        if request.sampling.use_beam_search:
            request.part_of = request
            most = request.max_total_tokens - request.num_prompt_tokens
            search = BeamSearch(request.sampling, request.stop_tokens, most)
            self._groups[request.handle] = BeamGroup(request, search, [request])
            request.max_total_tokens = request.num_tokens + 1

    def _has_answer(self, request: Request) -> bool:
        """Whether a request of a search has computed its part: the prompt, or its token of the current step."""
        leader = request.part_of
        if leader is None:
            return False
        group = self._groups[leader.handle]
        return request not in group.beams if request is group.leader else request.handle in group.answered

    def may_hold(self, request: Request) -> bool:
        """A request that waits for its search has nothing left to compute before that goes on."""
        return not self._has_answer(request)

    # ---- results

    def takes(self, request: Request, sampled: Sampled, position: int, endings: Endings) -> bool:
        """Record the result of a beam, and continue its search if all beams have one now."""
        leader = request.part_of
        if leader is None:
            return False
        self._core.stats.generation_tokens += 1
        group = self._groups[leader.handle]
        group.answered[request.handle] = sampled.candidates(position)
        request.max_total_tokens = request.num_tokens  # it needs no more steps
        if group.is_complete:
            decide = endings.search_outcome if isinstance(endings, SearchEndings) else search_outcome
            self._continue_search(group, decide(group))
        return True

    def _continue_search(self, group: BeamGroup, outcome: BeamChoice | SearchEnding) -> None:
        if isinstance(outcome, BeamChoice):
            self.advance(group, outcome)
            self._core.hooks.continued(group.leader.handle, outcome.parents)
            return
        self._core.outputs.hypotheses(group.leader, outcome.hypotheses)
        ending, counted = outcome.ending, outcome.num_output_tokens
        self._core.finish(
            group.leader, ending.reason, stop_reason=ending.stop_reason, detail=ending.detail, num_output_tokens=counted
        )

    def advance(self, group: BeamGroup, choice: BeamChoice) -> None:
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
        beam.tokens.append(token)
        if beam.on_worker:
            self._chosen[beam.handle] = token
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
        )
        beam.introduced, beam.num_cached_tokens = True, 0
        beam.part_of = leader
        for feature in self._core.calls.prepare:
            feature.prepare(beam, None, leader)
        self._table.add(beam, number=leader.number)
        if self._core.hooks is not NO_HOOKS:
            beam.tokens.follow(partial(self._core.hooks.block_filled, beam.handle))
        beam.tokens.append(token)
        self._forks.hold_derived(beam, parent)
        return beam

    def begin_plan(self, plan: StepPlan) -> None:
        """Hold the beams that need no step but are in the queue after a preemption.

        While a beam waits for blocks or a row, those with a result release their own, which may be what it lacks.
        """
        for group in self._groups.values():
            unanswered = [beam for beam in group.beams if beam.handle not in group.answered]
            are_running = all(beam.status is RequestStatus.RUNNING for beam in unanswered)
            for beam in group.beams:
                if beam.handle in group.answered and not (are_running and beam.status is RequestStatus.RUNNING):
                    self._suspend(beam)

    def after_running(self, plan: StepPlan, *, is_paused: bool) -> None:
        """Take blocks and row of each leader whose beams have been forked. Those for which there was no room wait.

        Not before the forks of the same step: its beams share the leader's blocks only while it holds them.
        """
        for group in self._groups.values():
            if self._has_answer(group.leader):
                self._suspend(group.leader)

    def _suspend(self, request: Request) -> None:
        """Hold a request until its search continues or ends."""
        if request.status is RequestStatus.RUNNING:
            self._kv.cache_blocks(request, request.num_computed_tokens)
            self._table.preempt(request)
            self._kv.free(request)
        if request in self._table.waiting:
            self._table.hold(request, WaitReason.BEAMS)
            self._core.decisions.note(Decision(self._core.next_step, "wait", request.request_id, WaitReason.BEAMS))
            self._forks.orphan(request)

    def ending(self, leader: Request) -> None:
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
        self._core.remove(beam, RequestStatus.FINISHED_ABORTED)

    def sending(self, plan: StepPlan, diff: SchedulerOutput) -> SchedulerOutput:
        chosen, self._chosen = list(self._chosen.items()), {}
        return msgspec.structs.replace(diff, chosen=chosen) if chosen else diff

    def stopped(self, request: Request) -> None:
        self._chosen.pop(request.handle, None)

    def check(self) -> None:
        """Raise AssertionError unless exactly the beams of searches have a leader, and all have the same length."""
        beams = [beam for group in self._groups.values() for beam in {*group.beams, group.leader}]
        led = [request for request in self._table.requests.values() if request.part_of is not None]
        assert set(beams) == set(led) and len(beams) == len(led), "a beam belongs to no search"
        for group in self._groups.values():
            assert group.answered.keys() <= {beam.handle for beam in group.beams}, "a beam that ended has a result"
            assert len({beam.num_tokens for beam in group.beams}) == 1, "beams of one search differ in length"
            assert not group.is_complete, "a search with all results was not continued"
