"""Run tiers of KV blocks under seeded faults: ``python tests/simulation/tier_moves.py --moves 100000 --jobs 2``.

The pages are bytes, written and checked by the real copies (support/scheduler/byte_pages.py). A long run can be split:
each ends with a line of JSON that names the next seed.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = list(map(str, (HERE.parent / "support").iterdir()))

PIECE = 40
"""Seeds that a process plays at a time."""
ENDING = ("violations", "seconds", "next")
"""Names in the last line that are no counts of ``play``."""


def play(first: int, *, short: bool) -> tuple[Counter[str], dict[int, str]]:
    """Play PIECE seeds; return their counts, and the failures by seed."""
    from tier_load import TierLoad

    counts: Counter[str] = Counter()
    failures = {}
    for seed in range(first, first + PIECE):
        try:
            counts += TierLoad(seed, short=short, check_every=20).run()
        except Exception as error:
            failures[seed] = " ".join(f"{type(error).__name__}: {error}".split())
        counts["runs"] += 1
    return counts, failures


def play_in_process(first: int, *, short: bool) -> tuple[Counter[str], dict[int, str]]:
    """Play PIECE seeds in a process of this program with one job."""
    command = [sys.executable, __file__, "--first", f"{first}", "--runs", f"{PIECE}", *(["--short"] if short else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    *failed, last = done.stdout.splitlines()
    counts = {name: number for name, number in json.loads(last).items() if name not in ENDING}
    rows = (line.removeprefix("seed ").partition(": ") for line in failed)
    return Counter(counts), {int(seed): failure for seed, _, failure in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="first seed (0)")
    parser.add_argument("--moves", type=int, default=100_000, metavar="N", help="blocks to move (100000)")
    parser.add_argument("--runs", type=int, default=0, metavar="N", help="instead of --moves: number of runs")
    parser.add_argument("--short", action="store_true", help="short runs in a tiny pool")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (1)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no new seeds after this time")
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    failures: dict[int, str] = {}
    seed, began = args.first, time.monotonic()

    def is_complete() -> bool:
        return counts["runs"] >= args.runs if args.runs else counts["moves"] >= args.moves

    run = play if args.jobs == 1 else play_in_process
    with ThreadPoolExecutor(args.jobs) as pool:
        while not is_complete() and time.monotonic() - began < args.seconds:
            firsts = range(seed, seed + PIECE * args.jobs, PIECE)
            for found, failed in pool.map(partial(run, short=args.short), firsts):
                counts += found
                failures |= failed
            seed = firsts.stop
    for failed_seed, failure in failures.items():
        print(f"seed {failed_seed}: {failure}")
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({**counts, "violations": len(failures), "seconds": seconds, "next": seed}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
