"""The flags of ``quire replay``. Nothing heavy is imported here, so that wrong flags are refused at once."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

FORMATS = ("auto", "quire", "sched-trace", "mooncake", "agentic", "agent-text", "azure", "synthetic")
OVERLONG = ("refuse", "clip", "drop")


def add_replay_flags(parser: argparse.ArgumentParser) -> None:
    what = "a trace, compressed or not; or synthetic:KEY=VALUE,... (docs/traces.md)"
    parser.add_argument("trace", type=Path, metavar="FILE|DIR", help=what)
    parser.add_argument("--format", choices=FORMATS, default="auto", help="of the trace (auto: by what is in it)")
    _add_workload(parser)
    _add_engine(parser)
    _add_server(parser)
    _add_outputs(parser)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    loops = group.add_mutually_exclusive_group()
    loops.add_argument("--concurrency", type=_count, metavar="N", help="so many at a time; arrival times do not matter")
    closed = "a turn comes when the one before it has ended, and its pause has passed"
    loops.add_argument("--closed-loop", action="store_true", help=closed)
    rate = "arrivals come X times as fast; pauses inside conversations stay (1)"
    group.add_argument("--rate", type=_positive, metavar="X", help=rate)
    group.add_argument("--limit", type=_count, metavar="N", help="only the first N requests")
    group.add_argument("--start", type=_seconds, metavar="S", help="leave out what came before second S")
    group.add_argument("--duration", type=_positive, metavar="S", help="only S seconds of it")
    group.add_argument("--stagger", type=_seconds, metavar="S", help="between the beginnings of conversations (60)")
    join = "in a closed loop, the turn after a sub-agent waits for it"
    group.add_argument("--join-subagents", action="store_true", help=join)
    group.add_argument("--seed", type=_whole, metavar="N", help="of arrivals and lengths that are drawn (0)")
    group.add_argument("--tokenizer", type=Path, metavar="DIR", help="counts the tokens of traces that have text only")
    overlong = "prompts beyond --max-model-len: count as rejected, are cut, or are left out (refuse)"
    group.add_argument("--overlong", choices=OVERLONG, help=overlong)
    reuse = "a next turn finds the answer before it in the cache, where the trace tells what became of it"
    group.add_argument("--reuse-answers", action="store_true", help=reuse)
    group.add_argument("--lenient", action="store_true", help="keep what is good of a damaged file")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    what = "a flag of the engine, such as block_size=32, or num_usable_blocks=4000; may be repeated"
    group.add_argument("--set", action="append", default=[], type=_pair, metavar="K=V", help=what)
    sweep = "one run for each value; may be repeated: all combinations"
    group.add_argument("--sweep", action="append", default=[], type=_values, metavar="K=V1,V2", help=sweep)
    compare = "a second run with this on top, and who waits longer in it, and why; may be repeated"
    group.add_argument("--compare", action="append", default=[], type=_pair, metavar="K=V", help=compare)
    cost = "how long steps take: table:DIR, roofline:CONFIG,CHIP, fitted:FILE or constant:MS"
    group.add_argument("--cost", metavar="MODEL", help=cost)
    group.add_argument("--jobs", type=_count, metavar="N", help="processes of a sweep (one per core)")


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("live: the workload as load on a running server")
    group.add_argument("--against", metavar="URL", help="of an OpenAI-compatible server")
    group.add_argument("--model", metavar="NAME", help="to ask for (the first that the server lists)")
    group.add_argument("--api-key", metavar="KEY", help="of the server; else the variable QUIRE_API_KEY")
    group.add_argument("--vocab-size", type=_count, metavar="N", help="invented prompts have token ids below this")
    group.add_argument("--max-prompt-tokens", type=_count, metavar="N", help="longer prompts are over-long, too")


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="FILE", help="write the figures here; - is stdout, and nothing else on it")
    group.add_argument("--html", type=Path, metavar="FILE", help="write one page that shows the run")
    group.add_argument("--perfetto", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev")


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise argparse.ArgumentTypeError(f"{text!r} must be KEY=VALUE")
    return key.strip().lstrip("-").replace("-", "_"), value.strip()


def _values(text: str) -> tuple[str, list[str]]:
    key, joined = _pair(text)
    values = [value.strip() for value in joined.split(",")]
    if not all(values):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty value")
    return key, values


def _number(text: str, what: str, fits: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not fits(value):
        raise argparse.ArgumentTypeError(f"must be {what}, not {text}")
    return value


def _positive(text: str) -> float:
    return _number(text, "a number above 0", lambda value: value > 0)


def _seconds(text: str) -> float:
    return _number(text, "a number of at least 0", lambda value: value >= 0)


def _count(text: str) -> int:
    return int(_number(text, "a whole number of at least 1", lambda value: value >= 1 and value == int(value)))


def _whole(text: str) -> int:
    return int(_number(text, "a whole number of at least 0", lambda value: value >= 0 and value == int(value)))
