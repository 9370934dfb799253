"""Section ``loads`` of ``quire bench scheduler``: the regret of the choice to load, compute or split.

A simulation: no clock is read, and every machine gets the same figures. A server of one model and one tier has step
and copy times that differ from its learned costs at the start, in their form too, with noise and outliers. It serves
requests that find a part of their prompt in the tier, behind prefills or loads of others, by the learned choice, and
learns only from what then runs. The time to the end of the prefill, without noise, is compared with those of the two
pure policies, and with the best of the two and of all splits.
"""

import random
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any

from quire.scheduler_proc.costs.choice import LoadChoice, Prefix, WorkAhead, choose
from quire.scheduler_proc.costs.costs import FULL_PAGES, Costs, Prefill

BLOCK_SIZE, STEP_TOKENS, REST = 16, 8192, 256
AHEAD = 2048
"""Tokens of each request ahead."""


@dataclass(frozen=True, slots=True)
class TrueTimes:
    """True times. ``work_s``: seconds per unit of ``Prefill.work``; ``floor_s``: least seconds of a step."""

    kv_bytes: int
    token_s: float
    work_s: float
    floor_s: float
    step_s: float = 1e-3
    copy_s: float = 5e-4
    bytes_per_s: float = 1e9

    def prefill(self, prefill: Prefill) -> float:
        """Return the time of a prefill of many steps."""
        full, last = divmod(prefill.tokens, STEP_TOKENS)
        sizes = [STEP_TOKENS] * full + [last] * bool(last)
        return sum(self.step_s + max(self.floor_s, size * self.token_s) for size in sizes) + self.work_s * prefill.work

    def load(self, num_pages: int) -> float:
        return self.copy_s + num_pages * BLOCK_SIZE * self.kv_bytes / self.bytes_per_s


SERVERS = {
    "llama-8b on H200": TrueTimes(131_072, 1 / 48_800, 1e-9, 3.4e-3),
    "qwen3-30b-a3b on H200": TrueTimes(98_304, 1 / 90_500, 8e-10, 4e-3),
    "qwen3-4b on H200": TrueTimes(147_456, 1 / 81_000, 7e-10, 1.7e-3),
    "qwen3-0.6b on H200": TrueTimes(114_688, 1 / 436_000, 3e-10, 3e-4),
    "smollm2-135m on 2 cores": TrueTimes(23_040, 1e-3, 4e-8, 8e-3, 5e-3),
}
"""Prefill rates, KV bytes per token and floors by roofline; see the log."""


@dataclass(frozen=True, slots=True)
class LoadSizes:
    gb_per_s: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 25.0, 50.0)
    found: tuple[int, ...] = tuple(64 * 2**i for i in range(12))
    depths: tuple[int, ...] = (0, 1, 4, 16)
    first: int = 60
    """Requests while the costs are still far off; reported apart."""
    visits: int = 2
    pairs: int = 20
    """Like requests after a start, of each size found."""


@dataclass(frozen=True, slots=True)
class Case:
    """A request. ``prefills``, ``loads``: the number ahead of it, of AHEAD tokens each."""

    found: int
    prefills: int
    loads: int


@dataclass(slots=True)
class LoadTimes:
    learned: float
    load: float
    compute: float
    best: float
    kind: str


