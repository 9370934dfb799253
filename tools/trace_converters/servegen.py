"""Draw a workload from ServeGen's clients and write it as Mooncake's JSON lines.

For each window of ten minutes, a client has a rate, and the coefficient of variation and distribution family of the
gaps between its requests (chunk-N-trace.csv); it also has histograms of lengths (chunk-N-dataset.json). Each window
gets exactly its mean number of requests, and the gaps are scaled to fill it. ``output_tokens`` includes reasoning
tokens, so ``reason_ratio`` is not used.
"""

import argparse
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from quire.protocol.errors import ConfigError
from quire.replay.formats.arrivals import Doubles, draw_gaps
from quire.replay.formats.read import MAX_TOKENS, Faults, read_lines
from quire.replay.formats.table import fields_of
from quire.replay.recorded.decompress import DECOMPRESSION_ERRORS, open_decompressed

sys.path.insert(0, str(Path(__file__).resolve().parent))

import mooncake_lines

WINDOW = 600.0
MAX_REQUESTS = 5_000_000
_NAME = re.compile(r"chunk-(\d+)-(trace\.csv|dataset\.json)(\.(gz|xz|zst))?")


class Window(NamedTuple):
    """``cv``: standard deviation of the gaps divided by their mean."""

    start: float
    rate: float
    cv: float
    family: str


class Client(NamedTuple):
    """One chunk. ``histograms``: by the start second of their validity, then by field."""

    number: int
    windows: list[Window]
    histograms: dict[float, dict[str, str]]


class Selection(NamedTuple):
    """The part of the trace to draw. ``rate``: factor on each window's rate; burstiness and the length of the day are
    unchanged.
    """

    start: float
    duration: float
    rate: float
    seed: int


def draw(folder: Path, selection: Selection) -> list[tuple[float, int, int]]:
    """Return (seconds from the start, prompt tokens, output tokens) of all clients, client by client.

    Raises:
        ConfigError: a file is malformed or missing, no client is active, or there are too many requests.
    """
    clients = read_clients(folder)
    expected = sum(
        max(0.0, min(selection.start + selection.duration, window.start + WINDOW) - max(selection.start, window.start))
        * window.rate
        * selection.rate
        for client in clients
        for window in client.windows
    )
    if not 0 < expected <= MAX_REQUESTS:
        raise ConfigError(
            f"{folder}: number of requests in this time must be above 0 and at most {MAX_REQUESTS} (got {expected:.3g})"
        )
    return [request for client in clients for request in _requests(client, selection)]


def read_clients(folder: Path) -> list[Client]:
    """Return the clients of a directory, ordered by number."""
    halves: dict[int, dict[str, Path]] = {}
    for file in folder.iterdir():
        if match := _NAME.fullmatch(file.name):
            halves.setdefault(int(match[1]), {})[match[2]] = file
    for number, found in halves.items():
        for name in {"trace.csv", "dataset.json"} - found.keys():
            raise ConfigError(f"{folder}: chunk-{number}-{name} is missing")
    return [
        Client(number, read_windows(found["trace.csv"]), read_histograms(found["dataset.json"]))
        for number, found in sorted(halves.items())
    ]


def read_windows(file: Path) -> list[Window]:
    """Return the windows with requests, in order of time."""
    windows, last = [], -1.0
    for number, line in read_lines(file, Faults(False)):
        fields = fields_of(line)
        try:
            start, rate, cv = (float(text or "0") for text in fields[:3])
            family = fields[3].lower()
        except (ValueError, IndexError):
            raise ConfigError(f"{file}:{number}: must be start, rate, cv, family (got {line[:80]!r})") from None
        is_usable = rate == 0 or (family in ("gamma", "weibull") and 0 < cv <= 1e9)
        if not last < start <= 1e9:
            raise ConfigError(f"{file}:{number}: start must be above {last:g} and at most 1e9 (got {start:g})")
        if not 0 <= rate <= 1e9:
            raise ConfigError(f"{file}:{number}: rate must be from 0 to 1e9 (got {rate:g})")
        if not is_usable:
            allowed = "family must be gamma or weibull, and cv above 0 and at most 1e9"
            raise ConfigError(f"{file}:{number}: {allowed} (got {family[:40]!r}, {cv:g})")
        last = start
        if rate > 0:
            windows.append(Window(start, rate, cv, family))
    return windows


