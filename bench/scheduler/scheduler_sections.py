"""The sections of ``quire bench scheduler``: functions from sizes to figures, with the keys of the peer's driver.

``scheduler.py`` runs this module as a program, in a fresh process per section. It prints one JSON object.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import psutil

from quire.bench.scheduler.scheduler_churn import ChurnSizes, measure_churn
from quire.bench.scheduler.scheduler_forks import ForkSizes, measure_forks
from quire.bench.scheduler.scheduler_layouts import LayoutSizes, measure_layouts
from quire.bench.scheduler.scheduler_loads import LoadSizes, measure_loads
from quire.bench.scheduler.scheduler_rig import (
    BLOCK_SIZE,
    Rig,
    Summary,
    freeze,
    now_ns,
    num_bytes,
    summary,
    timed,
    unfreeze,
)
from quire.bench.scheduler.scheduler_tiers import TierSizes, measure_tiers
from quire.bench.scheduler.scheduler_trace import TraceSizes, measure_trace
from quire.protocol.config import FIRST_WORKER_EPOCH
from quire.protocol.wire.channel import Frames
from quire.protocol.wire.codec import Codec
from quire.protocol.wire.front_end_messages import SchedulerToFrontEnd, StepOutputs
from quire.protocol.wire.worker_messages import SchedulerOutput, SchedulerToWorker
from quire.scheduler_proc.process.garbage_collection import Collector

# Quire's names of the hashes, and the peer's.
HASH_ALGOS: dict[Literal["sha256", "xxh3_128"], str] = {"sha256": "sha256", "xxh3_128": "xxhash"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of all sections. The defaults are those of the peer's driver; tests use small ones."""

    steady: tuple[int, ...] = (1, 16, 64, 256, 1024)
    steps: int = 320
    warm_up: int = 32
    busy: tuple[int, ...] = (0, 255)
    admission_len: int = 8192
    admissions: int = 60
    conversation_len: int = 100_000
    turn_len: int = 500
    turns: int = 20
    hashing: tuple[tuple[int, int], ...] = ((1024, 200), (8192, 40), (65_536, 10))
    """(tokens, repeats)."""
    batch: int = 256
    wire_steps: int = 64
    repeats: int = 100
    new_prompts: tuple[int, int] = (8, 2048)
    memory_blocks: int = 100_000
    churn: ChurnSizes = field(default_factory=ChurnSizes)
    trace: TraceSizes = field(default_factory=TraceSizes)
    layouts: LayoutSizes = field(default_factory=LayoutSizes)
    loads: LoadSizes = field(default_factory=LoadSizes)
    tiers: TierSizes = field(default_factory=TierSizes)
    forks: ForkSizes = field(default_factory=ForkSizes)


def steady(sizes: Sizes, steady_decode: bool = True) -> dict[str, Any]:
    """Steady decode: times of ``schedule``, of ``update_from_output``, and of both together."""
    out: dict[str, Any] = {}
    per_request = (512 + sizes.steps + sizes.warm_up + 200) // BLOCK_SIZE + 2
    for async_scheduling in (False, True):
        for num in sizes.steady:
            blocks = int(num * per_request * 1.25) + 64
            rig = Rig(blocks, max(num, 16), async_scheduling=async_scheduling, steady_decode=steady_decode)
            rig.fill(num, 512, 4096)
            out[f"{'async' if async_scheduling else 'sync'}_N{num}"] = _steady_steps(rig, num, sizes)
    return out


def _steady_steps(rig: Rig, num: int, sizes: Sizes) -> dict[str, Summary]:
    """Time steps, with garbage collection as in the process."""
    schedule_ns: list[int] = []
    update_ns: list[int] = []
    collector = Collector()
    collector.start()
    try:
        for _ in range(sizes.warm_up):
            rig.step(after=collector.after_step)
        for _ in range(sizes.steps):
            step = rig.step(after=collector.after_step)
            assert step.update_ns is not None and rig.worker.num_tokens == num
            schedule_ns.append(step.schedule_ns)
            update_ns.append(step.update_ns)
    finally:
        collector.stop()
    both = [a + b for a, b in zip(schedule_ns, update_ns, strict=True)]
    return {"schedule": summary(schedule_ns), "update_from_output": summary(update_ns), "both": summary(both)}


