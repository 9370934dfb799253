"""Section ``tiers`` of ``quire bench scheduler``: the scheduler's time for host memory behind the prefix cache.

Rigs with and without host memory take turns, so that other load on the machine meets them alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from quire.bench.scheduler.scheduler_rig import BLOCK_SIZE, Rig, freeze, uncollected, unfreeze

UNIT = BLOCK_SIZE
"""Steps in which every request gets one new block."""


@dataclass(frozen=True, slots=True)
class TierSizes:
    """``rounds`` times ``units`` units of ``UNIT`` steps of each rig. ``loads``: prompts to load, of ``load_len``.

    A round is so long that it has whole stores, which are sent every 48 steps.
    """

    batch: int = 256
    prompt_len: int = 512
    units: int = 6
    rounds: int = 10
    load_len: int = 8192
    loads: int = 60


def measure_tiers(sizes: TierSizes, steady_decode: bool = True) -> dict[str, Any]:
    """Return microseconds of CPU, medians.

    ``idle`` is a step of steady decode while the pool has free blocks without content; ``storing`` one in which each
    new block evicts a content, which is stored before if there is host memory: both without and with host memory.
    ``us_per_stored_block`` is the difference of ``storing`` by block. ``us_per_loaded_block`` is the time from the
    arrival of a prompt in host memory until its blocks are named. All times have the messages in them.
    """
    idle = {on: _decoding(sizes, on, steady_decode, is_full=False) for on in (False, True)}
    found: dict[str, Any] = {"idle": _figures(_step_us(idle, sizes))}
    assert not idle[True].num_moved
    del idle
    storing = {on: _decoding(sizes, on, steady_decode, is_full=True) for on in (False, True)}
    before = storing[True].num_moved
    times = _step_us(storing, sizes)
    per_step = (storing[True].num_moved - before) / (UNIT * sizes.units * sizes.rounds)
    found["storing"] = _figures(times) | {"stored_per_step": round(per_step, 2)}
    more = [b - a for a, b in zip(times[False], times[True], strict=True)]
    found["us_per_stored_block"] = round(median(more) / per_step, 3)
    del storing
    return found | _loads(sizes, steady_decode)


def _decoding(sizes: TierSizes, on: bool, steady_decode: bool, *, is_full: bool) -> Rig:
    """Return a rig whose requests all decode. ``is_full``: each free block has a content."""
    longest = sizes.prompt_len + UNIT * (sizes.units * sizes.rounds + 6)
    num_blocks = sizes.batch * longest // BLOCK_SIZE * 5 // 4
    rig = Rig(
        num_blocks,
        sizes.batch,
        async_scheduling=True,
        steady_decode=steady_decode,
        num_host_pages=2 * num_blocks if on else 0,
    )
    while is_full and not rig.scheduler.kv.pool.num_evicted_blocks:
        rig.add(rig.prompt(longest), 1)
        rig.run_until_idle()
    for index in range(sizes.batch):  # staggered, so that every step has as many rows that need a block
        rig.add(rig.prompt(sizes.prompt_len + index % BLOCK_SIZE), 1 << 14)
    while rig.worker.num_active < sizes.batch or rig.worker.num_tokens > sizes.batch:
        rig.step()
    for _ in range(2 * UNIT):
        rig.step()
    return rig


def _step_us(rigs: Mapping[bool, Rig], sizes: TierSizes) -> dict[bool, list[float]]:
    """Return the mean step of each round, without and with host memory."""
    samples: dict[bool, list[float]] = {False: [], True: []}
    with uncollected():
        for index in range(sizes.rounds):
            for on in sorted(rigs, reverse=bool(index % 2)):
                samples[on].append(rigs[on].mean_step_us(UNIT * sizes.units))
    return samples


def _figures(samples: Mapping[bool, list[float]]) -> dict[str, float]:
    without, on = (median(samples[each]) for each in (False, True))
    ratios = [b / a for a, b in zip(samples[False], samples[True], strict=True)]
    return {"without_us": round(without, 2), "with_us": round(on, 2), "ratio": round(median(ratios), 4)}


def _loads(sizes: TierSizes, steady_decode: bool) -> dict[str, Any]:
    """Load prompts by turns into a pool that has room for half of them."""
    per_prompt = sizes.load_len // BLOCK_SIZE
    rig = Rig(4 * per_prompt, 16, steady_decode=steady_decode, num_host_pages=16 * per_prompt)
    prompts = [rig.prompt(sizes.load_len) for _ in range(8)]
    for prompt in prompts:
        rig.add(prompt, 1)
        rig.run_until_idle()
    samples: list[float] = []
    freeze()
    for index in range(sizes.loads):
        rig.add(prompts[index % len(prompts)], 1)
        before = rig.num_moved
        step = rig.step()  # begins the load, and names its blocks
        assert step.diff is None and step.update_ns is not None
        samples.append((step.schedule_ns + step.update_ns) / 1e3 / (rig.num_moved - before))
        rig.run_until_idle()
    unfreeze()
    return {"us_per_loaded_block": round(median(samples), 3), "loaded_per_prompt": per_prompt - 1}
