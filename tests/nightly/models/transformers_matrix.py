"""Each causal model type of transformers through Quire's engine, compared with transformers and with docs/models.md.

For each type a tiny random checkpoint is saved, and transformers generates from three prompts, each alone. The engine
runs them at once, in steps of at most 24 tokens with blocks of 16, and checks its invariants after every step. Then the
longest comes again, and must be a prefix cache hit. Each type has a process of its own, with limits of memory and time.

usage: python -P tests/nightly/models/transformers_matrix.py [--types gpt2 opt] [--write]
"""

import argparse
import gc
import json
import os
import re
import resource
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
}  # read when torch and transformers are imported
sys.path.extend(map(str, (Path(__file__).resolve().parents[2] / "support").iterdir()))

import msgspec
import torch
import transformers
from inprocess import InProcessEngine
from matrix_page import PAGE, Outcome, causal_types, read_table, write_table
from tiny_models import NUM_TOKENS, Reference, make_tiny_model

from quire.protocol.errors import ConfigError
from quire.protocol.model.measured_config import MeasuredConfig, Refused
from quire.protocol.model.model_config import load_model_config
from quire.worker_proc.models.transformers.measure import answer

MAX_BYTES = 12 * 2**30
MAX_SECONDS = 600
ENGINE = {"block_size": 16, "max_num_batched_tokens": 24, "max_num_seqs": 8, "num_blocks_override": 64}

PLACES = (
    (r"^.*?config\.json: the model ", ""),
    (r"^\S*/tmp\S*?: ", ""),
    (r"^is an? \w+, whose", "its"),
    (r" (in|of|to) [\w.]+\.[\w.]*\w", r" \1 a layer"),
    (r" \(\w+\)", ""),
    (r" <class '[\w.]+'>.*", ""),
    (r"StrictDataclass.*: ValueError", "ValueError"),
)
"""What differs between reasons that are the same: places and the names of classes."""


def reason_of(text: str) -> str:
    """Return an error's text without what is true of one type only, in one line that can be an entry of a list."""
    text = " ".join(text.split())
    for pattern, instead in PLACES:
        text = re.sub(pattern, instead, text)
    return text.partition(". ")[0][:160].rstrip(" .:").replace("`", "'")


def outcome_of(model_type: str, folder: Path) -> Outcome:
    """Compare one type. Anything that Quire raises, but for a refusal at start, counts as unequal."""
    try:
        reference = make_tiny_model(model_type, folder)
    except Exception as error:  # of transformers, whatever it is
        return Outcome("failing", reason_of(f"{type(error).__name__}: {error}"))
    # In this process: the helper that measures at a server's start would import transformers once for each type.
    measured = msgspec.msgpack.decode(answer((folder / "config.json").read_bytes()), type=MeasuredConfig | Refused)
    if isinstance(measured, Refused):
        return Outcome("refused", reason_of(measured.reason))
    try:
        engine = InProcessEngine(folder, model=load_model_config(folder, measured), enforce_eager=True, **ENGINE)
    except ConfigError as error:
        return Outcome("refused", reason_of(str(error)))
    return compare(engine, reference)


def compare(engine: InProcessEngine, reference: Reference) -> Outcome:
    for number, prompt in enumerate(reference.prompts):
        engine.add(str(number), prompt, max_tokens=NUM_TOKENS)
    found = engine.run()
    longest = max(range(len(reference.prompts)), key=lambda number: len(reference.prompts[number]))
    different = [n for n, tokens in enumerate(reference.tokens) if found[str(n)].tokens != tokens]
    if different:
        lengths = ", ".join(str(len(reference.prompts[number])) for number in different)
        return Outcome("unequal", f"after prompts of {lengths} tokens")
    engine.add("again", reference.prompts[longest], max_tokens=NUM_TOKENS)
    again = engine.run()["again"]
    if again.tokens != reference.tokens[longest]:
        return Outcome("unequal", "after a prefix cache hit")
    return Outcome("equal") if again.num_cached_tokens else Outcome("unequal", "no prefix cache hit")


def run_child(model_type: str, folder: Path, results: int) -> NoReturn:
    """Write the outcome of one type, and the seconds of CPU that it took, to a pipe, and end this process."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    signal.alarm(MAX_SECONDS)
    torch.set_num_threads(1)
    try:
        found = outcome_of(model_type, folder)
    except BaseException as error:
        found = Outcome("unequal", reason_of(f"{type(error).__name__}: {error}"))
    os.write(results, json.dumps([*found, time.process_time()]).encode())
    os._exit(0)


def run_types(types: Sequence[str], folder: Path, jobs: int) -> Iterator[tuple[str, Outcome, float]]:
    """Yield outcomes as they come. Processes are forked from this one, which has imported everything."""
    waiting = list(reversed(types))
    running: dict[int, tuple[str, int]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            results, write = os.pipe()
            name = waiting.pop()
            if not (pid := os.fork()):
                run_child(name, folder / name, write)
            os.close(write)
            running[results] = (name, pid)
        for results in select.select(list(running), [], [])[0]:
            name, pid = running.pop(results)
            with os.fdopen(results, "rb") as pipe:
                found = pipe.read()
            _, status = os.waitpid(pid, 0)
            if found:
                kind, reason, seconds = json.loads(found)
                yield name, Outcome(kind, reason), seconds
            else:
                yield name, Outcome("unequal", f"the process ended with status {status}"), 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare all causal models of transformers with Quire.")
    parser.add_argument("--types", nargs="+", help="model types; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (default: 2)")
    parser.add_argument("--write", action="store_true", help="write what was found into docs/models.md")
    arguments = parser.parse_args()
    types = arguments.types or causal_types()
    version, rows = read_table(PAGE.read_text())
    before = dict(rows)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model("llama", Path(folder, "first"))  # which imports what all types need
        gc.freeze()
        for name, outcome, seconds in run_types(types, Path(folder), arguments.jobs):
            found[name] = outcome
            print(f"{name:28} {seconds:6.1f} s  {outcome.kind:8} {outcome.reason}", flush=True)
    gone = {} if arguments.types else {name: before[name] for name in before.keys() - found.keys()}
    changed = {name for name in found if found[name] != before.get(name)} | gone.keys()
    for name in sorted(changed):
        was, now = (": ".join(filter(None, side.get(name, ("not listed",)))) for side in (before, found))
        print(f"changed since {version}: {name}: {was} -> {now}")
    if arguments.write:
        kept = {name: outcome for name, outcome in before.items() if name not in gone}
        PAGE.write_text(write_table(PAGE.read_text(), transformers.__version__, kept | found))
    counts = Counter(outcome.kind for outcome in found.values())
    print(json.dumps({"transformers": transformers.__version__, "changed": len(changed), **counts}))
    return 1 if counts["unequal"] or (changed and not arguments.write) else 0


if __name__ == "__main__":
    raise SystemExit(main())