def admission(sizes: Sizes, steady_decode: bool = True) -> dict[str, Any]:
    """A long prompt that arrives at an idle or a busy engine, new or cached; then ``long_conversation``."""
    out: dict[str, Any] = {}
    for busy in sizes.busy:
        rig = Rig(60_000, 512, 16_384, steady_decode=steady_decode)
        if busy:
            rig.fill(busy, 512, 16_384)
        known = rig.prompt(sizes.admission_len)
        freeze()
        for name in ("hit0", "hit100"):
            _admit_once(rig, known, busy)
            rows: dict[str, list[int]] = {}
            for _ in range(sizes.admissions):
                prompt = known if name == "hit100" else rig.prompt(sizes.admission_len)
                found, hit = _admit_once(rig, prompt, busy)
                for key, spent in found.items():
                    rows.setdefault(key, []).append(spent)
            # The first few run with cold caches and branches.
            kept = {key: summary(values[min(5, len(values) - 1) :]) for key, values in rows.items()}
            out[f"busy{busy}_{name}"] = kept | {"hit_tokens": hit}
        unfreeze()
    return out | long_conversation(sizes, steady_decode)


def _admit_once(rig: Rig, prompt: Any, busy: int) -> tuple[dict[str, int], int]:
    """Time one arrival and abort it after its first step. Return (nanoseconds by part, prefix cache hit tokens)."""
    request_id, added = rig.add(prompt, 64)
    step = rig.step()
    assert step.update_ns is not None and step.diff is not None and len(step.diff.new_requests) == 1
    rig.abort(request_id)
    if busy:
        rig.step()
    rig.scheduler.take_messages()
    parts = {"build_and_add": added, "schedule": step.schedule_ns, "update_from_output": step.update_ns}
    return parts, step.diff.new_requests[0].num_computed_tokens


