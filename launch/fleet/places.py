"""Where engines run: the interface for the fleet, and engines on this machine."""

from typing import Protocol

from quire.protocol.config import RankPlace


class Places(Protocol):
    """Gives engines the places of their ranks."""

    def take(self, engine: int) -> list[RankPlace] | str | None:
        """Return the place of each rank of an engine that is about to start, or in one line why there is none, or None
        while they are being prepared: ask again soon. The engine has none yet."""
        ...

    def give_back(self, engine: int) -> None:
        """Take back the places of an engine that has ended. No effect if it has none."""
        ...


class OwnedPlaces(Places, Protocol):
    """Places that the server has opened.

    Attributes:
        head_key_file: file with this machine's key pair for nodes; empty if all engines are on this machine.
    """

    head_key_file: str

    def close(self) -> None:
        """Disconnect from nodes. The engines have ended."""
        ...


class LocalPlaces:
    """All ranks on this machine: rank r of engine e on GPU ``e * num_ranks + r``. A worker checks that it exists."""

    head_key_file = ""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def take(self, engine: int) -> list[RankPlace] | str:
        first = engine * self._num_ranks
        return [RankPlace(device=first + rank) for rank in range(self._num_ranks)]

    def give_back(self, engine: int) -> None:
        pass

    def close(self) -> None:
        pass
