"""Tensor-parallel ranks as threads of one process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class ThreadRank:
    """``TensorParallel`` between the threads that share ``exchange``."""

    def __init__(self, rank: int, exchange: list[torch.Tensor | None], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(exchange)
        self._exchange = exchange
        self._barrier = barrier

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._all(x)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        self._barrier.wait()  # The caller may overwrite ``x`` after this.
        return total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = torch.cat(self._all(x), -1)
        self._barrier.wait()
        return gathered

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._exchange[self.rank] = x
        self._barrier.wait()
        return [part for part in self._exchange if part is not None]


def on_ranks(size: int, work: Callable[[ThreadRank], T]) -> list[T]:
    """Return the result of ``work`` on each rank; an exception on one rank releases the others."""
    exchange: list[torch.Tensor | None] = [None] * size
    barrier = threading.Barrier(size, timeout=60)

    def run(rank: int) -> T:
        try:
            with torch.inference_mode():
                return work(ThreadRank(rank, exchange, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
