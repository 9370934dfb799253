"""The command line of the acceptance harnesses."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faults
import hostile
import many_streams
import soak

from quire.protocol.errors import QuireError


def main(argv: Sequence[str] | None = None) -> None:
    """Run one harness; every expected failure ends in one line on stderr and a status other than 0."""
    args = _make_parser().parse_args(argv)
    try:
        args.run(args)
    except QuireError as error:
        print(f"{args.harness}: error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        sys.exit(130)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run.py", description="Try a real server hard.", allow_abbrev=False)
    under = parser.add_subparsers(metavar="HARNESS", dest="harness", required=True)
    _add_faults(under)
    _add_loads(under)
    return parser


def _command(under: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = under.add_parser(name, help=text, description=text, allow_abbrev=False)
    made.set_defaults(run=run)
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON here")
    return made


def _add_faults(under: Any) -> None:
    parser = _command(under, "faults", "Kill processes of a running server; what its clients notice.", faults.run)
    kinds = (*faults.KINDS, "all")
    parser.add_argument("--kill", choices=kinds, default="all", help="which; worker-stop: SIGSTOP, not SIGKILL (all)")
    parser.add_argument("--count", type=int, default=20, help="deaths (20)")
    parser.add_argument("--streams", type=int, default=64, help="answers in flight at once (64)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="workers that share the model (1)")
    parser.add_argument("--api-server-count", type=int, default=2, help="front ends (2)")
    parser.add_argument("--deterministic", action="store_true", help="every answer must equal the undisturbed one")
    standby = argparse.BooleanOptionalAction
    parser.add_argument("--standby", action=standby, default=True, help="kill workers once a standby is there (on)")
    parser.add_argument("--seed", type=int, default=0, help="of requests, victims and moments (0)")


def _add_loads(under: Any) -> None:
    streams = _command(under, "streams", "Very many streams at once: is one lost, and do they flow?", many_streams.run)
    streams.add_argument("--num-streams", type=int, default=1000, help="streamed answers at once (1000)")
    streams.add_argument("--output-len", type=int, default=128, help="tokens of each (128)")
    side = "tokens of each long prompt meanwhile; 0: none (1800)"
    streams.add_argument("--side-len", type=int, default=1800, help=side)
    streams.add_argument("--side-interval", type=float, default=0.5, help="seconds from one to the next (0.5)")
    long = _command(under, "soak", "Very many short requests of all kinds: does anything grow?", soak.run)
    long.add_argument("--num-requests", type=int, default=100_000, help="in all (100000)")
    long.add_argument("--concurrency", type=int, default=64, help="clients, each with one request at a time (64)")
    long.add_argument("--warm-up", type=int, default=50_000, help="requests before growth counts (50000)")
    long.add_argument("--samples", type=int, default=60, help="looks at each process (60)")
    attacked = _command(under, "hostile", "What honest clients lose by a hostile one, counted.", hostile.run)
    attacked.add_argument("--attacks", metavar="A,B", help=f"only these (all): {', '.join(hostile.ATTACKS)}")
    attacked.add_argument("--num-requests", type=int, default=96, help="of the honest clients (96)")
    attacked.add_argument("--concurrency", type=int, default=8, help="honest clients (8)")
    for one in (streams, long, attacked):
        one.add_argument("--seed", type=int, default=0, help="of the load (0)")
        one.add_argument("--url", help="of a running server (one of its own, of the demo model)")
        one.add_argument("--api-key", help="of that server")
        one.add_argument("--serve-args", metavar="FLAGS", help="further flags of its own server, as one string")
