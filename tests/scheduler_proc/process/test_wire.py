"""The size of step messages: a diff has only changes, so a steady batch costs almost nothing."""

import random
from statistics import mean

import pytest
from scheduler_driver import Driver

REQUESTS = 256
LIMIT = 1024


def steady(prompt_lengths: list[int], steps: int) -> list[int]:
    """Return the bytes of each step message while all requests decode."""
    driver = Driver(
        num_blocks=1 + REQUESTS * 12,
        block_size=16,
        max_model_len=192,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=2048,
        async_scheduling=True,
        enable_prefix_caching=False,
    )
    for index, length in enumerate(prompt_lengths):
        driver.add(f"r{index}", [(index + i) % 1000 for i in range(length)], max_tokens=100, ignore_eos=True)
    while driver.scheduler.table.waiting or len(driver.scheduler.steady_decode) < REQUESTS:
        driver.step()
    del driver.sizes[:]
    driver.step(steps)
    assert len(driver.scheduler.table.running) == REQUESTS
    return driver.sizes


def test_a_decode_step_of_256_requests_fits_in_a_kibibyte() -> None:
    rng = random.Random(1)
    sizes = steady([rng.randrange(8, 40) for _ in range(REQUESTS)], steps=32)
    assert max(sizes) <= LIMIT, f"largest step message: {max(sizes)} bytes"
    assert mean(sizes) <= LIMIT / 2, f"mean step message: {mean(sizes):.0f} bytes"


@pytest.mark.full
def test_a_decode_step_without_new_blocks_is_a_few_bytes() -> None:
    sizes = steady([8] * REQUESTS, steps=48)
    assert sorted(sizes)[len(sizes) // 2] <= 32
    # The worst case: all requests fill their blocks in the same step.
    assert max(sizes) <= LIMIT, f"largest step message: {max(sizes)} bytes"
    assert mean(sizes) <= LIMIT / 4
