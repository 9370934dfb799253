"""``quire bench pins``: how good the learned times are for which blocks are kept while a tool runs.

The turns of a trace end at their recorded times. The estimator of the scheduler chooses a time at the end of each turn,
and learns the pause when the next turn arrives. Its gain is compared with that of the best single time, which is known
only afterwards.
"""

import argparse
import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quire.bench.measure.report import RunReport, Table, rounded
from quire.protocol.errors import ConfigError
from quire.replay.costs.cost import CostModel
from quire.replay.costs.parse import parse_cost
from quire.replay.formats.detect import load_workload
from quire.replay.formats.options import LoadOptions
from quire.replay.run.step_shape import StepShape
from quire.replay.workload.workload import Call
from quire.scheduler_proc.features.programs.tools import ToolPauses

STEP_TOKENS = 8192
NEVER = float("inf")


class Turn(NamedTuple):
    """A turn that has ended.

    Attributes:
        end: seconds of the trace.
        pause: seconds to the next turn; infinite if there is none.
        benefit: seconds of prefill that a hit saves.
        cost: seconds that each second costs for which its blocks are kept, in a pool that is wanted all the time.
    """

    end: float
    pause: float
    tool: str
    benefit: float
    cost: float

    def gain(self, until: float) -> float:
        """Return what keeping the blocks for this time gains."""
        return (self.benefit if self.pause <= until else 0.0) - self.cost * min(self.pause, until)


class Kept(NamedTuple):
    """What was chosen for a turn: seconds, and the probability that the next one arrives by then."""

    turn: Turn
    seconds: float
    probability: float
    num_pauses: int


