"""The ranks of one worker group behind the interface of a single worker."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from quire.protocol.config import FIRST_WORKER_EPOCH
from quire.protocol.errors import EngineError
from quire.protocol.wire.channel import Channel, Frames, Received, SendFailed
from quire.protocol.wire.worker_messages import Digest, ModelRunnerOutput, Ready


class WorkerGroup:
    """Sends every message to all ranks, and releases a result when the digests of all ranks agree on its step.

    Owns the channels, and per rank its ready message, digests, and results of rank 0 that wait for digests. A single
    rank sends no digests.

    Attributes:
        epoch: the worker epoch of this group.
        is_ready: whether all ranks can run steps.
        is_broken: whether sending to a rank failed.
    """

    def __init__(self, channels: Sequence[Channel], worker_epoch: int = FIRST_WORKER_EPOCH) -> None:
        self.worker_epoch = worker_epoch
        self.is_ready = False
        self.is_broken = False
        self._channels = list(channels)
        self._ready: dict[int, Ready] = {}
        self._held: deque[Received] = deque()
        self._digests: dict[int, dict[int, bytes]] = {}

    @property
    def size(self) -> int:
        return len(self._channels)

    def send(self, message: Any) -> Frames:
        """Send to all ranks. Returns the frames for rank 0, even when sending failed."""
        sent = [self.send_to(rank, message) for rank in range(self.size)]
        return sent[0]

    def send_to(self, rank: int, message: Any) -> Frames:
        """Send to one rank. A failure sets ``is_broken``; the decision remains valid and the next group executes it."""
        try:
            return self._channels[rank].send(message)
        except SendFailed as error:
            self.is_broken = True
            return error.frames

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def receive(self) -> tuple[int, Received] | None:
        """Return the next (rank, message) that can be processed, or None, without waiting.

        Raises:
            EngineError: the ranks disagree on a step, so their states differ.
            ProtocolError: a frame is corrupt or missing.
        """
        for rank, channel in enumerate(self._channels):
            while (received := channel.receive()) is not None:
                match received.message:
                    case Digest() as digest:
                        self._digests.setdefault(digest.step, {})[rank] = digest.value
                    case ModelRunnerOutput() if self.size > 1:
                        self._held.append(received)
                    case _:
                        return rank, received
        return self.agreed()

    def ready(self, rank: int, ready: Ready) -> Ready | None:
        """Record that a rank is ready. Once all are, return the combined Ready of the group."""
        self._ready[rank] = ready
        if len(self._ready) < self.size or self.is_ready:
            return None
        self.is_ready = True
        if len({r.plan.block_size for r in self._ready.values()}) > 1:
            raise EngineError("the ranks chose different KV block sizes: their attention libraries must be the same")
        fewest = [min(counts) for counts in zip(*(r.num_blocks for r in self._ready.values()), strict=True)]
        slowest = max(self._ready.values(), key=lambda r: sum(r.timings.values()))
        return Ready(fewest, self._ready[0].plan, slowest.timings)

    def agreed(self) -> tuple[int, Received] | None:
        """Return (0, the next result on which all ranks agree), or None. Raises EngineError when they disagree."""
        if not self._held:
            return None
        step = self._held[0].message.step
        digests = self._digests.get(step, {})
        if len(digests) < self.size:
            return None
        if len(set(digests.values())) > 1:
            raise EngineError(f"the ranks disagree on step {step}")
        del self._digests[step]
        return 0, self._held.popleft()
