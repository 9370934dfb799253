"""Section ``forks`` of ``quire bench scheduler``: the scheduler's time to fork a request, and what n samples cost."""

from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec
import numpy as np

from quire.bench.scheduler.scheduler_rig import BLOCK_SIZE, Rig, freeze, num_bytes, unfreeze
from quire.protocol.config import FIRST_WORKER_EPOCH
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.codec import Codec
from quire.protocol.wire.front_end_messages import AddRequest, FrontEndToScheduler
from quire.protocol.wire.worker_messages import SchedulerToWorker


@dataclass(frozen=True, slots=True)
class ForkSizes:
    """``lengths``: tokens of the requests to fork. Each is forked ``rounds`` times into each of ``children``."""

    lengths: tuple[int, ...] = (24, 2048, 8192)
    children: tuple[int, ...] = (1, 32)
    rounds: int = 40
    samples: int = 64
    prompt_len: int = 8192


def measure_forks(sizes: ForkSizes, steady_decode: bool = True) -> dict[str, Any]:
    """Return microseconds of CPU per fork, and the costs of samples that are forks or requests of their own.

    A fork's time is that of its arrival, and of its part of the steps until all of the children run, the same steps
    without them subtracted; the messages to the workers are in it. ``us_per_block`` is the slope over the lengths.
    """
    found: dict[str, Any] = {}
    for count in sizes.children:
        times = {length: _fork_us(sizes, length, count, steady_decode) for length in sizes.lengths}
        blocks = np.array(sizes.lengths) / BLOCK_SIZE
        slope, fixed = np.polyfit(blocks, [times[length] for length in sizes.lengths], 1)
        of_lengths = {f"{length}_tokens_us": round(value, 2) for length, value in times.items()}
        found[f"children_{count}"] = of_lengths | {"fixed_us": round(fixed, 2), "us_per_block": round(slope, 4)}
    for forked in (True, False):
        found["forks" if forked else "requests"] = _samples(sizes, steady_decode, forked=forked)
    return found


def _fork_us(sizes: ForkSizes, length: int, count: int, steady_decode: bool) -> float:
    """Return the median time of a fork of a decoding request with ``length`` tokens and some."""
    room = (length + 8 * sizes.rounds) // BLOCK_SIZE + 4
    rig = Rig(room + count * 8 + 64, count + 1, 16_384, max_model_len=2 * length + 4096, steady_decode=steady_decode)
    prompt = rig.prompt(length - 5)
    parent, _ = rig.add(prompt, 16 * sizes.rounds)
    rig.step()
    spent: list[float] = []
    freeze()
    for index in range(sizes.rounds):
        plain = rig.step().schedule_ns
        events = [_sample(rig, f"{index}-{child}", 16 * sizes.rounds, parent) for child in range(count)]
        total = sum(rig.consume_ns(event) for event in events)
        num_steps = 0
        while rig.scheduler.table.num_waiting:
            total += rig.step().schedule_ns - plain
            num_steps += 1
        assert num_steps <= 2 and len(rig.scheduler.table.running) == count + 1
        spent.append(total / count)
        for event in events:
            rig.abort(event.request_id)
        rig.step()
    unfreeze()
    return median(spent[2:]) / 1e3


def _sample(rig: Rig, request_id: str, max_tokens: int, parent: str = "", prompt: Int32 | None = None) -> AddRequest:
    """Return a request with the tokens of a parent, or with a prompt."""
    tokens = np.zeros(0, np.int32) if prompt is None else prompt
    return AddRequest(request_id, tokens, rig.sampling(max_tokens), seed=7, forked_from=parent)


def _samples(sizes: ForkSizes, steady_decode: bool, *, forked: bool) -> dict[str, Any]:
    """Return what n samples of one prompt cost until all of them decode."""
    num, length = sizes.samples, sizes.prompt_len
    num_blocks = (num + 1) * (length // BLOCK_SIZE + 4) + 64
    rig = Rig(num_blocks, num, 16_384, max_model_len=2 * length, steady_decode=steady_decode)
    prompt, codec, work = rig.prompt(length), Codec[Any](FrontEndToScheduler), Codec[Any](SchedulerToWorker)
    own = [_sample(rig, f"{index}", 64, prompt=prompt) for index in range(num)]
    fork = {"forked_from": "0", "prompt_token_ids": np.zeros(0, np.int32), "num_forked_tokens": length}
    events = [own[0], *(msgspec.structs.replace(each, **fork) for each in own[1:])] if forked else own
    pool, free = rig.scheduler.kv.pool, rig.scheduler.kv.pool.num_free_blocks
    freeze()
    total = sum(rig.consume_ns(event) for event in events)
    computed = sent = 0
    while rig.scheduler.table.num_waiting:
        step = rig.step()
        total += step.schedule_ns + (step.update_ns or 0)
        assert step.diff is not None
        computed += rig.worker.num_tokens
        sent += num_bytes([bytes(frame) for frame in work.encode(FIRST_WORKER_EPOCH, 0, step.diff)])
    unfreeze()
    return {
        "request_bytes": sum(num_bytes([bytes(f) for f in codec.encode(0, 0, event)]) for event in events),
        "step_bytes": sent,
        "computed_tokens": computed,
        "kv_blocks": free - pool.num_free_blocks,
        "scheduler_us": round(total / 1e3, 1),
    }
