"""Communication between ranks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interconnect:
    """The interconnect of the chips of one group.

    Attributes:
        bandwidth: bytes per second that a chip sends and, simultaneously, receives.
        latency: seconds per message.
    """

    bandwidth: float
    latency: float

    def all_reduce(self, num_bytes: float, num_ranks: int) -> float:
        """Return the seconds of an all-reduce, by ring or by one exchange, whichever is faster.

        In a ring of n ranks, each rank sends 2 (n - 1) times 1/n of the data. In one exchange, each rank sends all data
        to every other rank: less latency, more bytes.
        """
        if num_ranks == 1:
            return 0.0
        hops = 2 * (num_ranks - 1)
        ring = hops * (self.latency + num_bytes / num_ranks / self.bandwidth)
        at_once = self.latency + (num_ranks - 1) * num_bytes / self.bandwidth
        return min(ring, at_once)

    def all_gather(self, num_bytes: float, num_ranks: int) -> float:
        """Return the seconds in which each rank gets ``num_bytes`` of every other rank, by a ring.

        A reduce-scatter that leaves ``num_bytes`` on each rank takes as long.
        """
        return (num_ranks - 1) * (self.latency + num_bytes / self.bandwidth)