def read_histograms(file: Path) -> dict[float, dict[str, str]]:
    try:
        with open_decompressed(file) as stream:
            raw = msgspec.json.decode(stream.read(), type=dict[str, dict[str, str]])
        histograms = {float(start): fields for start, fields in raw.items()}
    except (msgspec.MsgspecError, ValueError, *DECOMPRESSION_ERRORS) as error:
        raise ConfigError(f"{file}: {error}") from None
    if not histograms:
        raise ConfigError(f"{file}: no histogram")
    return dict(sorted(histograms.items()))


def draw_lengths(text: str, count: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw lengths of at least 1 token from a histogram string ``{tokens: weight, ...}``.

    Raises:
        ConfigError: the histogram is malformed.
    """
    try:
        pairs = [part.split(":") for part in text.strip().removeprefix("{").removesuffix("}").split(",")]
        tokens = np.array([int(key) for key, _ in pairs], np.int64)
        weights = np.array([float(value) for _, value in pairs])
    except (ValueError, OverflowError):
        raise ConfigError(f"histogram must have the form {{tokens: weight, ...}} (got {text[:80]!r})") from None
    sums = np.cumsum(weights)
    if not (tokens.min() >= 0 and tokens.max() <= MAX_TOKENS):
        raise ConfigError(f"lengths must be from 0 to {MAX_TOKENS} (got {text[:80]!r})")
    if not (weights.min() >= 0 and 0 < sums[-1] < np.inf):
        raise ConfigError(f"weights must be at least 0, with a finite sum above 0 (got {text[:80]!r})")
    places = np.searchsorted(sums, random.random(count) * sums[-1], side="right")
    return np.maximum(1, tokens[np.minimum(places, len(tokens) - 1)])


def draw_times(window: Window, rate: float, random: np.random.Generator) -> Doubles:
    """Draw the seconds of a window's requests; the gaps are scaled, so a few extreme ones neither empty nor overfill
    it.
    """
    count = int(window.rate * rate * WINDOW + random.random())
    ends = np.cumsum(draw_gaps(window.family, window.cv, count + 1, random))
    if not ends[-1] > 0:  # all gaps underflow to 0
        ends = np.arange(1.0, count + 2)
    times: Doubles = window.start + ends[:-1] / ends[-1] * WINDOW
    return times


def _requests(client: Client, selection: Selection) -> Iterator[tuple[float, int, int]]:
    """Yield a client's requests. Each window has its own random generator, so the draw does not depend on the
    selection.
    """
    end = selection.start + selection.duration
    for window in client.windows:
        if window.start + WINDOW <= selection.start or window.start >= end:
            continue
        random = np.random.default_rng([selection.seed, client.number, int(window.start)])
        times = draw_times(window, selection.rate, random)
        starts = list(client.histograms)
        histograms = client.histograms[starts[max(0, bisect_right(starts, window.start) - 1)]]
        try:
            columns = [draw_lengths(histograms[name], len(times), random) for name in ("input_tokens", "output_tokens")]
        except KeyError as error:
            raise ConfigError(f"chunk {client.number}, second {window.start:g}: {error} is missing") from None
        for time, prompt, answer in zip(times.tolist(), *(column.tolist() for column in columns), strict=True):
            if selection.start <= time < end:
                yield time - selection.start, prompt, answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="directory with chunk-N-trace.csv and chunk-N-dataset.json")
    parser.add_argument("out", type=Path, help="output file (JSON lines)")
    parser.add_argument("--start", type=float, default=0.0, metavar="SECONDS", help="start of the selection (0)")
    parser.add_argument("--duration", type=float, default=3600.0, metavar="SECONDS", help="its duration (3600)")
    parser.add_argument("--rate", type=float, default=1.0, metavar="FACTOR", help="factor on each window's rate (1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (0)")
    args = parser.parse_args()
    try:
        count = mooncake_lines.write(
            args.out, draw(args.folder, Selection(args.start, args.duration, args.rate, args.seed))
        )
    except ConfigError as error:
        sys.exit(f"{error}")
    print(f"{count} requests of {args.duration:g} s: {args.out}")


if __name__ == "__main__":
    main()
