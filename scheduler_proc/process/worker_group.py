"""The ranks of one worker group behind the interface of a single worker."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from quire.protocol.config import FIRST_WORKER_EPOCH
from quire.protocol.errors import ConfigError, EngineError
from quire.protocol.model.checkpoint_digest import Fingerprint
from quire.protocol.wire.adapter_messages import AdapterLoaded
from quire.protocol.wire.channel import Channel, Frames, Received, SendFailed
from quire.protocol.wire.item_messages import Encoded
from quire.protocol.wire.transfer_messages import BlocksMoved, DiskContents
from quire.protocol.wire.worker_messages import Digest, ModelRunnerOutput, Ready


class WorkerGroup:
    """Sends every message to all ranks, and releases a result when the digests of all ranks agree on its step.

    Owns the channels, and per rank its ready message, digests, and results of rank 0 that wait for digests. A single
    rank sends no digests. A transfer is answered when all ranks have answered it.

    Attributes:
        epoch: the worker epoch of this group.
        is_ready: whether all ranks can run steps.
        is_broken: whether sending to a rank failed.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        worker_epoch: int = FIRST_WORKER_EPOCH,
        checkpoint: Future[Fingerprint] | None = None,
    ) -> None:
        """``checkpoint``: that of this machine, if ranks are on others; no Ready is received before it is known."""
        self.worker_epoch = worker_epoch
        self.is_ready = False
        self.is_broken = False
        self._channels = list(channels)
        self._checkpoint = checkpoint
        self._early: deque[tuple[int, Received]] = deque()
        """Ready messages that wait for it."""
        self._ready: dict[int, Ready] = {}
        self._held: deque[Received] = deque()
        self._digests: dict[int, dict[int, bytes]] = {}
        self._answers: dict[tuple[type, int | bytes], dict[int, Any]] = {}
        """Answers that not all ranks have given, by type, what they answer, and rank."""
        self._contents: list[list[DiskContents]] = [[] for _ in channels]
        """The parts received from each rank."""

    @property
    def size(self) -> int:
        return len(self._channels)

    @property
    def page_bytes(self) -> list[int]:
        """The bytes of a page on each rank; 0 if blocks cannot be stored in pages."""
        return [self._ready[rank].page_bytes for rank in range(self.size)]

    @property
    def files(self) -> set[str]:
        """What the ranks say of the files of the checkpoint that they have loaded, as in Ready."""
        return {ready.files for ready in self._ready.values()}

    def send(self, message: Any) -> Frames:
        """Send to all ranks. Returns the frames for rank 0, even when sending failed."""
        # All ranks get the message also if one of them is broken, so that the others do not wait in a collective
        # operation for a step that only some have.
        sent = [self.send_to(rank, message) for rank in range(self.size)]
        return sent[0]

    def send_to(self, rank: int, message: Any) -> Frames:
        """Send to one rank. A failure sets ``is_broken``; the decision remains valid and the next group executes it."""
        try:
            return self._channels[rank].send(message)
        # Not raised: the decision has been made, and the turn must end with it recorded.
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
        # Ready is held back rather than answered with an error: hashing this machine's files may take longer than a
        # node's loading.
        is_known = self._checkpoint is None or self._checkpoint.done()
        if self._early and is_known:
            return self._early.popleft()
        for rank, channel in enumerate(self._channels):
            while (received := channel.receive()) is not None:
                match received.message:
                    case Digest() as digest:
                        self._digests.setdefault(digest.step, {})[rank] = digest.value
                    case ModelRunnerOutput() if self.size > 1:
                        # A result of rank 0 is not used before all ranks agree, because ranks whose states differ give
                        # tokens that look plausible.
                        self._held.append(received)
                    case BlocksMoved(transfer=of) | AdapterLoaded(slot=of) | Encoded(key=of) if self.size > 1:
                        kind = type(received.message)
                        answers = self._answers.setdefault((kind, of), {})
                        answers[rank] = received.message
                        if len(answers) == self.size:
                            del self._answers[kind, of]
                            return rank, received._replace(message=_BY_ALL[kind](list(answers.values())))
                    case DiskContents() as contents:
                        self._contents[rank].append(contents)
                        if all(parts and parts[-1].is_last for parts in self._contents):
                            found, self._contents = self._contents, [[] for _ in self._channels]
                            return rank, received._replace(message=common_contents(found))
                    case Ready() if not is_known:
                        self._early.append((rank, received))
                    case _:
                        return rank, received
        return self.agreed()

    def ready(self, rank: int, ready: Ready) -> Ready | None:
        """Record that a rank is ready. Once all are, return the combined Ready of the group.

        Raises:
            ConfigError: a node has another checkpoint than this machine.
            EngineError: the ranks do not fit each other.
        """
        # Another fine-tuning of the same architecture has the same shapes: nothing else would notice it, and its ranks
        # would mix two models.
        if self._checkpoint is not None and ready.files != self._checkpoint.result().digest:
            raise ConfigError(
                f"rank {rank} has loaded another model than this machine has at the same path, or it changed "
                f"meanwhile: copy the files to its node"
            )
        self._ready[rank] = ready
        if len(self._ready) < self.size or self.is_ready:
            return None
        self.is_ready = True
        if len({r.plan.block_size for r in self._ready.values()}) > 1:
            raise EngineError("the ranks chose different KV block sizes: their attention libraries must be the same")
        # One block table serves all ranks, so the rank with the least memory decides.
        fewest = [min(counts) for counts in zip(*(r.num_blocks for r in self._ready.values()), strict=True)]
        slowest = max(self._ready.values(), key=lambda r: sum(r.timings.values()))
        devices = ", ".join(sorted(each.plan.device for each in self._ready.values()))
        num_slots = min(r.num_slots for r in self._ready.values())
        plan = msgspec.structs.replace(self._ready[0].plan, device=devices)
        return Ready(fewest, plan, slowest.timings, num_slots=num_slots)

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


