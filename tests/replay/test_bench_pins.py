"""``quire bench pins``: the gain of learned times beside the best single one."""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pytest

from quire.protocol.errors import ConfigError
from quire.replay.costs.cost import ConstantCost
from quire.replay.pins import NEVER, Turn, best_fixed, figures, learn, run, turns_of
from quire.replay.workload.workload import Call

EXCERPT = Path(__file__).parents[1] / "data" / "agentic_excerpt.jsonl"


def flags(**given: Any) -> argparse.Namespace:
    cost = "roofline:llama-3.1-8b,h200"
    defaults = {"trace": str(EXCERPT), "cost": cost, "num_usable_blocks": 15_000, "block_size": 64, "stagger": 60.0}
    return argparse.Namespace(**{**defaults, "json": None, **given})


def random_turns(rng: random.Random, count: int) -> list[Turn]:
    """Return turns of a fast and a slow tool; some never return."""
    turns, end = [], 0.0
    for _ in range(count):
        end += rng.expovariate(0.5)
        tool = rng.choice(("fast", "slow"))
        pause = rng.expovariate(1.0 if tool == "fast" else 0.005) if rng.random() < 0.95 else NEVER
        turns.append(Turn(end, pause, tool, rng.uniform(1.0, 3.0), 0.05))
    return turns


def test_the_best_single_time_is_one_of_the_pauses() -> None:
    turns = random_turns(random.Random(2), 60)
    candidates = [0.0, *(turn.pause for turn in turns if turn.pause < NEVER)]
    expected = max((sum(turn.gain(each) for turn in turns), each) for each in candidates)
    seconds, gain = best_fixed(turns)
    assert (gain, seconds) == pytest.approx(expected)


def test_learned_times_beat_every_single_time_where_tools_differ() -> None:
    found = figures(learn(random_turns(random.Random(3), 1500)))
    assert found["regret"] < 0 and found["learned_s"] > max(found["fixed_s"].values())
    for row in found["tools"].values():
        assert row["P predicted"] == pytest.approx(row["P real"], abs=0.1)


def test_a_pause_is_learned_when_it_has_ended_and_not_before() -> None:
    turns = [Turn(float(at), 100.0, "tool", 1.0, 1e-4) for at in range(200)]
    kept = learn(turns)
    assert {each.num_pauses for each in kept[:3]} == {0}
    assert kept[50].seconds == 0.0, "by then, pauses are only known to be longer than the default"
    assert kept[-1].seconds >= 100.0


def test_turns_are_those_of_conversations_with_the_next_arrival_of_each() -> None:
    calls = [
        Call(0, "a", 0.0, 90, 10, conversation="c", tool="grep"),
        Call(1, "b", 7.0, 190, 10, conversation="c", after=0, pause=3.0),
        Call(2, "sub", 6.0, 10, 1, conversation="c", after=0, pause=2.0),
        Call(3, "alone", 0.0, 10, 1),
    ]
    turns = turns_of(calls, ConstantCost(500.0), 1000)
    assert [(turn.end, turn.pause, turn.tool) for turn in turns] == [
        (4.0, 2.0, "grep"),
        (6.0, NEVER, ""),
        (7.0, NEVER, ""),
    ]
    assert (turns[0].benefit, turns[0].cost) == (0.5, 0.1)


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    run(flags())
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["benchmark"] == "pins" and found["settings"]["trace"] == EXCERPT.name
    assert found["results"]["turns"] > 5 and "tool_use" in found["results"]["tools"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_usable_blocks": 0}, "--num-usable-blocks must be at least 1"),
        ({"trace": str(EXCERPT.with_name("azure_excerpt.csv"))}, "it has no pauses"),
    ],
)
def test_bad_input(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(flags(**given))