def run(args: argparse.Namespace) -> None:
    """Raises ConfigError for a trace without pauses, or a value out of range."""
    for name in ("num_usable_blocks", "block_size"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1 (got {getattr(args, name)})")
    workload = load_workload(Path(args.trace), "auto", LoadOptions(stagger=args.stagger))
    turns = turns_of(workload.calls, parse_cost(args.cost), args.block_size * args.num_usable_blocks)
    if not any(turn.pause < NEVER for turn in turns):
        raise ConfigError(f"{args.trace}: the trace has no turns that follow others, so it has no pauses")
    kept = learn(turns)
    results = figures(kept)
    settings = {name: getattr(args, name) for name in ("cost", "num_usable_blocks", "block_size", "stagger")}
    report = RunReport("pins", {"trace": Path(args.trace).name, **settings}, rounded(results, 4))
    report.tables += [
        Table(
            "gain, seconds of prefill",
            ("", "kept for, s"),
            [
                ("learned", [results["learned_s"], results["mean_kept_s"]]),
                ("best single time in hindsight", [results["best_fixed_s"], results["best_fixed_kept_s"]]),
                *((f"{seconds} s", [gain, float(seconds)]) for seconds, gain in results["fixed_s"].items()),
            ],
        ),
        Table("tool", COLUMNS, [(tool, list(row.values())) for tool, row in results["tools"].items()]),
    ]
    report.notes.append(f"regret: {results['regret']:.2%} of the gain of the best single time (negative: better)")
    report.publish(args.json)


def turns_of(calls: Sequence[Call], cost: CostModel, pool_tokens: int) -> list[Turn]:
    """Return the turns of conversations in order of their ends."""
    pauses: dict[int, tuple[float, float]] = {}
    for call in calls:
        if call.after is not None:
            end = call.arrival - call.pause
            pauses[call.after] = min(pauses.get(call.after, (NEVER, end)), (call.pause, end))

    @cache
    def prefilled(steps: int) -> float:
        """Return the seconds of this many steps."""
        if not steps:
            return 0.0
        return prefilled(steps - 1) + cost.seconds(StepShape([(STEP_TOKENS, (steps - 1) * STEP_TOKENS)], 0, 0, 0))

    turns = []
    for call in calls:
        if not call.conversation:
            continue
        tokens = call.num_prompt_tokens + call.num_output_tokens
        steps, rest = divmod(tokens, STEP_TOKENS)
        for known in range(steps):
            prefilled(known)
        last = cost.seconds(StepShape([(rest, steps * STEP_TOKENS)], 0, 0, 0)) if rest else 0.0
        pause, end = pauses.get(call.number, (NEVER, call.arrival))
        turns.append(Turn(end, pause, call.tool, prefilled(steps) + last, tokens / pool_tokens))
    return sorted(turns)


def learn(turns: Sequence[Turn]) -> list[Kept]:
    """Choose a time for each turn, as the scheduler does: from the pauses that have ended by then."""
    estimator = ToolPauses()
    due: list[tuple[float, int, Turn, bool]] = []
    late: set[int] = set()
    kept = []
    for number, turn in enumerate(turns):
        while due and due[0][0] <= turn.end:
            _, which, before, is_return = heapq.heappop(due)
            if is_return:
                estimator.ended(before.tool, before.pause, was_late=which in late)
            else:
                estimator.late(before.tool)
                late.add(which)
        choice = estimator.choose(turn.tool, turn.benefit, turn.cost)
        kept.append(Kept(turn, choice.seconds, choice.probability, choice.num_pauses))
        if turn.pause > choice.seconds:
            heapq.heappush(due, (turn.end + choice.seconds, number, turn, False))
        if turn.pause < NEVER:
            heapq.heappush(due, (turn.end + turn.pause, number, turn, True))
    return kept


def best_fixed(turns: Sequence[Turn]) -> tuple[float, float]:
    """Return the single time that gains most, and its gain. One of the pauses is best, or 0."""
    ordered = sorted(turns, key=lambda turn: turn.pause)
    pause = np.array([turn.pause for turn in ordered])
    benefit, cost = np.array([turn.benefit for turn in ordered]), np.array([turn.cost for turn in ordered])
    finite = np.isfinite(pause)
    pause, returned = pause[finite], np.cumsum((benefit - cost * np.where(finite, pause, 0.0))[finite])
    open_cost = cost.sum() - np.cumsum(cost[finite])
    gains = returned - pause * open_cost
    at = int(np.argmax(gains))
    return (float(pause[at]), float(gains[at])) if gains[at] > 0.0 else (0.0, 0.0)


COLUMNS = ("turns", "kept for, mean s", "P predicted", "P real", "pause p50, s", "pause p90, s")


def figures(kept: Sequence[Kept]) -> dict[str, Any]:
    """Return the gains, and by tool the predicted and the real share of turns that return in time."""
    turns = [each.turn for each in kept]
    learned = sum(each.turn.gain(each.seconds) for each in kept)
    seconds, best = best_fixed(turns)
    return {
        "turns": len(turns),
        "regret": (best - learned) / best if best else 0.0,
        "learned_s": learned,
        "mean_kept_s": float(np.mean([each.seconds for each in kept])),
        "best_fixed_s": best,
        "best_fixed_kept_s": seconds,
        "fixed_s": {str(each): sum(turn.gain(each) for turn in turns) for each in (2, 10, 60, 300)},
        "tools": dict(_by_tool(kept)),
    }


def _by_tool(kept: Sequence[Kept]) -> Iterator[tuple[str, dict[str, float]]]:
    tools: defaultdict[str, list[Kept]] = defaultdict(list)
    for each in kept:
        tools[each.turn.tool or "none"].append(each)
    for tool, of_tool in sorted(tools.items()):
        known = [each for each in of_tool if each.num_pauses]
        pauses = [each.turn.pause for each in of_tool if each.turn.pause < NEVER] or [0.0]
        in_time = [each.turn.pause <= each.seconds for each in known]
        columns = (
            len(of_tool),
            float(np.mean([each.seconds for each in of_tool])),
            float(np.mean([each.probability for each in known])) if known else 0.0,
            float(np.mean(in_time)) if known else 0.0,
            float(np.percentile(pauses, 50)),
            float(np.percentile(pauses, 90)),
        )
        yield tool, dict(zip(COLUMNS, columns, strict=True))
