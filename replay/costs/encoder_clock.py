"""The encodings of items on a simulated worker."""

from collections import deque

from quire.protocol.wire.item_messages import Encode, Encoded

ENCODE_ROW_S = 3e-5
"""Default duration per row: an image of 1,000 rows, which are 4,000 patches, takes 30 ms on a current GPU."""


class EncoderClock:
    """Knows when encodings end: one after the other, beside the steps, as those of a worker's encoder thread."""

    def __init__(self, row_seconds: float = ENCODE_ROW_S) -> None:
        self._row_seconds = row_seconds
        self._runs: deque[tuple[float, Encoded]] = deque()
        """End and answer of the encodings that have not ended."""
        self._free_at = 0.0

    @property
    def next_end(self) -> float:
        """When the next encoding ends; infinite if there is none."""
        return self._runs[0][0] if self._runs else float("inf")

    def send(self, encode: Encode, now: float) -> None:
        seconds = 0.0 if encode.kind == "rows" else self._row_seconds * encode.num_rows
        self._free_at = max(now, self._free_at) + seconds
        self._runs.append((self._free_at, Encoded(encode.number, seconds=seconds)))

    def take(self, now: float) -> Encoded | None:
        """Return the answer to the next encoding, if that has ended by ``now``."""
        return self._runs.popleft()[1] if self.next_end <= now else None
