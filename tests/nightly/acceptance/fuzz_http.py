"""Mutated requests against a server started for it; the last line of output is JSON.

python tests/nightly/acceptance/fuzz_http.py --seconds 3600 --seed 1
python tests/nightly/acceptance/fuzz_http.py --case 1:4711         # repeat the case that a failure names
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.extend(map(str, [(here := Path(__file__).resolve()).parent, *(here.parents[2] / "support").iterdir()]))

from abuse import AbusedServer
from http_fuzzer import BadAnswer, Counts, check_base_requests, fuzz


def seeds(seed: int, seconds: float) -> Iterator[str]:
    """Yield names of cases until the time is over."""
    end = time.monotonic() + seconds
    for number in itertools.count():
        if time.monotonic() >= end:
            return
        yield f"{seed}:{number}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, metavar="SECONDS", help="duration (60)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (0)")
    parser.add_argument("--case", metavar="SEED:NUMBER", help="run only this case")
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="further flags of quire serve, after --")
    args = parser.parse_args()
    total, failure = Counts(), ""
    server = AbusedServer(*args.flags)
    try:
        check_base_requests(server)
        for seed in [args.case] if args.case else seeds(args.seed, args.seconds):
            total.add(fuzz(server, [seed]))
            if total.requests % 2000 == 0:
                print(f"{total.requests} requests, {dict(total.by_status)}", file=sys.stderr, flush=True)
        server.served.wait_until_idle()
    except (BadAnswer, AssertionError) as error:
        failure = str(error)
        print(failure, file=sys.stderr)
    finally:
        server.close()
    print(json.dumps({"seed": args.seed, "failure": failure[:2000], **total.as_dict()}))
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
