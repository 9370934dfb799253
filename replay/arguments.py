"""The flags of ``quire replay`` and ``quire plan``. Imports nothing heavy, so that wrong flags are rejected at once."""

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path

from quire.protocol.routing import MAX_ENGINES

FORMATS = ("auto", "quire", "sched-trace", "mooncake", "agentic", "agent-text", "azure", "measured", "synthetic")
OVERLONG = ("refuse", "clip", "drop")
TARGETS = ("ttft", "tpot", "e2e")


def add_replay_flags(parser: argparse.ArgumentParser) -> None:
    _add_trace(parser)
    _add_workload(parser)
    compare = "second run with this setting; reports which requests take longer in it, and why; may be repeated"
    engine = _add_engine(parser, "one run per value; repeat for all combinations of several keys")
    engine.add_argument("--compare", action="append", default=[], type=_pair, metavar="KEY=VALUE", help=compare)
    _add_server(parser)
    _add_outputs(parser)


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    _add_trace(parser)
    group = parser.add_argument_group("plan")
    slo = (
        "most seconds of a request: ttft (to the first token), tpot (per token after it), e2e; such as ttft=2,tpot=0.05"
    )
    group.add_argument("--slo", required=True, type=_targets, metavar="NAME=SECONDS,...", help=slo)
    share = "percentage of the requests that must meet all targets (99)"
    group.add_argument("--percentile", type=_percentage, default=99.0, metavar="P", help=share)
    engines = "numbers of engines to choose from (1-16)"
    group.add_argument("--engines", type=_span, default=(1, 16), metavar="FIRST-LAST", help=engines)
    _add_workload(parser)
    _add_engine(parser, "sizes of an engine to compare, such as tensor_parallel_size=1,2; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - writes only them to stdout")
    parser.set_defaults(compare=[], html=None, perfetto=None)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    what = "trace file or folder, compressed or not, or synthetic:KEY=VALUE,... (docs/traces.md)"
    parser.add_argument("trace", type=Path, metavar="FILE|DIR", help=what)
    parser.add_argument(
        "--format", choices=FORMATS, default="auto", help="trace format (auto: detect from the content)"
    )


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    loops = group.add_mutually_exclusive_group()
    concurrency = "keep N requests in flight and ignore arrival times"
    loops.add_argument("--concurrency", type=_count, metavar="N", help=concurrency)
    closed = "send each turn of a conversation when the previous turn has finished and the recorded pause has passed"
    loops.add_argument("--closed-loop", action="store_true", help=closed)
    rate = "speed-up of arrivals; pauses inside conversations are unchanged (1)"
    group.add_argument("--rate", type=_positive, metavar="FACTOR", help=rate)
    group.add_argument("--limit", type=_count, metavar="N", help="use only the first N requests")
    start = "skip requests that arrive before this time of the trace (0)"
    group.add_argument("--start", type=_seconds, metavar="SECONDS", help=start)
    duration = "length of the time window to use (to the end of the trace)"
    group.add_argument("--duration", type=_positive, metavar="SECONDS", help=duration)
    stagger = "time between the starts of conversations, for traces without a common clock (60)"
    group.add_argument("--stagger", type=_seconds, metavar="SECONDS", help=stagger)
    join = "in a closed loop, the turn after a sub-agent waits for the sub-agent"
    group.add_argument("--join-subagents", action="store_true", help=join)
    group.add_argument("--seed", type=_whole, metavar="N", help="random seed for synthetic arrivals and lengths (0)")
    tokenizer = "checkpoint whose tokenizer counts the tokens of text-only traces (the demo model)"
    group.add_argument("--tokenizer", type=Path, metavar="DIR", help=tokenizer)
    overlong = "requests longer than --max-model-len: reject them, clip their prompts, or drop them (refuse)"
    group.add_argument("--overlong", choices=OVERLONG, help=overlong)
    reuse = "let the next turn find the previous answer in the prefix cache, if the trace shows that it contains it"
    group.add_argument("--reuse-answers", action="store_true", help=reuse)
    hints = "let the scheduler find the turns of each conversation by their prefixes, and count how many it finds"
    group.add_argument("--no-hints", action="store_true", help=hints)
    group.add_argument("--lenient", action="store_true", help="skip damaged lines instead of rejecting the file")


def _add_engine(parser: argparse.ArgumentParser, sweep: str) -> "argparse._ArgumentGroup":
    """Add the settings of the engine. ``sweep``: help of ``--sweep``."""
    group = parser.add_argument_group("engine")
    what = "engine setting, such as block_size=32 or num_usable_blocks=4000; may be repeated"
    group.add_argument("--set", action="append", default=[], type=_pair, metavar="KEY=VALUE", help=what)
    group.add_argument("--sweep", action="append", default=[], type=_values, metavar="KEY=V1,V2", help=sweep)
    cost = "cost model of a step: table:DIR, roofline:CONFIG,CHIP, fitted:FILE or constant:MS"
    group.add_argument("--cost", metavar="COST", help=cost)
    group.add_argument("--jobs", type=_count, metavar="N", help="number of processes of a sweep (one per core)")
    return group


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("live: send the workload to a running server")
    group.add_argument("--against", metavar="URL", help="URL of an OpenAI-compatible server")
    group.add_argument("--model", metavar="MODEL", help="model to request (the first that the server lists)")
    group.add_argument("--api-key", metavar="KEY", help="API key of the server (environment variable QUIRE_API_KEY)")
    vocabulary = "upper bound of the token ids in generated prompts"
    group.add_argument("--vocab-size", type=_count, metavar="N", help=vocabulary)
    most = "longest prompt to send; --overlong applies to longer ones"
    group.add_argument("--max-prompt-tokens", type=_count, metavar="N", help=most)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="FILE", help="write the figures as JSON; - writes only them to stdout")
    group.add_argument("--html", type=Path, metavar="FILE", help="write an HTML page with charts of the run")
    group.add_argument("--perfetto", type=Path, metavar="FILE", help="write a Chrome trace for ui.perfetto.dev")


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


def _targets(text: str) -> dict[str, float]:
    targets = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if name not in TARGETS or not equals:
            raise argparse.ArgumentTypeError(f"must be NAME=SECONDS with a name of {', '.join(TARGETS)} (got {part!r})")
        if name in targets:
            raise argparse.ArgumentTypeError(f"{name} is given twice")
        targets[name] = _number(value, "a number of seconds above 0", lambda seconds: seconds > 0, f"{name} ")
    return targets


def _percentage(text: str) -> float:
    return _number(text, "above 0 and at most 100", lambda value: 0 < value <= 100)


def _span(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,3})(?:-(\d{1,3}))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found is not None else (0, 0)
    if not 1 <= first <= last <= MAX_ENGINES:
        raise argparse.ArgumentTypeError(f"must be FIRST-LAST with 1 <= FIRST <= LAST <= {MAX_ENGINES} (got {text})")
    return first, last


def _number(text: str, what: str, fits: Callable[[float], bool], name: str = "") -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not fits(value):
        raise argparse.ArgumentTypeError(f"{name}must be {what} (got {text})")
    return value


def _positive(text: str) -> float:
    return _number(text, "a number above 0", lambda value: value > 0)


def _seconds(text: str) -> float:
    return _number(text, "a number of at least 0", lambda value: value >= 0)


def _count(text: str) -> int:
    return int(_number(text, "a whole number of at least 1", lambda value: value >= 1 and value == int(value)))


def _whole(text: str) -> int:
    return int(_number(text, "a whole number of at least 0", lambda value: value >= 0 and value == int(value)))
