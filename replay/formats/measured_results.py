"""What was measured in a run of vLLM (``measured.py``), as the record of a run."""

from pathlib import Path

import msgspec

from quire.replay.formats.read import Faults, records
from quire.replay.recorded.decompress import find_file
from quire.replay.run.run_record import RequestRun, RunRecord

RESULTS = "requests.jsonl"


class _Line(msgspec.Struct):
    """Times in seconds of one monotonic clock."""

    request_id: str
    input_toks: int
    output_toks: int
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float


def measured_record(folder: Path) -> RunRecord | None:
    """Return the measured requests, from the time at which the engine received each; None if the folder has none.

    Raises:
        ConfigError: a bad line.
    """
    path = find_file(folder, RESULTS)
    if path is None:
        return None
    lines = [line for _, line in records(path, _Line, Faults(False))]
    began = min((line.queued_ts for line in lines), default=0.0)
    runs = [
        RequestRun(
            line.request_id,
            line.queued_ts - began,
            line.input_toks,
            scheduled=line.scheduled_ts - began,
            first_token=line.first_token_ts - began,
            end=line.last_token_ts - began,
            num_output_tokens=line.output_toks,
            finish="length",
        )
        for line in lines
    ]
    return RunRecord("measured", str(path), requests=runs, virtual_s=max((run.end for run in runs), default=0.0))
