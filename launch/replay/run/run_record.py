"""What a run was: one record per request, columns per step. Every report is made from this and nothing else.

Filled by a simulation, or from the lines of a recorded trace; knows neither.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Moment(NamedTuple):
    """An event of a request. ``what``: wait, preempt, resume; ``other``: the request that got its blocks."""

    time: float
    what: str
    reason: str
    other: str = ""


@dataclass(slots=True, eq=False)
class RequestRun:
    """One request's life; times are seconds from the run's start, -1 while they have not come.

    Attributes:
        scheduled: its first admission.
        num_cached_tokens: of its prompt, found in the prefix cache at its first admission.
        finish: OpenAI's word for how it ended (stop, length, abort, error), or rejected; empty: it had not.
        finish_detail: why it was rejected or failed.
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
    finish: str = ""
    finish_detail: str = ""
    moments: list[Moment] = field(default_factory=list)


@dataclass(slots=True)
class StepColumns:
    """One entry per step in each: when its computing began and ended, and what it was; pool and queues as decided.

    ``prefill_tokens`` and ``decode_tokens`` add up to what it computed; ``held`` blocks are requests' own, ``cached``
    ones are free but can be found again (held ones are not counted twice), ``free`` ones hold nothing.
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
        title: what was run, in a line. ``settings``: of the engine, as ``--set`` names them. ``notes``: for people.
        num_usable_blocks: of the pool, without the null block.
        max_num_batched_tokens: the budget that steps had.
        virtual_s: from the first arrival to the last ending, on the run's own clock.
        wall_s: what the run took the machine that simulated it.
        decisions_equal: of an exact replay; None: it was none. ``first_difference``: where it was not equal.
        itl: (milliseconds, tokens) of the gaps between successive tokens of one request, added up over equal gaps.
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
    virtual_s: float = 0.0
    wall_s: float = 0.0
    decisions_equal: bool | None = None
    first_difference: dict[str, Any] | None = None
    itl: list[tuple[float, int]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
