"""Azure's LLM inference traces: CSV of times and lengths, without contents."""

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from quire.replay.formats.options import LoadOptions
from quire.replay.formats.read import Faults, files_of, finish
from quire.replay.formats.table import read_table, token_count
from quire.replay.workload.workload import Call, Workload

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:\+00:00|Z)?")
_EPOCH = datetime(1970, 1, 1)


def load(path: Path, options: LoadOptions) -> Workload:
    """Load a trace. The first request arrives at 0.

    Raises:
        ConfigError: a bad line, or decreasing times (lenient: they are sorted).
    """
    faults = Faults(options.lenient)
    rows = [row for file in files_of(path) for row in _rows(file, faults)]
    first = min((when for when, _, _ in rows), default=0)
    calls = [Call(i, f"{i}", (when - first) / 1e9, n_in, n_out) for i, (when, n_in, n_out) in enumerate(rows)]
    notes = ["the trace has no contents: no prompt shares a prefix with another"]
    return finish(Workload("azure", str(path), calls, notes=notes), options, faults)


def _rows(file: Path, faults: Faults) -> Iterator[tuple[int, int, int]]:
    """Yield (nanoseconds since 1970, prompt tokens, output tokens)."""
    last = 0
    for number, (time, prompt, answer) in read_table(file, COLUMNS, faults):
        try:
            when, n_in, n_out = _nanoseconds(time), token_count(prompt, COLUMNS[1], 1), token_count(answer, COLUMNS[2])
        except ValueError as error:
            faults.add(file, number, str(error))
            continue
        if when < last:
            faults.add_earlier(file, number, f"`TIMESTAMP` {time} is earlier than in the line before")
        last = max(last, when)
        yield when, n_in, faults.at_least_one_token(n_out)


def _nanoseconds(text: str) -> int:
    """Parse a time exactly: the trace has seven decimals, more than a datetime holds."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(_not_a_time(text))
    try:
        since = datetime.fromisoformat(match[1]) - _EPOCH
    except ValueError:
        raise ValueError(_not_a_time(text)) from None
    return (since.days * 86400 + since.seconds) * 10**9 + int((match[2] or "").ljust(9, "0"))


def _not_a_time(text: str) -> str:
    return f"`TIMESTAMP` must be a date and time, such as 2023-11-16 18:15:46.6805900 (got {text[:40]!r})"