def common_contents(answers: Sequence[Sequence[DiskContents]]) -> DiskContents:
    """Return the contents that all ranks have in the same page, with the same generation; none if a rank has a reason.

    A page whose store ended on some ranks only is thereby not found. The oldest contents come first.

    Args:
        answers: all parts of each rank.

    Raises:
        EngineError: arrays do not fit each other.
    """
    common, *others = [_in_columns(parts) for parts in answers]
    # A rank that cannot read its file has no content, and a prefix must be complete on all ranks.
    if reason := next((part.reason for parts in answers for part in parts if part.reason), ""):
        return DiskContents(common[0][:0], common[1][:0], b"", reason=reason)
    for columns in others:
        _, *rows = np.intersect1d(common[0], columns[0], assume_unique=True, return_indices=True)
        ours, theirs = [[column[at] for column in each] for each, at in zip((common, columns), rows, strict=True)]
        equal = (ours[1] == theirs[1]) & (ours[2] == theirs[2])
        if len(equal):
            equal &= ours[3].shape == theirs[3].shape and (ours[3] == theirs[3]).all(axis=1)
        common = [column[equal] for column in ours]
    oldest_first = np.argsort(common[1], kind="stable")
    pages, generations, groups, keys = [column[oldest_first] for column in common]
    return DiskContents(pages, generations, keys.tobytes(), groups if groups.any() else None)


def _in_columns(parts: Sequence[DiskContents]) -> list[Any]:
    """Return page ids, generations, groups and keys."""
    ids, generations = (np.concatenate([getattr(part, name) for part in parts]) for name in ("page_ids", "generations"))
    groups = np.concatenate([np.zeros(len(p.page_ids), np.int32) if p.groups is None else p.groups for p in parts])
    keys, count = np.frombuffer(b"".join(part.keys for part in parts), np.uint8), len(ids)
    if not len(generations) == len(groups) == count or len(keys) % max(count, 1):
        raise EngineError(f"{count} contents on disk with {len(generations)} generations and {len(keys)} bytes of keys")
    return [ids, generations, groups, keys.reshape(count, len(keys) // max(count, 1))]


def _moved_by_all(answers: Sequence[BlocksMoved]) -> BlocksMoved:
    """Return the answer of a group: a block has failed if it failed on any rank."""
    failed = sorted({index for answer in answers for index in answer.failed})
    reason = next((answer.reason for answer in answers if answer.reason), "")
    seconds, disk_seconds = (max(getattr(each, name) for each in answers) for name in ("seconds", "disk_seconds"))
    return BlocksMoved(answers[0].transfer, failed, seconds, reason, disk_seconds)


def _loaded_by_all(answers: Sequence[AdapterLoaded]) -> AdapterLoaded:
    """Return the answer of a group: an adapter that one rank could not load is not loaded.

    Raises:
        EngineError: the answers are about different adapters.
    """
    numbers = sorted({answer.number for answer in answers})
    if len(numbers) > 1:
        raise EngineError(f"the ranks loaded different adapters to slot {answers[0].slot}: numbers {numbers}")
    return AdapterLoaded(
        numbers[0],
        answers[0].slot,
        next((answer.problem for answer in answers if answer.problem), ""),
        sum(answer.num_bytes for answer in answers),
        max(answer.seconds for answer in answers),
        all(answer.was_cached for answer in answers),
    )


def _encoded_by_all(answers: Sequence[Encoded]) -> Encoded:
    """Return the answer of a group: an item that one rank could not encode has no rows."""
    problem = next((answer.problem for answer in answers if answer.problem), "")
    return Encoded(answers[0].key, problem, max(answer.seconds for answer in answers))


_BY_ALL: dict[type, Callable[[list[Any]], Any]] = {
    BlocksMoved: _moved_by_all,
    AdapterLoaded: _loaded_by_all,
    Encoded: _encoded_by_all,
}
