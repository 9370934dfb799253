"""The command line of the acceptance harnesses."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import beside_images
import engine_deaths
import faults
import front_end_cost
import hostile
import many_adapters
import many_streams
import soak

from quire.protocol.errors import QuireError


def main(argv: Sequence[str] | None = None) -> None:
    """Run one harness; every expected failure ends with one line on stderr and a non-zero status."""
    args = _make_parser().parse_args(argv)
    try:
        args.run(args)
    except QuireError as error:
        print(f"{args.harness}: error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        sys.exit(130)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run.py", description="Test a real server under faults and load.", allow_abbrev=False
    )
    under = parser.add_subparsers(metavar="HARNESS", dest="harness", required=True)
    _add_faults(under)
    _add_engines(under)
    _add_loads(under)
    return parser


def _command(under: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = under.add_parser(name, help=text, description=text, allow_abbrev=False)
    made.set_defaults(run=run)
    made.add_argument("--json", type=Path, metavar="FILE", help="file that also receives the JSON line")
    return made


def _add_faults(under: Any) -> None:
    parser = _command(under, "faults", "Kill processes of a running server and check its clients' answers.", faults.run)
    kinds = (*faults.KINDS, "all")
    parser.add_argument("--kill", choices=kinds, default="all", help="process to kill; worker-stop sends SIGSTOP (all)")
    parser.add_argument("--count", type=int, default=20, metavar="N", help="number of deaths (20)")
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="concurrent streams (64)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="workers per model (1)")
    parser.add_argument("--api-server-count", type=int, default=2, metavar="N", help="number of front ends (2)")
    parser.add_argument("--deterministic", action="store_true", help="require answers equal to those without faults")
    standby = argparse.BooleanOptionalAction
    parser.add_argument(
        "--standby", action=standby, default=True, help="kill workers only when a standby is ready (on)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (0)")
    parser.add_argument("--serve-args", metavar="FLAGS", help="further flags of the server, as one string")


def _add_engines(under: Any) -> None:
    text = "Kill engines and routers of a server with several, and restart its engines."
    parser = _command(under, "engines", text, engine_deaths.run)
    parser.add_argument("--engines", type=int, default=4, metavar="N", help="number of engines (4)")
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="concurrent streams (64)")
    kills = "deaths of an engine, a scheduler or a worker in turn (100)"
    parser.add_argument("--kills", type=int, default=100, metavar="N", help=kills)
    parser.add_argument("--router-kills", type=int, default=30, metavar="N", help="deaths of the router (30)")
    parser.add_argument("--restarts", type=int, default=30, metavar="N", help="rolling restarts of all engines (30)")
    parser.add_argument("--routing", default="cache", metavar="POLICY", help="policy of the router (cache)")
    drain = "seconds that requests have to end on a draining engine (1)"
    parser.add_argument("--drain-timeout", type=float, default=1.0, metavar="SECONDS", help=drain)
    parser.add_argument("--num-requests", type=int, default=45, metavar="N", help="different requests (45)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (0)")
    parser.add_argument("--serve-args", metavar="FLAGS", help="further flags of the server, as one string")


def _add_loads(under: Any) -> None:
    streams = _command(under, "streams", "Run very many concurrent streams; check losses and gaps.", many_streams.run)
    streams.add_argument("--num-streams", type=int, default=1000, metavar="N", help="concurrent streams (1000)")
    streams.add_argument("--output-len", type=int, default=128, metavar="N", help="output tokens per stream (128)")
    side = "tokens per long prompt in the background; 0: no long prompts (1800)"
    streams.add_argument("--side-len", type=int, default=1800, metavar="N", help=side)
    interval = "interval between long prompts (0.5)"
    streams.add_argument("--side-interval", type=float, default=0.5, metavar="SECONDS", help=interval)
    cost = _command(under, "cost", "Measure the CPU time of the front end per streamed token.", front_end_cost.run)
    counts = "numbers of concurrent streams (256,2048)"
    cost.add_argument("--num-streams", type=_counts, default=(256, 2048), metavar="N,N", help=counts)
    cost.add_argument("--output-len", type=int, default=400, metavar="N", help="output tokens per stream (400)")
    cost.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds over all numbers of streams (3)")
    cost.add_argument("--api", choices=front_end_cost.APIS, default="chat", help="what the streams are (chat)")
    long = _command(under, "soak", "Run very many short requests of all kinds; check memory growth.", soak.run)
    long.add_argument("--num-requests", type=int, default=100_000, metavar="N", help="number of requests (100000)")
    concurrency = "number of clients, each with one request at a time (64)"
    long.add_argument("--concurrency", type=int, default=64, metavar="N", help=concurrency)
    warm_up = "requests before growth is measured (50000)"
    long.add_argument("--warm-up", type=int, default=50_000, metavar="N", help=warm_up)
    long.add_argument("--samples", type=int, default=60, metavar="N", help="measurements of each process (60)")
    attacked = _command(under, "hostile", "Measure what honest clients lose to a hostile one.", hostile.run)
    attacked.add_argument("--attacks", metavar="A,B", help=f"attacks to run (all): {', '.join(hostile.ATTACKS)}")
    attacked.add_argument("--num-requests", type=int, default=96, metavar="N", help="number of honest requests (96)")
    attacked.add_argument("--concurrency", type=int, default=8, metavar="N", help="number of honest clients (8)")
    adapted = _command(under, "adapters", "Serve very many LoRA adapters; check answers and gaps.", many_adapters.run)
    adapted.add_argument("--count", type=int, default=1024, metavar="N", help="number of adapters (1024)")
    adapted.add_argument("--num-requests", type=int, default=10_000, metavar="N", help="number of requests (10000)")
    adapted.add_argument("--concurrency", type=int, default=32, metavar="N", help="number of clients (32)")
    adapted.add_argument("--rank", type=int, default=8, metavar="N", help="rank of the adapters (8)")
    adapted.add_argument("--max-loras", type=int, default=8, metavar="N", help="adapters in a step (8)")
    adapted.add_argument("--max-cpu-loras", type=int, default=64, metavar="N", help="adapters in host memory (64)")
    adapted.add_argument("--rounds", type=int, default=4, metavar="N", help="rounds of the measurement of gaps (4)")
    adapted.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of the load (0)")
    adapted.add_argument("--serve-args", metavar="FLAGS", help="further flags of the server, as one string")
    seen = _command(under, "images", "Time text streams beside 100 images in work.", beside_images.run)
    seen.add_argument("--simulate", metavar="COST", help="simulated device, such as constant:10 (the CPU)")
    seen.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds without and with images (5)")
    seen.add_argument("--serve-args", metavar="FLAGS", help="further flags of the server, as one string")
    for one in (streams, cost, long, attacked):
        one.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of the load (0)")
        one.add_argument("--url", metavar="URL", help="running server to test (default: start one with the demo model)")
        one.add_argument("--api-key", metavar="KEY", help="API key of that server")
        one.add_argument("--serve-args", metavar="FLAGS", help="further flags of the started server, as one string")


def _counts(text: str) -> tuple[int, ...]:
    counts = text.split(",")
    if not all(each.isdecimal() and int(each) for each in counts):
        raise argparse.ArgumentTypeError(f"must be numbers from 1, with commas between them (got {text})")
    return tuple(map(int, counts))
