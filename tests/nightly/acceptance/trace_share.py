"""Engine resources used by some requests, counted in a trace: steps, KV blocks held, cached tokens found."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from quire.replay.recorded.reader import TraceLine
from quire.scheduler_proc.trace.lines import Arrival, PrefixCacheEvent, Result, StepDecision


@dataclass(slots=True)
class RequestShare:
    """Resources used by one request. Counts all steps of the engine, whichever requests run in them, so load does not
    slow this clock.

    Attributes:
        waited: steps from its arrival to its first admission, that one included.
        took: steps from its arrival to its end.
        block_steps: sum over steps of the blocks that it held.
        preempted: number of preemptions.
    """

    arrived_at: int
    num_prompt_tokens: int
    waited: int | None = None
    took: int | None = None
    block_steps: int = 0
    cached_tokens: int = 0
    preempted: int = 0


@dataclass(slots=True)
class _Count:
    """Counts so far. ``held``: blocks by handle, for the selected requests."""

    responses: Collection[str]
    shares: dict[str, RequestShare] = field(default_factory=dict)
    handles: dict[int, str] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    step: int = 0

    def arrived(self, line: Arrival) -> None:
        if re.sub(r"-\d+$", "", line.req_id) in self.responses:
            self.shares[line.req_id] = RequestShare(self.step, line.num_prompt_tokens)

    def found(self, line: PrefixCacheEvent) -> None:
        share = self.shares.get(line.req_id)
        if share is not None and share.waited is None:
            share.cached_tokens = line.local_hit_tokens + line.external_hit_tokens

    def decided(self, line: StepDecision) -> None:
        self.step += 1
        for handle in line.removed:
            self.held.pop(handle, None)
        for row in line.new:
            share = self.shares.get(row.req_id)
            self.handles[row.handle] = row.req_id
            if share is None:
                self.held.pop(row.handle, None)  # the handle may have belonged to a selected request before
                continue
            self.held[row.handle] = sum(row.num_blocks)
            if share.waited is None:
                share.waited = self.step - share.arrived_at
        for handle in line.appended[::3]:
            if handle in self.held:
                self.held[handle] += 1
        for reason in line.reasons:
            if reason.what == "preempt" and reason.req_id in self.shares:
                self.shares[reason.req_id].preempted += 1
        for handle, count in self.held.items():
            self.shares[self.handles[handle]].block_steps += count

    def answered(self, line: Result) -> None:
        for ended in line.ended:
            share = self.shares.get(self.handles.get(ended.handle, ""))
            if share is not None:
                share.took = self.step - share.arrived_at


def count_shares(lines: Iterable[TraceLine], responses: Collection[str]) -> dict[str, RequestShare]:
    """Count the resources of all sequences of ``responses`` (ids as clients see them), by the engine's request id."""
    count = _Count(responses)
    for entry in lines:
        match entry.line:
            case Arrival() as line:
                count.arrived(line)
            case PrefixCacheEvent() as line:
                count.found(line)
            case StepDecision() as line:
                count.decided(line)
            case Result() as line:
                count.answered(line)
            case _:
                pass
    return count.shares
