"""Arrivals for ``quire bench scheduler``: prompts with shared prefixes, and outputs of many lengths.

Imports only the standard library, because a peer's interpreter loads this file too.
"""

import math
import random

VOCAB_SIZE = 32_000
FIRST_TOKEN = 3
NUM_PREFIXES, PREFIX_LEN = 8, 512
REST_LEN = (64, 1024)
MEAN_OUTPUT, MAX_OUTPUT = 160, 601

Arrival = tuple[list[int], int]
"""(prompt, max_tokens)."""


def churn_trace(seed: int, steps: int, rate: float, initial: int = 320) -> list[list[Arrival]]:
    """Return the arrivals of each step: Poisson with ``rate`` per step, plus ``initial`` at the first step.

    A quarter of the prompts start with half of one of eight shared prefixes, a quarter with a whole one.
    """
    rng = random.Random(seed)
    vocabulary = range(FIRST_TOKEN, VOCAB_SIZE)
    prefixes = [rng.choices(vocabulary, k=PREFIX_LEN) for _ in range(NUM_PREFIXES)]

    def arrival() -> Arrival:
        shared = rng.choice((0, 0, PREFIX_LEN // 2, PREFIX_LEN))
        prompt = rng.choice(prefixes)[:shared] + rng.choices(vocabulary, k=rng.randint(*REST_LEN))
        return prompt, min(MAX_OUTPUT, 1 + int(rng.expovariate(1 / MEAN_OUTPUT)))

    trace: list[list[Arrival]] = []
    for step in range(steps):
        num = _poisson(rng, rate) + (initial if step == 0 else 0)
        trace.append([arrival() for _ in range(num)])
    return trace


def _poisson(rng: random.Random, rate: float) -> int:
    """Draw the number of arrivals in one unit of time, from exponential gaps."""
    num, at = 0, -math.log(1.0 - rng.random()) / rate
    while at < 1.0:
        num += 1
        at += -math.log(1.0 - rng.random()) / rate
    return num
