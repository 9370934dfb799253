"""``quire bench embed``: texts per second of an encoder in the whole engine, beside sentence-transformers.

Rounds alternate on the same texts, so that other load on the machine slows all of them. The peer has two figures: all
texts in one call, and one text in each call, as a service without batching answers many clients. In Quire each text is
a request of its own in both cases.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from quire.bench.engine import QUIET_CORES, OtherProcessesClock, default_threads, make_prompts
from quire.bench.measure.report import RunReport, Table, rounded
from quire.bench.peers import Peer, PeerFailed, find_driver, run_json
from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.model_folder import find_model
from quire.launch.config.options import EngineOptions
from quire.launch.offline.llm import LLM
from quire.protocol.errors import ConfigError

DRIVER = "embed.py"
PEER = "sentence-transformers"
_BERT = {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 30522, "dtype": "float32"}
SHAPES: dict[str, dict[str, Any]] = {
    "bge-base": _BERT,
    "bge-small": _BERT | {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536},
}
"""``config.json`` of the shapes; absent fields have BERT's defaults."""

Embed = Callable[[list[str]], object]


def run(args: argparse.Namespace, options: EngineOptions) -> None:
    """Raises ConfigError for flags that contradict each other, EngineError if Quire's engine does not start."""
    _check(args, options)
    threads = args.threads or default_threads()
    os.environ["OMP_NUM_THREADS"] = str(threads)  # read by torch at import in the worker and the peer
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as scratch, ExitStack() as stack:
        python = args.against.partition("=")[2] if args.against else ""
        python = python or sys.executable
        folder = find_model(options.model) if args.shape is None else _write(Path(scratch), args.shape, python)
        llm = stack.enter_context(LLM.from_config(make_engine_config(options, folder=folder), quiet=True))
        found: dict[str, Embed] = {"quire": llm.embed}
        facts: dict[str, Any] = {}
        if args.against:
            peer = Peer(python, find_driver(None, DRIVER), folder, PEER, "float32", threads, (args.num_texts, 0))
            stack.callback(peer.close)
            facts = _ready(peer)
            found |= {
                f"{PEER}, one call": lambda texts: peer.generate(texts, len(texts)),
                f"{PEER}, one text a call": lambda texts: peer.generate(texts, 1),
            }
        seconds, others = _measure(found, args, llm.config.model.vocab_size)
    _report(args, threads, seconds, others, facts).publish(args.json)


def _check(args: argparse.Namespace, options: EngineOptions) -> None:
    for name in ("num_texts", "input_len", "rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1 (got {getattr(args, name)})")
    if args.threads is not None and not 1 <= args.threads <= 1024:
        raise ConfigError(f"--threads must be from 1 to 1024 (got {args.threads})")
    if (args.shape is None) == (options.model is None):
        raise ConfigError("give either MODEL or --shape")
    if args.shape is not None and args.shape not in SHAPES:
        raise ConfigError(f"--shape {args.shape}: unknown shape (known: {', '.join(SHAPES)})")
    if args.against is not None and args.against.partition("=")[0] != PEER:
        raise ConfigError(f"--against {args.against}: unknown peer (known: {PEER})")


def _write(scratch: Path, shape: str, python: str) -> Path:
    """Write a checkpoint with random weights, and a tokenizer whose tokens are the words w0, w1 and so on."""
    config, folder = scratch / "config.json", scratch / shape
    config.write_text(json.dumps(SHAPES[shape]), encoding="utf-8")
    try:
        run_json([python, "-P", str(find_driver(None, DRIVER)), "write", str(config), str(folder)])
    except PeerFailed as error:
        raise ConfigError(f"--shape {shape}: cannot write a checkpoint: {error}") from None
    return folder


def _ready(peer: Peer) -> dict[str, Any]:
    try:
        return peer.wait_ready()[1]
    except PeerFailed as error:
        raise ConfigError(f"--against {PEER}: {error}") from None


def _measure(
    found: dict[str, Embed], args: argparse.Namespace, vocab_size: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Return the seconds of each timed round, and the cores that other processes kept busy in it."""
    seconds: dict[str, list[float]] = {name: [] for name in found}
    others = []
    for index in range(args.rounds + 1):  # the first one is a warm-up
        prompts = make_prompts(args.prompt_seed + index, args.num_texts, args.input_len, vocab_size)
        texts = [" ".join(f"w{token}" for token in prompt) for prompt in prompts]
        for name, embed in found.items():
            clock, began = OtherProcessesClock(), time.perf_counter()
            try:
                embed(texts)
            except PeerFailed as error:
                raise ConfigError(f"--against {PEER}: {error}") from None
            if index:
                seconds[name].append(time.perf_counter() - began)
                others.append(clock.stop()[1])
    return seconds, others


def _report(
    args: argparse.Namespace,
    threads: int,
    seconds: dict[str, list[float]],
    others: list[float],
    facts: dict[str, Any],
) -> RunReport:
    ours, results = seconds["quire"], {}
    for name, own in seconds.items():
        results[name] = {
            "texts_per_s": args.num_texts / min(own),
            "seconds": own,
            "quire_by_this": min(own) / min(ours),
            "median_quire_by_this": statistics.median(other / one for other, one in zip(own, ours, strict=True)),
        }
    settings = {name: getattr(args, name) for name in ("num_texts", "input_len", "rounds")}
    settings |= {"model": args.shape or "checkpoint", "threads": threads, "peer": facts}
    report = RunReport("embed", settings, rounded({"contestants": results, "others_cores": others}, 4))
    columns = ["texts/s, best round", "quire / this, best rounds", "quire / this, median round"]
    figures = ("texts_per_s", "quire_by_this", "median_quire_by_this")
    rows = [(name, [found[figure] for figure in figures]) for name, found in results.items()]
    report.tables.append(Table(f"{args.num_texts} texts of {args.input_len} tokens", columns, rows))
    if max(others) > QUIET_CORES:
        report.notes.append(f"other processes used up to {max(others):.2f} cores: compare ratios only")
    return report