def measure_loads(sizes: LoadSizes) -> dict[str, Any]:
    """Return the regret (the time by the learned choice / the best time - 1) of all requests, and of the worst cell."""
    first: list[LoadTimes] = []
    started: list[LoadTimes] = []
    cells: list[list[LoadTimes]] = []
    by_server: dict[str, float] = {}
    for name, server in SERVERS.items():
        mine: list[list[LoadTimes]] = []
        for gb_per_s in sizes.gb_per_s:
            like = replace(server, bytes_per_s=gb_per_s * 1e9)
            early, found = _serve(like, sizes, f"{name} {gb_per_s}")
            first += early
            started += _serve_like(like, sizes, f"{name} {gb_per_s}")
            mine += found
        by_server[name] = _mean_regret([times for cell in mine for times in cell])
        cells += mine
    every = [times for cell in cells for times in cell]
    return {
        "regret_percent": _mean_regret(every),
        "first_regret_percent": _mean_regret(first),
        "worst_cell_percent": round(100 * max(_regret(cell) for cell in cells), 2),
        "good_pairs_percent": _good_pairs(every),
        "good_pairs_after_start_percent": _good_pairs(started),
        "most_over_pure": round(max(_over_pure(cell) for cell in cells), 3),
        "always_load_percent": round(100 * (fmean(each.load / each.best for each in every) - 1), 1),
        "always_compute_percent": round(100 * (fmean(each.compute / each.best for each in every) - 1), 1),
        "choices": {kind: sum(each.kind == kind for each in every) for kind in ("load", "compute", "split")},
        "by_server_percent": by_server,
        "num_cells": len(cells),
    }


def _mean_regret(times: list[LoadTimes]) -> float:
    return round(100 * (fmean(each.learned / each.best for each in times) - 1), 3)


def _regret(cell: list[LoadTimes]) -> float:
    return sum(each.learned for each in cell) / sum(each.best for each in cell) - 1


def _over_pure(cell: list[LoadTimes]) -> float:
    return sum(each.learned for each in cell) / min(sum(each.load for each in cell), sum(each.compute for each in cell))


def _good_pairs(times: list[LoadTimes]) -> float:
    """Return how many percent take at most 1.1 times the cheaper one of loading and computing the same."""
    return round(100 * fmean(each.learned <= 1.1 * min(each.load, each.compute) for each in times), 2)


def _serve(server: TrueTimes, sizes: LoadSizes, seed: str) -> tuple[list[LoadTimes], list[list[LoadTimes]]]:
    """Serve the first requests, at random, and then those of all cells in random order; return the times of both."""
    rng = random.Random(seed)
    costs = _costs_of_another(server, rng)
    depths = [(prefills, 0) for prefills in sizes.depths] + [(0, loads) for loads in sizes.depths if loads]
    cases = [Case(found, *depth) for found, depth in product(sizes.found, depths)]
    first = [_request(server, costs, rng.choice(cases), rng) for _ in range(sizes.first)]
    cells: dict[Case, list[LoadTimes]] = {case: [] for case in cases}
    order = cases * sizes.visits
    rng.shuffle(order)
    for case in order:
        cells[case].append(_request(server, costs, case, rng))
    return first, list(cells.values())


def _serve_like(server: TrueTimes, sizes: LoadSizes, seed: str) -> list[LoadTimes]:
    """Serve like requests with nothing ahead, of each size after a start with the costs of another load."""
    made = []
    for found in sizes.found:
        rng = random.Random(f"{seed} {found}")
        costs = _costs_of_another(server, rng, 10.0)
        costs.age()
        made += [_request(server, costs, Case(found, 0, 0), rng) for _ in range(sizes.pairs)]
    return made


def _costs_of_another(server: TrueTimes, rng: random.Random, most: float = 5.0) -> Costs:
    """Return what was learned from a server that is up to ``most`` times faster or slower."""
    costs, prefill_factor, load_factor = Costs(), *(most ** rng.uniform(-1, 1) for _ in range(2))
    for _ in range(64):
        prefill = _some_prefill(rng)
        costs.step_took(prefill, 0, prefill_factor * server.prefill(prefill))
        pages = rng.randint(1, 4000)
        costs.load_took("host", pages, load_factor * server.load(pages))
    return costs


def _some_prefill(rng: random.Random) -> Prefill:
    start = rng.randrange(0, 65_536)
    return Prefill.between(start, start + rng.choice([STEP_TOKENS, rng.randint(1, STEP_TOKENS)]))


