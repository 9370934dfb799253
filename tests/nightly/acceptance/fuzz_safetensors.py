"""Random damage to a tiny checkpoint, which must be refused with an error that names it, or opened.

    python -P tests/nightly/acceptance/fuzz_safetensors.py --seconds 3600 --seed 1

A failure is printed with the flags that repeat it, and the exit status is 1. The last line is JSON.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.extend(map(str, (Path(__file__).resolve().parents[2] / "support").iterdir()))

from hostile_checkpoints import MUTATIONS, open_checkpoint, write

from quire.protocol.errors import ConfigError

SLOWEST_S = 5.0


def attempt(whole: Path, folder: Path, seed: int, number: int) -> str:
    """Apply one to three kinds of damage at once; return the outcome."""
    rng = random.Random(f"{seed} {number}")
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    kinds = rng.sample(list(MUTATIONS), rng.choice((1, 1, 2, 3)))
    try:
        for kind in kinds:
            MUTATIONS[kind](folder, rng)
    except Exception:
        return "damaged twice over"  # the second kind cannot read what the first one left
    began = time.monotonic()
    try:
        open_checkpoint(folder)
        return "opened"
    except ConfigError as error:
        text = str(error)
        assert str(folder) in text and text.isprintable() and len(text) < 700, text
        return "refused"
    finally:
        assert time.monotonic() < began + SLOWEST_S, "opening took too long"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, metavar="SECONDS", help="duration (60)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (0)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="first attempt, to repeat a failure (0)")
    args = parser.parse_args()
    tally, failures, number, began = Counter[str](), 0, args.first, time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        whole = write(Path(place) / "whole")
        while time.monotonic() < began + args.seconds and failures < 10:
            try:
                tally[attempt(whole, Path(place) / "model", args.seed, number)] += 1
            except Exception:
                failures += 1
                traceback.print_exc()
                print(f"repeat with --seed {args.seed} --first {number}", file=sys.stderr)
            number += 1
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"seed": args.seed, "seconds": seconds, "failures": failures, **dict(sorted(tally.items()))}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
