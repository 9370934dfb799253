"""``quire run-batch``: flags, and the run against an own engine or a running server."""

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import BinaryIO

from quire.frontend.serve_options import ServeOptions
from quire.launch.config.command_line import (
    add_engine_options,
    add_options,
    add_url_options,
    check_no_settings,
    opened,
    read_options,
)
from quire.launch.config.options import EngineOptions
from quire.launch.plain_http import base_url, server_key
from quire.launch.run_batch.lines import read_lines
from quire.launch.run_batch.local_server import with_server
from quire.launch.run_batch.runner import Summary, run_lines
from quire.launch.run_batch.sender import Sender, ServerAddress
from quire.protocol.errors import ConfigError
from quire.protocol.process.log import start_logging

MAX_CONCURRENCY = 4096
SHOWN_EVERY_S = 1.0
SERVER_FLAGS = ("served_model_name", "lora_modules", "lora_dir", "tool_call_parser", "reasoning_parser")
"""Settings of a server that change answers."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-i",
        "--input-file",
        required=True,
        metavar="FILE",
        help="requests, one JSON object per line; -: standard input",
    )
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="results, in the order of the requests; -: standard output",
    )
    add_url_options(parser)
    parser.add_argument(
        "--concurrency", type=int, default=256, metavar="N", help="most requests at the server at a time (256)"
    )
    add_options(parser, ServeOptions, only=SERVER_FLAGS)
    add_engine_options(parser)
    parser.add_argument("-m", "--model", dest="model", default=argparse.SUPPRESS, metavar="MODEL", help="as MODEL")


def run(args: argparse.Namespace) -> None:
    """Answer every line of the input file; exit with status 1 if lines failed.

    Raises:
        ConfigError: a file or a flag cannot be used.
        EngineError: the engine failed or the server cannot be reached; the results so far are written.
    """
    start_logging()
    if not 1 <= args.concurrency <= MAX_CONCURRENCY:
        raise ConfigError(f"--concurrency must be between 1 and {MAX_CONCURRENCY} (got {args.concurrency})")
    engine, server = read_options(args)
    began = time.monotonic()
    _check_apart(args.input_file, args.output_file)
    lines_file = opened("--input-file", args.input_file, "rb")
    results_file = opened("--output-file", args.output_file, "wb")
    with lines_file as lines, results_file as output:
        if args.url is not None:
            check_no_settings(engine, server)
            sender = Sender(ServerAddress(base_url(args.url), key=server_key(args.server_key)))
            summary = _run(lines, output, sender, args.concurrency)
        else:
            summary = _run_locally(lines, output, engine, server, args.concurrency)
    answered = summary.lines - summary.failed
    text = f"{answered} of {summary.lines} lines answered, {summary.failed} failed; "
    print(f"{text}{summary.output_tokens} output tokens in {time.monotonic() - began:.1f} s", file=sys.stderr)
    if summary.failed:
        sys.exit(1)


def _run_locally(
    lines: BinaryIO, output: BinaryIO, engine: EngineOptions, server: ServeOptions, concurrency: int
) -> Summary:
    senders: list[Sender] = []

    def work(path: str) -> Summary:
        senders.append(Sender(ServerAddress(uds=path)))
        return _run(lines, output, senders[0], concurrency)

    def stop() -> None:
        for sender in senders:
            sender.close()

    return with_server(engine, server, work, stop)


def _run(lines: BinaryIO, output: BinaryIO, sender: Sender, concurrency: int) -> Summary:
    shown_at = time.monotonic()

    def show(summary: Summary) -> None:
        nonlocal shown_at
        if sys.stderr.isatty() and time.monotonic() > shown_at + SHOWN_EVERY_S:
            shown_at = time.monotonic()
            print(f"\r{summary.lines} lines, {summary.failed} failed", end="", file=sys.stderr, flush=True)

    try:
        return run_lines(read_lines(lines), sender.send, output.write, concurrency, show)
    finally:
        sender.close()
        output.flush()


def _check_apart(input_file: str, output_file: str) -> None:
    """Raise ConfigError if the output would overwrite the input."""
    with contextlib.suppress(OSError):
        if "-" not in (input_file, output_file) and Path(output_file).samefile(input_file):
            raise ConfigError(f"--output-file {output_file} must not be the input file")
