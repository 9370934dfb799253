"""Runs one section of ``quire bench scheduler`` on vLLM's scheduler, in the peer's own interpreter.

    python vllm_scheduler.py SECTION --driver vllm_scheduler_bench.py      # prints {"env": facts, SECTION: figures}

The driver program measures the section. Figures that it lacks are measured here: the driver is loaded as a module for
its ``Rig``, which sets up a vLLM scheduler, and for its clock. This script uses only vLLM's public classes. From Quire
it loads only the arrivals of the section churn, by path.
"""

import argparse
import gc
import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

VOCAB_SIZE, FIRST_TOKEN, BLOCK_SIZE = 32_000, 3, 16
CONVERSATION_LEN, TURN_LEN, TURNS = 100_000, 500, 20
BUILD_LEN, BUILDS = 8192, 40
CHURN_SEED, CHURN_STEPS, CHURN_RATE, CHURN_INITIAL = 11, 1000, 5.2, 1300
CHURN_BLOCKS, CHURN_SEQS = 36_000, 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("section")
    parser.add_argument("--driver", type=Path, required=True)
    args = parser.parse_args()
    command = [sys.executable, str(args.driver), "--sections", args.section, "--clock", "cpu"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, errors="replace")
    start = done.stdout.find("{")
    if done.returncode or start < 0:
        sys.exit(done.returncode or f"the driver printed no figures for {args.section}")
    found = json.loads(done.stdout[start:])
    figures = found[args.section]
    measure = {"admission": long_conversation, "hashing": build_and_hash, "churn": large_churn}.get(args.section)
    if measure is not None:
        # The conversation is longer than the context of the driver's model.
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        try:
            figures |= measure(load(args.driver))
        except Exception as error:  # keep the driver's own figures
            figures["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps({"env": found["env"], args.section: with_quire_keys(args.section, figures)}))


def with_quire_keys(section: str, found: dict[str, Any]) -> dict[str, Any]:
    """Add Quire's keys to the peer's figures: sums of the parts that Quire measures as one."""
    out = dict(found)
    for key, one in found.items():
        if not isinstance(one, dict):
            continue
        extra: dict[str, Any] = {}
        if section == "admission" and "build_request_with_hashing" in one:
            extra["build_and_add"] = _added_up(one["build_request_with_hashing"], one["add_request"])
        if section == "churn" and "build_request_mean_us" in one:
            build = one["build_request_mean_us"]
            busy = one["scheduler_seconds"] + build * one["requests_added"] / 1e6
            extra["scheduler_seconds_incl_request_build"] = round(busy, 3)
            extra["steps_per_s_incl_request_build"] = round(one["steps"] / busy, 1)
            extra["build_and_add_mean_us"] = round(build + one["add_request_mean_us"], 2)
        if section == "wire" and "pickle_bytes" in one:
            extra = {name: one[f"pickle_{name}"] for name in ("bytes", "encode", "decode")}
        out[key] = one | extra
    return out


def _added_up(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    """Add two summaries: exact for means, approximate for the rest if one of the two is small."""
    return {"n": first["n"]} | {key: round(first[key] + second[key], 2) for key in first if key != "n"}


def load(path: Path) -> Any:
    """Import and return the module in this file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prompt(rng: random.Random, length: int) -> list[int]:
    return rng.choices(range(FIRST_TOKEN, VOCAB_SIZE), k=length)


def run_dry(rig: Any) -> None:
    """Step until no request is left."""
    while rig.s.has_unfinished_requests():
        rig.step()


def long_conversation(driver: Any) -> dict[str, Any]:
    longest = CONVERSATION_LEN + TURN_LEN * (TURNS + 1) + 1000
    rig = driver.Rig(4 * longest // BLOCK_SIZE, 16, max_tokens_per_step=16_384, max_model_len=longest)
    rng = random.Random(3)
    talk = prompt(rng, longest - 1000)
    shared = CONVERSATION_LEN - CONVERSATION_LEN // 100
    rig.s.add_request(rig.request("first", talk[:shared], 1))
    run_dry(rig)
    driver.freeze()
    lookup: list[int] = []
    hit = 0
    for index in range(TURNS):
        request = rig.request(f"lookup-{index}", talk[:shared] + prompt(rng, CONVERSATION_LEN - shared), 1)
        start = driver.ns()
        found = rig.s.kv_cache_manager.get_computed_blocks(request)
        lookup.append(driver.ns() - start)
        hit = found[1]  # the other return values differ between versions
    rig.s.add_request(rig.request("second", talk[:CONVERSATION_LEN], 1))
    run_dry(rig)
    turn: list[int] = []
    for index in range(1, TURNS + 1):
        tokens = talk[: CONVERSATION_LEN + index * TURN_LEN]
        start = driver.ns()
        rig.s.add_request(rig.request(f"turn-{index}", tokens, 1))
        turn.append(driver.ns() - start)
        run_dry(rig)
    return {"lookup_100k": driver.summary(lookup) | {"hit_tokens": hit}, "next_turn_100k": driver.summary(turn)}


def build_and_hash(driver: Any) -> dict[str, Any]:
    """Time building, hashing and queueing a request, with new tokens each time."""
    rig = driver.Rig(2000, 16)
    rng = random.Random(5)
    spent: list[int] = []
    for index in range(BUILDS):
        tokens = prompt(rng, BUILD_LEN)
        start = driver.ns()
        rig.s.add_request(rig.request(f"build-{index}", tokens, 16))
        spent.append(driver.ns() - start)
        rig.abort(f"build-{index}")
    return {"request_8192_build_and_hash": driver.summary(spent)}


def large_churn(driver: Any) -> dict[str, Any]:
    """Run the same arrivals as Quire's section, with 1,024 running requests."""
    arrivals = load(Path(__file__).resolve().parents[2] / "bench/scheduler/churn_trace.py").churn_trace
    trace = arrivals(CHURN_SEED, CHURN_STEPS, CHURN_RATE, CHURN_INITIAL)
    rig = driver.Rig(CHURN_BLOCKS, CHURN_SEQS, async_sched=True)
    driver.freeze()
    pauses: list[int] = []
    start = [0]

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            start[0] = driver.ns()
        else:
            pauses.append(driver.ns() - start[0])

    gc.callbacks.append(note)
    figures = _churn(driver, rig, trace)
    gc.callbacks.remove(note)
    figures["gc"] = {"max_pause_ms": round(max(pauses, default=0) / 1e6, 3), "total_ms": round(sum(pauses) / 1e6, 3)}
    return {f"async_{CHURN_SEQS}": figures}


def _churn(driver: Any, rig: Any, trace: Any) -> dict[str, Any]:
    down: list[int] = []
    up: list[int] = []
    both: list[int] = []
    added = num_added = finished = preemptions = running = tokens = 0
    for row in trace:
        for ids, max_tokens in row:
            start = driver.ns()
            rig.s.add_request(rig.request(f"churn-{num_added:06d}", ids, max_tokens))
            added += driver.ns() - start
            num_added += 1
        schedule_ns, update_ns, diff, outputs = rig.step()
        down.append(schedule_ns)
        if update_ns is not None:
            up.append(update_ns)
            both.append(schedule_ns + update_ns)
            finished += sum(out.finish_reason is not None for out in (outputs[0].outputs if 0 in outputs else ()))
        preemptions += len(diff.preempted_req_ids or ())
        running += len(diff.num_scheduled_tokens)
        tokens += diff.total_num_scheduled_tokens
    busy = (sum(down) + sum(up) + added) / 1e9
    return {
        "steps": len(trace),
        "scheduler_seconds_incl_request_build": round(busy, 3),
        "steps_per_s_incl_request_build": round(len(trace) / busy, 1),
        "requests_per_s_incl_request_build": round(finished / busy, 1),
        "requests_finished": finished,
        "preemptions": preemptions,
        "requests_added": num_added,
        "mean_running": round(running / len(trace), 1),
        "mean_scheduled_tokens": round(tokens / len(trace), 1),
        "build_and_add_mean_us": round(added / num_added / 1e3, 2),
        "schedule": driver.summary(down),
        "update_from_output": driver.summary(up),
        "both": driver.summary(both),
    }


if __name__ == "__main__":
    main()
