"""Random runs of the scheduler of any length.

``python -P tests/support/scheduler/scheduler_long_run.py --seed 1 --steps 1000000``

The actions are those of the state machine's test, drawn from one seed; every invariant is checked after every step. The
last line is JSON, also after a failure: it then names the episode, which ``--episode`` runs alone.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

sys.path.extend(map(str, Path(__file__).parent.parent.iterdir()))

from scheduler_driver import Driver
from scheduler_load import Load, adapter_settings, random_settings

STEPS_PER_EPISODE = 400


def run_episode(seed: int, episode: int, *, adapters: bool = False) -> Load:
    """One scheduler from its first request to its last, fully checked."""
    rng = random.Random(f"{seed} {episode}")
    load = Load(rng, Driver(**random_settings(rng), **(adapter_settings(rng) if adapters else {})))
    load.driver.worker.draft_rng = random.Random(episode)
    for _ in range(40 * STEPS_PER_EPISODE):  # where few requests can run, few steps follow many events
        if len(load.driver.diffs) >= STEPS_PER_EPISODE:
            break
        load.random_event()
    load.drain()
    load.check_answers()
    return load


def long_run(seed: int, steps: int, *, adapters: bool = False) -> dict[str, object]:
    """Run episodes until ``steps`` steps were decided. Return the reached coverage, or the failure."""
    began = time.perf_counter()
    names = ("steps", "episodes", "requests", "preemptions", "epochs", "damaged", "accepted_drafts", "hit_tokens")
    names += ("adapter_loads", "adapter_failures")
    totals = dict.fromkeys(names, 0)
    found = ""
    while totals["steps"] < steps and not found:
        try:
            load = run_episode(seed, totals["episodes"], adapters=adapters)
        except Exception as error:  # the last line must report any failure
            found = f"episode {totals['episodes']}: {type(error).__name__}: {error}"
            break
        statistics = load.driver.scheduler.statistics()
        totals["steps"] += statistics.num_steps
        totals["episodes"] += 1
        totals["requests"] += len(load.asked)
        totals["preemptions"] += statistics.num_preemptions
        totals["epochs"] += load.num_epochs
        totals["damaged"] += load.num_damaged
        totals["accepted_drafts"] += statistics.num_accepted_tokens
        totals["hit_tokens"] += statistics.prefix_cache_hit_tokens
        totals["adapter_loads"] += statistics.num_adapters_loaded
        totals["adapter_failures"] += statistics.num_adapters_failed
    return {"seed": seed, **totals, "seconds": round(time.perf_counter() - began, 1), "found": found}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--adapters", action="store_true", help="with LoRA adapters")
    parser.add_argument("--episode", type=int, help="run this one alone, with its traceback")
    args = parser.parse_args()
    if args.episode is not None:
        run_episode(args.seed, args.episode, adapters=args.adapters)
        return 0
    told = long_run(args.seed, args.steps, adapters=args.adapters)
    print(json.dumps(told))
    return 1 if told["found"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
