"""ServeGen's clients: per window of ten minutes a rate, how bursty it is, and of what family; lengths as histograms.

A workload is what all clients send, each drawn by itself. Nothing tells contents.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from quire.launch.replay.formats.arrivals import Doubles, draw_gaps
from quire.launch.replay.formats.options import LoadOptions
from quire.launch.replay.formats.read import MAX_TOKENS, Faults, finish, read_lines, read_whole
from quire.launch.replay.formats.table import fields_of
from quire.launch.replay.workload.workload import Call, Workload
from quire.protocol.errors import ConfigError

WINDOW = 600.0
DEFAULT_DURATION = 3600.0
MAX_CALLS = 5_000_000
FILE_NAME = re.compile(r"chunk-(\d+)-(trace\.csv|dataset\.json)(\.(gz|xz|zst))?")
_LENGTHS = ("input_tokens", "output_tokens")


class Window(NamedTuple):
    """``cv``: standard deviation by mean of the gaps."""

    start: float
    rate: float
    cv: float
    family: str


class Histogram(NamedTuple):
    tokens: npt.NDArray[np.int64]
    cumulated: Doubles

    def draw(self, count: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
        """An empty prompt or answer is taken as one token."""
        places = np.searchsorted(self.cumulated, random.random(count) * self.cumulated[-1], side="right")
        drawn: npt.NDArray[np.int64] = np.maximum(1, self.tokens[np.minimum(places, len(self.tokens) - 1)])
        return drawn


@dataclass
class Client:
    """One chunk: its windows, and its histograms by the time from which they hold."""

    number: int
    windows: list[Window]
    dataset: Path

    @cached_property
    def _texts(self) -> dict[float, dict[str, str]]:
        raw = _decode_dataset(self.dataset)
        try:
            return dict(sorted((float(start), fields) for start, fields in raw.items()))
        except ValueError:
            raise ConfigError(f"{self.dataset}: its keys must be seconds") from None

    @cached_property
    def _histograms(self) -> dict[tuple[float, str], Histogram]:
        return {}

    def histogram(self, time: float, field: str) -> Histogram:
        """Raises: ConfigError: there is none, or it is malformed."""
        starts = list(self._texts)
        start = starts[max(0, bisect_right(starts, time) - 1)]
        if (start, field) not in self._histograms:
            where = f"{self.dataset}: window {start:g}: `{field}`"
            text = self._texts[start].get(field)
            if text is None:
                raise ConfigError(f"{where} is missing")
            self._histograms[start, field] = parse_histogram(text, where)
        return self._histograms[start, field]


def load(path: Path, options: LoadOptions) -> Workload:
    """``rate`` multiplies each window's rate: bursts stay as sharp as they are, and the day as long.

    Raises:
        ConfigError: a file is bad or lacks its other half, nothing comes in the window, or too much does.
    """
    faults = Faults(options.lenient)
    window = replace(options, duration=options.duration or DEFAULT_DURATION)
    clients = read_clients(path, faults)
    _check_size(path, clients, window)
    workload = Workload("servegen", str(path), [])
    for client in clients:
        _add_calls(workload.calls, client, window)
    told = "the first hour is taken" if options.duration is None else f"{window.duration:g} s are taken"
    workload.notes.append(f"{len(clients)} clients drawn with seed {options.seed}; {told}, from {options.start:g} s on")
    workload.notes.append("the trace does not tell contents: no prompt shares a prefix with another")
    if options.rate != 1:
        workload.notes.append(f"each window's rate is multiplied by {options.rate:g}; gaps vary as much as they did")
    return finish(workload, window, faults, scale=False)


def read_clients(path: Path, faults: Faults) -> list[Client]:
    """All of a folder, or the one that a file is half of; in order of their numbers."""
    folder = path if path.is_dir() else path.parent
    halves: dict[int, dict[str, Path]] = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        if match := FILE_NAME.fullmatch(file.name):
            halves.setdefault(int(match[1]), {})[match[2]] = file
    if not path.is_dir():
        match = FILE_NAME.fullmatch(path.name)
        if match is None or int(match[1]) not in halves:
            raise ConfigError(f"{path}: name a folder of, or one of, chunk-N-trace.csv and chunk-N-dataset.json")
        halves = {int(match[1]): halves[int(match[1])]}
    if not halves:
        raise ConfigError(f"{path}: the folder has no chunk-N-trace.csv")
    clients = []
    for number, found in sorted(halves.items()):
        for name in ("trace.csv", "dataset.json"):
            if name not in found:
                raise ConfigError(f"{folder}: chunk-{number}-{name} is missing beside its other half")
        clients.append(Client(number, read_windows(found["trace.csv"], faults), found["dataset.json"]))
    return clients


def read_windows(file: Path, faults: Faults) -> list[Window]:
    """Idle windows are left out."""
    windows = []
    last = -1.0
    for number, line in read_lines(file, faults):
        try:
            window = _window(fields_of(line))
            if window.start <= last:
                raise ValueError(f"the window's start {window.start:g} does not come after {last:g}")
        except ValueError as error:
            faults.add(file, number, str(error))
            continue
        last = window.start
        if window.rate > 0:
            windows.append(window)
    return windows


def _window(fields: list[str]) -> Window:
    if len(fields) != 6:
        raise ValueError(f"{len(fields)} fields; a window has 6: start, rate, cv, family and two parameters")
    start, rate, cv = (_number(text, name) for text, name in zip(fields[:3], ("start", "rate", "cv"), strict=False))
    family = fields[3].lower()
    if rate and (family not in ("gamma", "weibull") or not cv):
        raise ValueError(f"`family` and `cv` must be Gamma or Weibull and above 0, not {fields[3]!r} and {cv:g}")
    return Window(start, rate, cv, family)


def _number(text: str, name: str) -> float:
    try:
        value = float(text or "0")
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e9:
        raise ValueError(f"`{name}` must be a number from 0, not {text[:40]!r}")
    return value


def _decode_dataset(file: Path) -> dict[str, dict[str, str]]:
    try:
        raw = msgspec.json.decode(read_whole(file), type=dict[str, dict[str, str]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: {error}") from None
    if not raw:
        raise ConfigError(f"{file}: it holds no histogram")
    return raw


def parse_histogram(text: str, where: str) -> Histogram:
    """Of ``{tokens: probability, ...}``, a string; it need not add up to 1.

    Raises:
        ConfigError: it is not that.
    """
    try:
        pairs = [piece.split(":") for piece in text.strip().removeprefix("{").removesuffix("}").split(",")]
        tokens = np.array([int(key) for key, _ in pairs], np.int64)
        weights = np.array([float(value) for _, value in pairs])
    except (ValueError, OverflowError):
        raise ConfigError(f"{where} is no histogram {{tokens: probability, ...}}") from None
    if tokens.min() < 0 or tokens.max() > MAX_TOKENS or not np.isfinite(weights).all() or weights.min() < 0:
        raise ConfigError(f"{where} has a length or a probability that cannot be")
    if not weights.sum() > 0:
        raise ConfigError(f"{where} is empty")
    return Histogram(tokens, np.cumsum(weights))


def _check_size(path: Path, clients: list[Client], options: LoadOptions) -> None:
    start, end = options.start, options.start + (options.duration or 0)
    expected = 0.0
    for client in clients:
        for window in client.windows:
            share = min(end, window.start + WINDOW) - max(start, window.start)
            expected += max(0.0, share) * window.rate * options.rate
    if expected > MAX_CALLS:
        raise ConfigError(f"{path}: this would be {expected:.3g} requests; take a shorter duration or a lower rate")
    busy = min((window.start for client in clients for window in client.windows), default=None)
    if not expected and busy is not None:
        raise ConfigError(f"{path}: no client is active from {start:g} s to {end:g} s; the first is at {busy:g} s")


def draw_times(window: Window, rate: float, random: np.random.Generator) -> Doubles:
    """Seconds of the window's arrivals: as many as its mean says, with gaps of its family and variation.

    The gaps are stretched to fill the window, since a few wild gaps would else empty or flood it.
    """
    count = int(window.rate * rate * WINDOW + random.random())
    ends = np.cumsum(draw_gaps(window.family, window.cv, count + 1, random))
    if not ends[-1] > 0:  # all gaps below what a double holds
        ends = np.arange(1.0, count + 2)
    times: Doubles = window.start + ends[:-1] / ends[-1] * WINDOW
    return times


def _add_calls(calls: list[Call], client: Client, options: LoadOptions) -> None:
    """Each window has random numbers of its own: what is drawn does not depend on what is cut out."""
    start, end = options.start, options.start + (options.duration or 0)
    for window in client.windows:
        if window.start + WINDOW <= start or window.start >= end:
            continue
        random = np.random.default_rng([options.seed, client.number, int(window.start)])
        times = draw_times(window, options.rate, random)
        lengths = [client.histogram(window.start, field).draw(len(times), random).tolist() for field in _LENGTHS]
        for index, (time, n_in, n_out) in enumerate(zip(times.tolist(), *lengths, strict=True)):
            if start <= time < end:
                name = f"{client.number}-{window.start:g}-{index}"
                calls.append(Call(len(calls), name, time, n_in, n_out))
