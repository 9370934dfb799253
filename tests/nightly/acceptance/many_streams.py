"""``run.py streams``: very many concurrent streams with long prompts in the background; counts losses and measures
gaps.
"""

import argparse
import json
import math
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import uvloop
from own_server import Target, busy_shares, is_clean, serving
from timed_streams import StreamedAnswer, TimedStream, drive, read_answer

from quire.bench.measure.report import DISTRIBUTION_COLUMNS, RunReport, Table, distribution, distribution_row, rounded
from quire.protocol.errors import ConfigError

VOCABULARY = range(3, 1000)
"""Token ids of the demo model, which every real model has too."""
NUM_PROMPTS = 32
PROMPT_LEN = 12
RAMP_S = 2.0
TIMEOUT_S = 300.0


def run(args: argparse.Namespace) -> None:
    """Run the harness. Exit status 1 if a stream was lost.

    Raises:
        ConfigError: a flag is invalid.
        EngineError: the server does not answer.
    """
    for name in ("num_streams", "output_len"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    if args.side_len < 0 or args.side_interval <= 0:
        raise ConfigError("--side-len must be at least 0 and --side-interval above 0")
    # A chunk of a long prompt must not take much longer than a decode step of all streams.
    flags = ["--max-num-seqs", str(args.num_streams + 8), "--max-prefill-share", "0.125"]
    with serving(args.url, args.api_key, flags, args.serve_args) as target:
        report = measure(target, args)
    report.publish(args.json)
    if report.results["lost"] or report.results["side_lost"]:
        sys.exit(1)


def measure(target: Target, args: argparse.Namespace) -> RunReport:
    """Run the load of ``args`` against ``target``."""
    draw = random.Random(args.seed)
    prompts = [draw.choices(VOCABULARY, k=PROMPT_LEN) for _ in range(NUM_PROMPTS)]
    streams = [
        TimedStream(_request(target, prompts[i % NUM_PROMPTS], args.output_len), RAMP_S * i / args.num_streams)
        for i in range(args.num_streams)
    ]
    before = target.cpu_seconds()
    cpu, start = time.process_time(), time.perf_counter()
    side = _side_load(target, args, draw)
    uvloop.run(drive(target.address, [*streams, *side], TIMEOUT_S))
    wall = time.perf_counter() - start
    shares = {"client": (time.process_time() - cpu) / wall} | busy_shares(before, target.cpu_seconds(), wall)
    answers = [read_answer(stream) for stream in streams]
    # Side requests that were not sent before the last stream ended are not counted.
    report = make_report(
        _settings(args), answers, [read_answer(stream) for stream in side if stream.sent], args.output_len
    )
    report.results |= rounded({"wall_s": wall, "cpu_shares": shares, "after": target.settled()}, 3)
    report.tables.append(Table("processor", ("cores",), [(name, [share]) for name, share in shares.items()]))
    if not is_clean(report.results["after"]):
        report.notes.append("the engine still holds requests or blocks, or another client is active")
    return report


def _request(target: Target, prompt: Sequence[int], output_len: int) -> bytes:
    body = {
        "prompt": list(prompt),
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return target.post("/v1/completions", json.dumps(body).encode(), close=True)


def _side_load(target: Target, args: argparse.Namespace, draw: random.Random) -> list[TimedStream]:
    """Return long prompts that are not cached, to be sent one after the other; each costs a prefill and one token."""
    if not args.side_len:
        return []
    return [
        TimedStream(_request(target, draw.choices(VOCABULARY, k=args.side_len), 1), i * args.side_interval, True)
        for i in range(math.ceil(TIMEOUT_S / args.side_interval))
    ]


def make_report(
    settings: dict[str, Any],
    answers: Sequence[StreamedAnswer],
    side: Sequence[StreamedAnswer],
    output_len: int,
) -> RunReport:
    """``answers``: those of the streams, in order; answers ``i + k * NUM_PROMPTS`` have the same prompt."""
    faults = Counter(fault for answer in answers if (fault := _fault(answer, output_len)))
    side_faults = Counter(fault for answer in side if (fault := _fault(answer, 1)))
    gaps = distribution(1000 * gap for answer in answers for gap in answer.gaps)
    steady = distribution(1000 * gap for gap in _gaps_while_all_run(answers))
    texts: defaultdict[int, set[str]] = defaultdict(set)
    for index, answer in enumerate(answers):
        texts[index % NUM_PROMPTS].add(answer.text)
    num_deliveries = sum(len(answer.deliveries) for answer in answers)
    num_tokens = sum(answer.num_output_tokens for answer in answers)
    results: dict[str, Any] = {
        "streams": len(answers),
        "lost": sum(faults.values()),
        "faults": dict(faults),
        "side_requests": len(side),
        "side_lost": sum(side_faults.values()),
        "side_faults": dict(side_faults),
        "inter_token_ms": gaps,
        "steady_inter_token_ms": steady,
        "p99_over_p50": gaps["p99"] / gaps["p50"] if gaps else None,
        "steady_p99_over_p50": steady["p99"] / steady["p50"] if steady else None,
        "tokens_per_delivery": num_tokens / num_deliveries if num_deliveries else None,
        "output_tokens": num_tokens,
        "prompts_with_several_texts": sum(len(seen) > 1 for seen in texts.values()),
    }
    report = RunReport("streams", settings, rounded(results, 3))
    report.tables += _tables(results)
    report.notes += [f"lost: {count} x {fault}" for fault, count in (faults + side_faults).items()]
    return report


def _gaps_while_all_run(answers: Sequence[StreamedAnswer]) -> Iterator[float]:
    """Yield gaps between the last stream's first delivery and the first stream's last one."""
    timed = [answer for answer in answers if answer.deliveries]
    begin = max((answer.deliveries[0] for answer in timed), default=0.0)
    end = min((answer.deliveries[-1] for answer in timed), default=0.0)
    for answer in timed:
        for gap, when in zip(answer.gaps, answer.deliveries[1:], strict=True):
            if begin < when <= end:
                yield gap


def _tables(results: dict[str, Any]) -> list[Table]:
    latency = [
        distribution_row("inter-token, ms", results["inter_token_ms"]),
        distribution_row("while all streams run, ms", results["steady_inter_token_ms"]),
    ]
    counted = {
        "streams": "streams",
        "lost": "lost",
        "long prompts": "side_requests",
        "p99 / p50": "p99_over_p50",
        "p99 / p50 while all streams run": "steady_p99_over_p50",
        "tokens per delivery": "tokens_per_delivery",
    }
    rows = [(words, [results[name]]) for words, name in counted.items()]
    return [Table("latency", DISTRIBUTION_COLUMNS, latency), Table("streams", ("",), rows)]


def _fault(answer: StreamedAnswer, output_len: int) -> str:
    """Return why an answer is incomplete, or an empty string."""
    if answer.error:
        return answer.error
    if answer.finish_reason != "length":
        return f"finish_reason {answer.finish_reason or 'missing'}"
    if answer.num_output_tokens != output_len:
        return f"{answer.num_output_tokens} tokens instead of {output_len}"
    return ""


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    names = ("num_streams", "output_len", "side_len", "side_interval", "seed", "serve_args")
    return {name: vars(args)[name] for name in names}
