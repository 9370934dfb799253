"""Convert a Vidur trace, which has lengths but no times, to Mooncake's JSON lines with times of an arrival process."""

import argparse
import sys
from pathlib import Path

import numpy as np

from quire.protocol.errors import ConfigError
from quire.replay.formats.arrivals import parse_arrivals
from quire.replay.formats.read import Faults, files_of
from quire.replay.formats.table import read_table, token_count

sys.path.insert(0, str(Path(__file__).resolve().parent))

import mooncake_lines

COLUMNS = ("num_prefill_tokens", "num_decode_tokens")


def convert(path: Path, arrivals: str, seed: int) -> list[tuple[float, int, int]]:
    """Return (seconds, prompt tokens, output tokens) of each row.

    Raises:
        ConfigError: a line or the arrival process is malformed.
    """
    lengths = []
    for file in files_of(path):
        for number, (prompt, answer) in read_table(file, COLUMNS, Faults(False)):
            try:
                lengths.append((token_count(prompt, COLUMNS[0], 1), token_count(answer, COLUMNS[1])))
            except ValueError as error:
                raise ConfigError(f"{file}:{number}: {error}") from None
    times = parse_arrivals(arrivals).times(len(lengths), np.random.default_rng(seed)).tolist()
    return [(time, *pair) for time, pair in zip(times, lengths, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "trace", type=Path, help="CSV file with num_prefill_tokens and num_decode_tokens, or a directory of such files"
    )
    parser.add_argument("out", type=Path, help="output file (JSON lines)")
    processes = "poisson:RATE, gamma:RATE:CV, weibull:RATE:CV, constant:RATE, burst:RATE:SIZE or at-once (at-once)"
    parser.add_argument("--arrivals", default="at-once", metavar="PROCESS", help=processes)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed for the arrivals (0)")
    args = parser.parse_args()
    try:
        count = mooncake_lines.write(args.out, convert(args.trace, args.arrivals, args.seed))
    except ConfigError as error:
        sys.exit(f"{error}")
    print(f"{count} requests, arrivals {args.arrivals}: {args.out}")


if __name__ == "__main__":
    main()
