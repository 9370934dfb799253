"""Simulate many seeds: ``python tests/simulation/run.py --seeds 2000``. See README.md here.

Pieces of a long run: each ends with the line of JSON that says which seed is the next one.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

PIECE = 5
"""Seeds that a process plays before it looks at the clock."""


def _play(seeds: range) -> "Total":  # type: ignore[name-defined]  # noqa: F821
    from sim_run import play_seeds

    return play_seeds(seeds)


def main() -> int:
    from sim_run import Total, shrink
    from sim_scenario import KINDS, scenario_of

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after so long")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--no-shrink", action="store_true", help="only say which seeds failed")
    args = parser.parse_args()

    total, began = Total(), time.monotonic()
    end = args.first + args.seeds
    done = args.first
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        while done < end and time.monotonic() - began < args.seconds:
            pieces = [
                range(first, min(first + PIECE, end))
                for first in range(done, min(done + PIECE * args.jobs * 4, end), PIECE)
            ]
            for piece in pool.map(_play, pieces, chunksize=1):
                total.num_seeds += piece.num_seeds
                total.faults += piece.faults
                total.num_requests += piece.num_requests
                total.num_tokens += piece.num_tokens
                total.num_steps += piece.num_steps
                total.num_given_up += piece.num_given_up
                total.failures.update(piece.failures)
            done = pieces[-1].stop
    seconds = time.monotonic() - began
    _print(total.faults, KINDS)
    for seed, failure in total.failures.items():
        print(f"seed {seed}: {failure}")
    if total.failures and not args.no_shrink:
        print(shrink(scenario_of(min(total.failures))).paste())
    print(
        json.dumps(
            {
                "seeds": total.num_seeds,
                "faults": total.num_faults,
                "requests": total.num_requests,
                "tokens": total.num_tokens,
                "steps": total.num_steps,
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
