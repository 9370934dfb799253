"""What a model needs of the other ranks."""

from typing import Protocol

import torch


class TensorParallel(Protocol):
    """The ranks among which each layer's weights are cut; every rank calls the same operations in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, added in rank order so that all ranks get the same bits; ``x`` may be overwritten."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, width]`` of every rank, side by side in rank order: ``[rows, size * width]``."""
        ...

    def close(self) -> None:
        """The last call, when every rank is about to end."""
        ...


class SingleRank:
    """One rank that holds everything."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def close(self) -> None:
        pass
