"""The record of a run: one entry per request, columns per step. Every report is made from it alone.

Simulations, exact replays and live runs fill the same record.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Moment(NamedTuple):
    """A decision about a request. ``what``: wait, preempt or resume; ``other``: the request that got its blocks."""

    time: float
    what: str
    reason: str
    other: str = ""


@dataclass(slots=True, eq=False)
class RequestRun:
    """One request of a run. Times are seconds from the run's start, -1 if they did not occur.

    Attributes:
        scheduled: time of the first admission.
        num_cached_tokens: prompt tokens found in the prefix cache at the first admission.
        num_loaded_tokens: tokens that were loaded for it from host memory or disk.
        num_recomputed_tokens: positions computed before a preemption that were no prefix cache hits after it.
        finish: finish reason as in the OpenAI API (stop, length, abort, error), or rejected; empty if unfinished.
        finish_detail: why the request was rejected or failed.
    """

    request_id: str
    arrival: float
    num_prompt_tokens: int
    conversation: str = ""
    priority: int = 0
    scheduled: float = -1.0
    first_token: float = -1.0
    end: float = -1.0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_loaded_tokens: int = 0
    finish: str = ""
    finish_detail: str = ""
    moments: list[Moment] = field(default_factory=list)


@dataclass(slots=True)
class StepColumns:
    """Columns with one entry per step: begin and end of its computation, its tokens, and queues and pool as scheduled.

    ``prefill_tokens`` and ``decode_tokens`` add up to the tokens of the step. ``held`` blocks belong to requests,
    ``cached`` ones are evictable, and ``free`` ones have no content.
    """

    begin: array[float] = field(default_factory=lambda: array("d"))
    end: array[float] = field(default_factory=lambda: array("d"))
    prefill_tokens: array[int] = field(default_factory=lambda: array("q"))
    decode_tokens: array[int] = field(default_factory=lambda: array("q"))
    running: array[int] = field(default_factory=lambda: array("q"))
    waiting: array[int] = field(default_factory=lambda: array("q"))
    held: array[int] = field(default_factory=lambda: array("q"))
    cached: array[int] = field(default_factory=lambda: array("q"))
    free: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.begin)


@dataclass(slots=True)
class RunRecord:
    """A whole run.

    Attributes:
        title: one line that describes the run.
        settings: engine settings by ``--set`` key.
        notes: assumptions and problems that the user should know.
        num_usable_blocks: blocks of the pool without the null block.
        max_num_batched_tokens: the token budget of a step.
        virtual_s: seconds from the first arrival to the last finish, on the run's own clock.
        wall_s: seconds that the replay itself took.
        decisions_equal: the verdict of an exact replay; None for other runs.
        first_difference: the first unequal decision of an exact replay.
        tiers: by name, the figures of the tiers of the prefix cache beyond the device, as in TierState. Simulations add
            ``hit_tokens``: the tokens of loads that were answered in time.
        evictions_by_policy: as in Statistics.
        pins: how blocks were kept while tools ran: ``ended`` (number by reason), ``seconds`` (the last choice by tool)
            and ``failures``; empty if the policy keeps none.
        program_limit: programs that are ``admitted`` at the end, and the number ``released`` by reason; empty with
            another policy.
        itl: (milliseconds, count) of the gaps between successive tokens of a request.
        extra: further figures for the JSON, by name.
    """

    title: str = ""
    source: str = ""
    cost: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    block_size: int = 0
    num_usable_blocks: int = 0
    max_num_batched_tokens: int = 0
    requests: list[RequestRun] = field(default_factory=list)
    steps: StepColumns = field(default_factory=StepColumns)
    preemptions_by_reason: dict[str, int] = field(default_factory=dict)
    num_evicted_blocks: int = 0
    tiers: dict[str, dict[str, float]] = field(default_factory=dict)
    evictions_by_policy: dict[str, int] = field(default_factory=dict)
    pins: dict[str, Any] = field(default_factory=dict)
    program_limit: dict[str, Any] = field(default_factory=dict)
    virtual_s: float = 0.0
    wall_s: float = 0.0
    decisions_equal: bool | None = None
    first_difference: dict[str, Any] | None = None
    itl: list[tuple[float, int]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