def long_conversation(sizes: Sizes, steady_decode: bool = True) -> dict[str, Any]:
    """``lookup_100k``: find the cached prefix of a long prompt whose last 1 % is new. ``next_turn_100k``: add a served
    conversation that has become some hundred tokens longer.
    """
    length = sizes.conversation_len
    longest = length + sizes.turn_len * (sizes.turns + 1) + 1000
    rig = Rig(4 * longest // BLOCK_SIZE, 16, 16_384, max_model_len=longest, steady_decode=steady_decode)
    conversation = rig.prompt(longest - 1000)
    shared = length - length // 100
    rig.add(conversation[:shared].copy(), 1)
    rig.run_until_idle()
    freeze()
    lookup: list[int] = []
    for _ in range(sizes.turns):
        prompt = rig.prompt(length)
        prompt[:shared] = conversation[:shared]
        request_id, _ = rig.add(prompt, 1)
        request = rig.scheduler.table.requests[0, request_id]
        start = now_ns()
        _, hit = rig.scheduler.kv.get_computed_blocks(request)
        lookup.append(now_ns() - start)
        rig.abort(request_id)
    assert hit == shared // BLOCK_SIZE * BLOCK_SIZE
    rig.add(conversation[:length].copy(), 1)
    rig.run_until_idle()
    turn: list[int] = []
    for index in range(1, sizes.turns + 1):
        turn.append(rig.add(conversation[: length + index * sizes.turn_len].copy(), 1)[1])
        rig.run_until_idle()
    unfreeze()
    return {"lookup_100k": summary(lookup) | {"hit_tokens": hit}, "next_turn_100k": summary(turn)}


def hashing(sizes: Sizes, steady_decode: bool = True) -> dict[str, Any]:
    """Add a request of new tokens: check, build, hash every block, queue."""
    out: dict[str, Any] = {}
    longest = max(length for length, _ in sizes.hashing)
    for algo, name in HASH_ALGOS.items():
        rig = Rig(
            2 * longest // BLOCK_SIZE + 64, 16, max_model_len=2 * longest, hash_algo=algo, steady_decode=steady_decode
        )
        for length, repeats in sizes.hashing:
            whole = _build_times(rig, length, repeats)
            per_1k = summary([spent / (length / 1024) for spent in whole])
            out[f"{name}_{length}tok"] = {
                "us_per_1k_tokens": per_1k["median_us"],
                "mean_us_per_1k": per_1k["mean_us"],
                "p99_us_per_1k": per_1k["p99_us"],
            }
            if length == 8192 and algo == "sha256":
                out["request_8192_build_and_hash"] = summary(whole)
    return out


def _build_times(rig: Rig, length: int, repeats: int) -> list[int]:
    spent: list[int] = []
    for _ in range(repeats):
        request_id, nanoseconds = rig.add(rig.prompt(length), 16)
        spent.append(nanoseconds)
        rig.abort(request_id)
        rig.scheduler.take_messages()
    return spent


def wire(sizes: Sizes, steady_decode: bool = True) -> dict[str, Any]:
    """Return the cost of messages to workers: the mean of steady decode steps, and that of a step with new prompts."""
    rig = Rig(20_000, sizes.batch, steady_decode=steady_decode)
    rig.fill(sizes.batch, 512, 4096)
    freeze()
    diffs = [diff for _ in range(sizes.wire_steps) if (diff := rig.step().diff) is not None]
    out = {f"decode_N{sizes.batch}": _message_costs(SchedulerToWorker, diffs, max(1, sizes.repeats // 10))}
    unfreeze()
    num, length = sizes.new_prompts
    rig = Rig(20_000, 256, 16_384, steady_decode=steady_decode)
    for _ in range(num):
        rig.add(rig.prompt(length), 64)
    diff = rig.step().diff
    assert diff is not None and len(diff.new_requests) == num
    freeze()
    out[f"new{num}_{length // 1024}k"] = _message_costs(SchedulerToWorker, [diff], sizes.repeats)
    unfreeze()
    return out


def outputs(sizes: Sizes, steady_decode: bool = True) -> dict[str, Any]:
    """The message of a step to a front end."""
    rig = Rig(20_000, sizes.batch, steady_decode=steady_decode)
    rig.fill(sizes.batch, 512, 4096)
    freeze()
    for _ in range(20):
        messages = rig.step().outputs
    assert len(messages) == 1 and messages[0].tokens is not None and len(messages[0].tokens) == sizes.batch
    found = _message_costs(SchedulerToFrontEnd, messages, sizes.repeats)
    unfreeze()
    return found


def _message_costs(
    union: Any, messages: list[SchedulerOutput] | list[StepOutputs], repeats: int
) -> dict[str, float | Summary]:
    """Return bytes of all frames (mean and maximum), and times to encode and decode with separate codecs."""
    sender: Codec[Any] = Codec(union)
    receiver: Codec[Any] = Codec(union)
    sizes: list[int] = []
    encode: list[Summary] = []
    decode: list[Summary] = []
    for message in messages:
        frames: Frames = [bytes(frame) for frame in sender.encode(FIRST_WORKER_EPOCH, 0, message)]
        sizes.append(num_bytes(frames))
        encode.append(timed(partial(sender.encode, FIRST_WORKER_EPOCH, 0, message), repeats))
        decode.append(timed(partial(receiver.decode, frames), repeats))
    return {
        "bytes": round(sum(sizes) / len(sizes), 1),
        "bytes_max": max(sizes),
        "encode": _over_messages(encode),
        "decode": _over_messages(decode),
    }


def _over_messages(found: list[Summary]) -> Summary:
    """Return the means over messages, and the highest of their maxima."""
    out: Summary = {"n": sum(one["n"] for one in found)}
    for name in ("mean_us", "median_us", "p99_us"):
        out[name] = round(sum(one[name] for one in found) / len(found), 2)
    return out | {"max_us": max(one["max_us"] for one in found)}


def memory(sizes: Sizes, steady_decode: bool = True) -> dict[str, Any]:
    """Resident memory of the block pool's bookkeeping: empty, and with all blocks cached."""
    blocks = sizes.memory_blocks
    Rig(100, 16)  # allocates what is created at first use
    process = psutil.Process()
    freeze()
    before = process.memory_info().rss
    start = now_ns()
    rig = Rig(blocks, 16, 16_384, steady_decode=steady_decode)
    build_ms = (now_ns() - start) / 1e6
    empty = process.memory_info().rss
    length = min(16_384, blocks // 2 * BLOCK_SIZE)
    cached = 0
    while cached + length // BLOCK_SIZE < blocks:
        rig.add(rig.prompt(length), 1)
        rig.run_until_idle()
        cached += length // BLOCK_SIZE
    full = process.memory_info().rss
    unfreeze()
    return {
        "blocks": blocks,
        "empty_pool_MB_per_100k": round((empty - before) / blocks * 1e5 / 1e6, 2),
        "construct_ms": round(build_ms, 1),
        "cached_blocks": cached,
        "extra_MB_per_100k_when_all_hashed": round((full - empty) / cached * 1e5 / 1e6, 2),
        "process_rss_MB_after_import": round(before / 1e6, 1),
    }


def churn(sizes: Sizes, steady_decode: bool = True) -> dict[str, Any]:
    """Arrivals, finishes and preemptions: see ``scheduler_churn``."""
    return measure_churn(sizes.churn, steady_decode)


def trace(sizes: Sizes, steady_decode: bool = True) -> dict[str, Any]:
    """Cost of recording: see ``scheduler_trace``."""
    return measure_trace(sizes.trace)


def layouts(sizes: Sizes, steady_decode: bool = True) -> dict[str, Any]:
    """Steps of steady decode by KV cache layout: see ``scheduler_layouts``."""
    return measure_layouts(sizes.layouts, steady_decode)


def loads(sizes: Sizes, steady_decode: bool = True) -> dict[str, Any]:
    """Regret of the choice to load, compute or split: see ``scheduler_loads``."""
    return measure_loads(sizes.loads)


def tiers(sizes: Sizes, steady_decode: bool = True) -> dict[str, Any]:
    """Cost of host memory: see ``scheduler_tiers``."""
    return measure_tiers(sizes.tiers, steady_decode)


def forks(sizes: Sizes, steady_decode: bool = True) -> dict[str, Any]:
    """Cost of a fork, and of samples of one prompt: see ``scheduler_forks``."""
    return measure_forks(sizes.forks, steady_decode)


SECTIONS: dict[str, Callable[[Sizes, bool], dict[str, Any]]] = {
    "steady": steady,
    "admission": admission,
    "hashing": hashing,
    "churn": churn,
    "wire": wire,
    "outputs": outputs,
    "memory": memory,
    "trace": trace,
    "layouts": layouts,
    "loads": loads,
    "tiers": tiers,
    "forks": forks,
}


def measure(section: str, sizes: Sizes, steady_decode: bool = True) -> dict[str, Any]:
    """Run a section. Return its figures and duration, and facts such as the cost of reading the clock."""
    start = time.monotonic()
    found = SECTIONS[section](sizes, steady_decode)
    facts = {
        "python": platform.python_version(),
        "clock": "process CPU",
        "clock_call_us": timed(now_ns, 50, 200)["median_us"],
    }
    return {"env": facts, section: found | {"_section_seconds": round(time.monotonic() - start, 1)}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--trace-from", default="")
    parser.add_argument("--no-steady", action="store_true")
    args = parser.parse_args()
    sizes = Sizes(churn=ChurnSizes(trace_from=args.trace_from))
    print(json.dumps(measure(args.section, sizes, not args.no_steady)))


if __name__ == "__main__":
    main()
