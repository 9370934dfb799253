"""Random damage to real messages in each direction of each link, with right checksums.

    python -P tests/nightly/acceptance/fuzz_wire.py --seconds 3600 --seed 1

A refused message must change nothing. A message that can be decoded is passed to the real scheduler or worker, which
must refuse or accept it. After each round, a request of another client must get the right tokens. A failed round is
printed with the flags that repeat it, and the exit status is 1. The last line is JSON.
"""

import argparse
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.extend(map(str, (Path(__file__).resolve().parents[2] / "support").iterdir()))

from fake_worker import FakeWorker
from hostile_frames import altered, damaged, directions, frames_of
from runner_steps import CONFIG, MODEL, adding, appending
from scheduler_driver import expected_tokens, make_config, make_request, scheduler_of

from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.wire.channel import Link
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import AddRequest, Control, StepOutputs
from quire.protocol.wire.link_messages import Heartbeat, Hello
from quire.protocol.wire.worker_messages import ModelRunnerOutput, SchedulerOutput, SchedulerToWorker, WorkerToScheduler
from quire.scheduler_proc.scheduler import WorkerFault
from quire.worker_proc.batch.input_batch import StepRefused
from quire.worker_proc.startup.setup import make_runner

SETTINGS = {"max_model_len": 64, "max_num_seqs": 4, "async_scheduling": True}
EVIL, GOOD = 9, 0
CANARY, NUM_TOKENS = [5, 6, 7, 8, 9], 6
ROUND = 60
Tally = Counter[str]


def receive(union: Any, message: Any, rng: random.Random, tally: Tally) -> Any:
    """Return the message decoded after damage, or None if it is refused, which must leave the link unchanged."""
    link = Link(union)
    real = frames_of(message)
    frames = altered(real, rng) if rng.random() < 0.6 else damaged(real, rng, sealed=rng.random() < 0.95)
    tally["messages"] += 1
    try:
        taken = link.incoming(frames).message
    except ProtocolError as error:
        tally[f"refused: {error.kind}"] += 1
        assert link.incoming(frames_of(message)) is not None, "a valid message is refused after the damaged one"
        return None
    tally["decoded"] += 1
    return taken


class Engine:
    """A scheduler and a worker that checks its steps, with one well-behaved front end."""

    def __init__(self) -> None:
        self.scheduler = scheduler_of(num_blocks=40, **SETTINGS)
        config = self.scheduler.config
        self.worker = FakeWorker(
            40, config.block_size, config.max_num_seqs, config.max_num_batched_tokens, config.model.vocab_size
        )
        self.salts: dict[str, str] = {}
        self.worker.salt_of = lambda request_id: self.salts.get(request_id, "")
        self.tokens: list[int] = []
        self.has_ended = False

    def consume(self, message: Any, client: int) -> None:
        if isinstance(message, AddRequest) and (client, message.request_id) not in self.scheduler.table.requests:
            self.salts[message.request_id] = message.cache_salt
        self.scheduler.consume(message, client)
        self.scheduler.check()
        self._listen()

    def step(self) -> ModelRunnerOutput | None:
        """Run one step and return its result without delivering it; None if nothing runs."""
        step = self.scheduler.schedule() if self.scheduler.can_schedule else None
        return None if step is None else self.worker.execute(step)

    def deliver(self, result: ModelRunnerOutput) -> None:
        self.scheduler.consume(result)
        self.scheduler.check()
        self._listen()

    def check_canary(self) -> None:
        self.consume(make_request("canary", CANARY, max_tokens=NUM_TOKENS, ignore_eos=True), GOOD)
        for _ in range(2000):
            if self.has_ended:
                break
            result = self.step()
            assert result is not None, "the canary is not scheduled"
            self.deliver(result)
        assert self.tokens == expected_tokens(CANARY, NUM_TOKENS), "the canary's tokens are wrong"

    def _listen(self) -> None:
        for client, message in self.scheduler.take_messages():
            if client == GOOD and isinstance(message, StepOutputs):
                self.tokens += [] if message.tokens is None else message.tokens.tolist()
                self.has_ended = self.has_ended or bool(message.ended)