def _noise(rng: random.Random) -> float:
    return rng.lognormvariate(0.0, 0.1) * (10.0 if rng.random() < 0.02 else 1.0)


def _request(server: TrueTimes, costs: Costs, case: Case, rng: random.Random) -> LoadTimes:
    """Serve a request by the learned choice, and learn from what runs."""
    ahead = sum((Prefill.between(0, AHEAD) for _ in range(case.prefills)), Prefill())
    pages, end = case.found // BLOCK_SIZE, case.found + REST
    ahead_pages = AHEAD // BLOCK_SIZE
    queue = WorkAhead(ahead, STEP_TOKENS, 0, case.loads * costs.load_seconds({"host": ahead_pages}))
    choice = choose(costs, Prefix(0, case.found, end, {"host": range(pages)}, BLOCK_SIZE), queue)
    truth = Truth(server, case, ahead)
    for prefill in truth.steps(choice):
        costs.step_took(prefill, 0, server.prefill(prefill) * _noise(rng))
    loads = [ahead_pages] * case.loads + ([pages - choice.front // BLOCK_SIZE] if choice.kind != "compute" else [])
    for num_pages in loads:
        costs.load_took("host", num_pages, server.load(num_pages) * _noise(rng))
    if choice.kind != "compute":
        costs.num_avoided = 0
    elif costs.avoids_load():
        costs.load_took("host", FULL_PAGES, server.load(FULL_PAGES) * _noise(rng))
    load, compute = truth.split(0), truth.compute()
    return LoadTimes(truth.time(choice), load, compute, min(load, compute, truth.best_split()), choice.kind)


class Truth:
    """The true times of one request."""

    def __init__(self, server: TrueTimes, case: Case, ahead: Prefill) -> None:
        self._server, self._case, self._ahead = server, case, ahead
        self._ahead_load = case.loads * server.load(AHEAD // BLOCK_SIZE)

    def compute(self) -> float:
        return self._computed(self._case.found + REST)

    def split(self, front: int) -> float:
        """Return the time if tokens from ``front`` on are loaded; the request is taken out and added once more."""
        lost = self._server.step_s if front else 0.0
        return max(self._computed(front) + lost, self._loaded(front)) + self._rest()

    def best_split(self) -> float:
        fronts = range(BLOCK_SIZE, self._case.found, BLOCK_SIZE)
        at = bisect_left(fronts, True, key=lambda front: self._computed(front) >= self._loaded(front))
        return min((self.split(front) for front in fronts[max(at - 1, 0) : at + 1]), default=float("inf"))

    def time(self, choice: LoadChoice) -> float:
        if choice.kind == "compute":
            return self.compute()
        if self._loaded(choice.front) <= choice.limit_s:
            return self.split(choice.front)
        computed = self._computed(choice.front)  # then it waits, and computes the rest
        rest = self._server.prefill(Prefill.between(choice.front, self._case.found + REST))
        return max(computed, choice.limit_s) + rest if computed < choice.limit_s else self.compute()

    def steps(self, choice: LoadChoice) -> Iterator[Prefill]:
        """Yield the steps of the choice, those ahead as one step each."""
        for _ in range(self._case.prefills):
            yield Prefill.between(0, AHEAD)
        parts = [(0, choice.front), (self._case.found, self._case.found + REST)]
        if choice.kind == "compute":
            parts = [(0, self._case.found + REST)]
        for start, end in parts:
            for at in range(start, end, STEP_TOKENS):
                yield Prefill.between(at, min(at + STEP_TOKENS, end))

    def _computed(self, end: int) -> float:
        return self._server.prefill(self._ahead + Prefill.between(0, end))

    def _loaded(self, front: int) -> float:
        return self._ahead_load + self._server.load((self._case.found - front) // BLOCK_SIZE)

    def _rest(self) -> float:
        return self._server.prefill(Prefill.between(self._case.found, self._case.found + REST))
