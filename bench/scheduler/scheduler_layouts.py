"""Section ``layouts`` of ``quire bench scheduler``: an asynchronous step of steady decode by KV cache layout.

One rig per layout; they take turns, so that other load on the machine meets them alike. All rows are past the window
and the pool is full of cached contents: in every ``UNIT`` steps each group of each row gets a block, whose content is
evicted, and each group with a window releases one. So a step does what it does in a server that has run for hours.
"""

from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec

from quire.bench.scheduler.scheduler_rig import BLOCK_SIZE, Rig, bench_model, uncollected
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.model_config import ModelConfig

UNIT = BLOCK_SIZE
"""Steps in which every request gets one new block per group."""

SHAPES = {
    "full_attention": "llama-3.1-8b",
    "one_window": "mistral-7b",
    "two_groups": "gpt-oss-20b",
    "seven_groups": "gemma-3-1b",
}
"""The shape whose layers make each layout."""


@dataclass(frozen=True, slots=True)
class LayoutSizes:
    """``rounds`` times, each layout in turn takes ``units`` units of ``UNIT`` steps.

    ``window`` replaces the windows of the shapes, which may be longer than the prompts.
    """

    batch: int = 256
    prompt_len: int = 512
    window: int = 256
    units: int = 5
    rounds: int = 8


def measure_layouts(sizes: LayoutSizes, steady_decode: bool = True) -> dict[str, Any]:
    """Return microseconds of CPU per step, median over units, and the ratio to full attention, by layout."""
    rigs = {name: _filled(_model(shape, sizes), sizes, steady_decode) for name, shape in SHAPES.items()}
    samples: dict[str, list[float]] = {name: [] for name in rigs}
    with uncollected():
        for index in range(sizes.rounds):
            for name in sorted(rigs, reverse=bool(index % 2)):
                samples[name] += [rigs[name].mean_step_us(UNIT) for _ in range(sizes.units)]
    base = median(samples["full_attention"])
    return {
        name: {"step_us": round(median(found), 2), "ratio": round(median(found) / base, 3)}
        for name, found in samples.items()
    }


def _model(shape: str, sizes: LayoutSizes) -> ModelConfig:
    model = bench_model(shape)
    return msgspec.structs.replace(model, windows=[window and sizes.window for window in model.windows])


def _filled(model: ModelConfig, sizes: LayoutSizes, steady_decode: bool) -> Rig:
    """Return a rig whose requests all decode, and whose free blocks have cached contents."""
    longest = sizes.prompt_len + UNIT * (sizes.units * sizes.rounds + 4)
    windows = [group.sliding_window for group in kv_layout(model, BLOCK_SIZE, "bfloat16").groups]
    per_request = sum(min(longest, window + 4 * BLOCK_SIZE if window else longest) // BLOCK_SIZE for window in windows)
    rig = Rig(
        sizes.batch * per_request * 5 // 4,
        sizes.batch,
        async_scheduling=True,
        steady_decode=steady_decode,
        model=model,
    )
    while not rig.scheduler.kv.pool.num_evicted_blocks:
        rig.add(rig.prompt(longest), 1)
        rig.run_until_idle()
    for index in range(sizes.batch):  # staggered, so that every step has as many rows that need a block
        rig.add(rig.prompt(sizes.prompt_len + index % BLOCK_SIZE), 1 << 14)
    while rig.worker.num_active < sizes.batch or rig.worker.num_tokens > sizes.batch:
        rig.step()
    for _ in range(UNIT):
        rig.step()
    return rig