def to_scheduler(rng: random.Random, tally: Tally) -> None:
    union, messages = directions(make_config())["front end to scheduler"]
    engine = Engine()
    for _ in range(ROUND):
        taken = receive(union, rng.choice(messages), rng, tally)
        asked = taken.sampling if isinstance(taken, AddRequest) else None
        if isinstance(taken, Hello | Heartbeat) or (asked is not None and asked.structured_outputs is not None):
            continue  # not handled by the scheduler, or only after its grammar is compiled
        if isinstance(taken, Control) and taken.kind in ("pause", "pause_new"):
            continue  # would keep the canary from running
        if taken is not None:
            engine.consume(taken, EVIL)
        for _ in range(rng.randrange(3)):
            if (result := engine.step()) is not None:
                engine.deliver(result)
    engine.scheduler.drop_client(EVIL)
    engine.check_canary()


def from_worker(rng: random.Random, tally: Tally) -> None:
    engine = Engine()
    for index in range(4):
        engine.consume(make_request(f"r{index}", [index, 1, 2], max_tokens=40, ignore_eos=True), EVIL)
    for _ in range(ROUND):
        result = engine.step()
        if result is None:
            break
        other = receive(WorkerToScheduler, result, rng, tally)
        if isinstance(other, ModelRunnerOutput) and not other.failure:
            try:
                engine.scheduler.consume(other)
            except WorkerFault:
                tally["refused by the scheduler"] += 1
            else:
                tally["taken"] += 1
                engine.scheduler.check()
                if other.step > engine.scheduler.results.stale_until:
                    return  # a plausible result: scheduler and worker now have different tokens
        engine.deliver(result)
    engine.scheduler.drop_client(EVIL)
    engine.check_canary()


def to_worker(rng: random.Random, tally: Tally) -> None:
    config = msgspec.structs.replace(CONFIG, max_num_seqs=4)
    runner, _ = make_runner(config, kv_layout(MODEL, 4, "float32"), progress=False)
    first = SchedulerOutput(1, **adding((0, [5, 9, 2, 7], [1]), (2, [3], [2])))
    runner.execute(first).result()
    rows = {name: value for name, value in adding((3, [8, 6, 4, 1, 2], [5, 6])).items() if name != "counts"}
    good = SchedulerOutput(2, removed=[2], counts=[(3, 5)], **rows, **appending(0, 0, [3]))
    for _ in range(ROUND):
        other = receive(SchedulerToWorker, good, rng, tally)
        if not isinstance(other, SchedulerOutput) or other.awaits_sample_inputs:
            continue
        before = runner.batch.num_computed.copy()
        try:
            runner.execute(other).result()
        except StepRefused:
            tally["refused by the worker"] += 1
            assert np.array_equal(before, runner.batch.num_computed)
        else:
            tally["taken"] += 1
            runner.check()
            return
    runner.execute(good).result()
    runner.check()


def to_front_end(rng: random.Random, tally: Tally) -> None:
    union, messages = directions(make_config())["scheduler to front end"]
    for _ in range(ROUND):
        receive(union, rng.choice(messages), rng, tally)


DIRECTIONS: dict[str, Callable[[random.Random, Tally], None]] = {
    "front end to scheduler": to_scheduler,
    "worker to scheduler": from_worker,
    "scheduler to worker": to_worker,
    "scheduler to front end": to_front_end,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, metavar="SECONDS", help="duration (60)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (0)")
    parser.add_argument("--first-round", type=int, default=0, metavar="N", help="first round, to repeat a failure (0)")
    args = parser.parse_args()
    tallies = {name: Counter[str]() for name in DIRECTIONS}
    failures, number, began = 0, args.first_round, time.monotonic()
    while time.monotonic() < began + args.seconds and failures < 10:
        name = list(DIRECTIONS)[number % len(DIRECTIONS)]
        try:
            DIRECTIONS[name](random.Random(f"{args.seed} {number}"), tallies[name])
        except Exception:
            failures += 1
            traceback.print_exc()
            print(f"{name}: repeat with --seed {args.seed} --first-round {number}", file=sys.stderr)
        number += 1
    print(
        json.dumps(
            {
                "seed": args.seed,
                "rounds": number - args.first_round,
                "seconds": round(time.monotonic() - began, 1),
                "failures": failures,
                "directions": {name: dict(sorted(tally.items())) for name, tally in tallies.items()},
            }
        )
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
