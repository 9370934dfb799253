"""Simulate many seeds: ``python tests/simulation/run.py --seeds 2000``. See README.md here.

A long run can be split: each run ends with a line of JSON that names the next seed.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import msgspec

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), *map(str, (HERE.parent / "support").iterdir())]

PIECE = 5
"""Seeds that a process plays before it checks the clock."""


class _Player:
    """A process that plays ranges of seeds, one after the other."""

    def __init__(self, *, sessions: bool) -> None:
        kind = "--play-sessions" if sessions else "--play"
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def play(self, seeds: range) -> "Total":  # type: ignore[name-defined]  # noqa: F821
        from sim_run import Total

        assert self._process.stdin is not None and self._process.stdout is not None
        print(seeds.start, seeds.stop, file=self._process.stdin, flush=True)
        total = json.loads(self._process.stdout.readline())
        total["failures"] = {int(seed): failure for seed, failure in total["failures"].items()}
        return Total(**{**total, "faults": Counter(total["faults"]), "cells": set(total["cells"])})

    def close(self) -> None:
        self._process.communicate()


def _play(*, sessions: bool) -> int:
    """The other end of a _Player."""
    from sim_run import play_seeds, sessions_of
    from sim_scenario import scenario_of

    for line in sys.stdin:
        first, stop = line.split()
        total = play_seeds(range(int(first), int(stop)), draw=sessions_of if sessions else scenario_of)
        print(msgspec.json.encode(total).decode(), flush=True)
    return 0


def main() -> int:
    if sys.argv[1:] in (["--play"], ["--play-sessions"]):
        return _play(sessions=sys.argv[1] == "--play-sessions")
    from sim_cells import CELLS
    from sim_run import Total, sessions_of, shrink
    from sim_scenario import KINDS, scenario_of

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="number of seeds (1000)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="first seed (0)")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), metavar="SECONDS", help="start no new seeds after this time"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (1)")
    parser.add_argument("--sessions", action="store_true", help="add sessions to each seed")
    parser.add_argument("--no-shrink", action="store_true", help="only print which seeds failed")
    args = parser.parse_args()

    total, began = Total(), time.monotonic()
    end = args.first + args.seeds
    done = args.first
    players: Queue[_Player] = Queue()
    for _ in range(args.jobs):
        players.put(_Player(sessions=args.sessions))

    def play(seeds: range) -> Total:
        player = players.get()
        try:
            return player.play(seeds)
        finally:
            players.put(player)

    with ThreadPoolExecutor(args.jobs) as pool:
        while done < end and time.monotonic() - began < args.seconds:
            pieces = [
                range(first, min(first + PIECE, end))
                for first in range(done, min(done + PIECE * args.jobs * 4, end), PIECE)
            ]
            for piece in pool.map(play, pieces):
                total.join(piece)
            done = pieces[-1].stop
    for _ in range(args.jobs):
        players.get().close()
    seconds = time.monotonic() - began
    _print(total.faults, KINDS)
    for seed, failure in total.failures.items():
        print(f"seed {seed}: {failure}")
    if total.failures and not args.no_shrink:
        print(shrink((sessions_of if args.sessions else scenario_of)(min(total.failures))).paste())
    print(
        json.dumps(
            {
                "seeds": total.num_seeds,
                "faults": total.num_faults,
                "requests": total.num_requests,
                "tokens": total.num_tokens,
                "steps": total.num_steps,
                "forks": total.num_forks,
                "copies": total.num_copies,
                "orphans": total.num_orphans,
                "pieces": total.num_pieces,
                "cells": len(total.cells),
                "missing_cells": sorted(CELLS - total.cells),
                "given_up": total.num_given_up,
                "violations": len(total.failures),
                "failed_seeds": sorted(total.failures),
                "faults_per_second": round(total.num_faults / seconds, 1),
                "seconds": round(seconds, 1),
                "next": done,
            }
        )
    )
    return 1 if total.failures else 0


def _print(faults: "Counter[str]", kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        print(f"{kind:28}{faults[kind]:>9}")


if __name__ == "__main__":
    sys.exit(main())
