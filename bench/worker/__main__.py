"""``python -P -m quire.bench.worker``: measures, and writes results as lines of JSON to stdout.

Reads the models' shapes from stdin, as JSON. The first line of output is the plan. Each section's result follows as
soon as it is complete, so that a crash loses at most one section. After a permanent device error it exits with
status 3.
"""

import argparse
import faulthandler
import importlib.util
import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any, TextIO

import msgspec
import torch

from quire.bench.worker.limits import measure_limits
from quire.bench.worker.record import Bench, CaseResult, OutOfTime, Rivals, Size, describe, free_memory
from quire.bench.worker.sections import BenchSection, choose
from quire.bench.worker.timing import CallTimer
from quire.protocol.model.model_config import ModelConfig

DEVICE_LOST = 3
_FIGURE_S = {"full": 0.2, "quick": 0.1, "dry": 0.0}
_GRACE_S = 60.0
"""Seconds after the time limit until a process that hangs is killed."""


def main() -> None:
    args = _arguments()
    models = msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, ModelConfig])
    out = _own_stdout()
    started = time.monotonic()
    if args.time_limit:
        faulthandler.dump_traceback_later(args.time_limit + _GRACE_S, exit=True)
    size: Size = "dry" if args.dry_run else "quick" if args.quick else "full"
    try:
        device = pick_device(args.device, size)
        sections = choose(args.sections.split(",") if args.sections else [], devices_of(device, size))
    except ValueError as error:
        _write(out, {"refused": str(error)})
        return
    with torch.inference_mode():
        clock = CallTimer(device, _FIGURE_S[size])
        limits, rows = measure_limits(device, clock, size)
        _write(out, {"plan": [section.name for section in sections], "device": facts(device), "limits": _dicts(rows)})
        rivals = load_rivals(args.rivals) if args.rivals else {}
        deadline = started + args.time_limit if args.time_limit else float("inf")
        for section in sections:
            bench = Bench(device, clock, size, models, limits, deadline, rivals)
            _write(out, {"section": section.name, "title": section.title, **run_section(section, bench)})
            if _lost(device):
                sys.exit(DEVICE_LOST)


def run_section(section: BenchSection, bench: Bench) -> dict[str, Any]:
    """Run a section; return its rows, and the error that ended it early."""
    started = time.monotonic()
    error = ""
    try:
        section.run(bench)
    except OutOfTime:
        error = "stopped by the time limit"
    except Exception as failure:
        error = describe(failure)
    free_memory(bench.device)
    return {"rows": _dicts(bench.rows), "error": error, "seconds": time.monotonic() - started}


def pick_device(wanted: str, size: Size) -> torch.device:
    """Return the device to measure. Raises ValueError if it is unavailable."""
    there = torch.cuda.is_available()
    if size == "dry" or wanted == "cpu" or (wanted == "auto" and not there):
        return torch.device("cpu")
    if not there:
        raise ValueError("--device cuda: torch finds no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def load_rivals(path: str) -> Rivals:
    """Return the result of ``rivals()`` of this file."""
    spec = importlib.util.spec_from_file_location("rivals", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Rivals = module.rivals()
    return found


def devices_of(device: torch.device, size: Size) -> set[str]:
    """Return the devices whose sections run: all in a dry run, with GPU sections in Triton's interpreter."""
    return {"cpu", "cuda"} if size == "dry" else {device.type}


def facts(device: torch.device) -> dict[str, Any]:
    """Describe the device and the libraries, on which the results depend."""
    found: dict[str, Any] = {"type": device.type, "torch": torch.__version__, "threads": torch.get_num_threads()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "processors": properties.multi_processor_count,
        }
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure kernels and steps; started by `quire bench kernels`.")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--sections", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--time-limit", type=float, default=0.0)
    parser.add_argument("--rivals", metavar="FILE")
    return parser.parse_args()


def _own_stdout() -> TextIO:
    """Return a private copy of stdout, and redirect prints of libraries to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _write(out: TextIO, message: dict[str, Any]) -> None:
    print(json.dumps(message, allow_nan=False), file=out, flush=True)


def _dicts(rows: list[CaseResult]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


def _lost(device: torch.device) -> bool:
    """Whether the device has a permanent error, so that this process can measure nothing more."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    main()
