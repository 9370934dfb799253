"""What ranks say to each other: an all-reduce after each attention and each feed-forward layer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """Between the chips of one group.

    Attributes:
        bandwidth: bytes per second that one chip sends, and at once receives.
        latency: seconds of one message.
    """

    bandwidth: float
    latency: float

    def all_reduce(self, num_bytes: float, num_ranks: int) -> float:
        """Seconds. In a ring each rank passes on 2 (n - 1) parts of an n-th each; small sums go in one exchange.

        One exchange means that each rank sends everything to every other: less latency, more bytes.
        """
        if num_ranks == 1:
            return 0.0
        hops = 2 * (num_ranks - 1)
        ring = hops * (self.latency + num_bytes / num_ranks / self.bandwidth)
        at_once = self.latency + (num_ranks - 1) * num_bytes / self.bandwidth
        return min(ring, at_once)
