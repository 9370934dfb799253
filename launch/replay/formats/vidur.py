"""Vidur's processed traces: lengths of prompts and answers, without times or contents."""

from pathlib import Path

import numpy as np

from quire.launch.replay.formats.arrivals import parse_arrivals
from quire.launch.replay.formats.options import LoadOptions
from quire.launch.replay.formats.read import Faults, at_least_one_token, empty_notes, files_of, finish
from quire.launch.replay.formats.table import read_table, token_count
from quire.launch.replay.workload.workload import Call, Workload

COLUMNS = ("num_prefill_tokens", "num_decode_tokens")


def load(path: Path, options: LoadOptions) -> Workload:
    """All calls come at 0, unless the options name an arrival process.

    Raises:
        ConfigError: a line is bad.
    """
    faults = Faults(options.lenient)
    empty = [0]
    lengths: list[tuple[int, int]] = []
    for file in files_of(path):
        for number, (prompt, answer) in read_table(file, COLUMNS, faults):
            try:
                n_in, n_out = token_count(prompt, COLUMNS[0], 1), token_count(answer, COLUMNS[1])
            except ValueError as error:
                faults.add(file, number, str(error))
                continue
            lengths.append((n_in, at_least_one_token(n_out, empty)))
    arrivals = parse_arrivals(options.arrivals or "at-once")
    times = arrivals.times(len(lengths), np.random.default_rng(options.seed)).tolist()
    calls = [Call(i, f"{i}", time, *pair) for i, (time, pair) in enumerate(zip(times, lengths, strict=True))]
    notes = ["the trace does not tell contents: no prompt shares a prefix with another", *empty_notes(empty)]
    notes.append(f"the trace has no times: arrivals are {arrivals}")
    return finish(Workload("vidur", str(path), calls, notes=notes), options, faults)
