"""Interface for communication between ranks."""

from typing import Protocol

import torch


class TensorParallel(Protocol):
    """The ranks that share each layer's weights; every rank calls the same operations in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks, added in rank order so that all ranks get the same bits; may overwrite ``x``."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return every rank's ``[rows, width]`` side by side in rank order: ``[rows, size * width]``."""
        ...

    def close(self) -> None:
        """Release resources. The last call, when all ranks are about to exit."""
        ...


class SingleRank:
    """A group of one rank, which needs no communication."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def close(self) -> None:
        pass
