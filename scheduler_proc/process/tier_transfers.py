"""Work of the workers beside the steps: copies of blocks (where their pages are, deadlines), loads of adapters, and
encodings of items."""

import math
from collections import deque
from concurrent.futures import Future
from pathlib import Path

import msgspec

from quire.protocol.config import FIRST_WORKER_EPOCH, EngineConfig
from quire.protocol.errors import ConfigError, EngineError
from quire.protocol.model.checkpoint_digest import Fingerprint, begin_digest
from quire.protocol.process.log import event_logger
from quire.protocol.wire.adapter_messages import AdapterLoaded, LoadAdapter
from quire.protocol.wire.codec import Codec
from quire.protocol.wire.item_messages import Encode
from quire.protocol.wire.kv_events import HASH_BYTES
from quire.protocol.wire.transfer_messages import BlocksMoved, DiskContents, DiskPages, HostPages
from quire.protocol.wire.worker_messages import SideJob, SideJobDone
from quire.scheduler_proc.process.transport import PageFiles, Transport
from quire.scheduler_proc.process.worker_group import WorkerGroup
from quire.scheduler_proc.requests.events import Consumed, HostMemory, LoadLate
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.journal import Journal

log = event_logger("scheduler")

LOG_S = 10.0
"""Least seconds between two lines about failed copies, of which a bad disk has many."""
SLOW_LOAD_S = 30.0
"""Seconds between two lines about a load of an adapter, or an encoding of an item, that does not end."""


class TierTransfers:
    """Sends the Scheduler's transfers, loads of adapters and encodings of items, and passes it their answers and which
    transfers are late.

    Owns where the pages of all tiers are. Without ``--cpu-offload-bytes``, ``--ssd-cache-bytes``, ``--enable-lora`` and
    items it has nothing to do. Writes to the disk itself only to forget contents, and waits for it then.
    """

    def __init__(self, config: EngineConfig, transport: Transport, journal: Journal, worker_epoch: int) -> None:
        """
        Args:
            worker_epoch: after the first one, this scheduler replaces another. The workers are there, and need not wait
                for the disk before they join.

        Raises:
            ConfigError: the disk cannot be used.
        """
        self._config = config
        self._transport = transport
        self._journal = journal
        self._memory: list[HostPages] = []
        """The memory of each rank."""
        self._files: PageFiles | None = None
        # The first scheduler opens the folder before weights are loaded, so that a wrong folder ends the start in
        # seconds and not after minutes.
        if config.ssd_cache_bytes and worker_epoch == FIRST_WORKER_EPOCH:
            self._files = transport.find_page_files(config, is_restart=False)
        self._fingerprint: Future[Fingerprint] | None = None
        """The fingerprint of the checkpoint, without which pages on disk belong to no weights."""
        if config.ssd_cache_bytes and config.weights_path:
            self._fingerprint = begin_digest(Path(config.weights_path))
        self._waiting: WorkerGroup | None = None
        """Workers that wait for the fingerprint, without pages."""
        self._disk_is_read = False
        """Whether workers have answered what the disk contains."""
        self._contents: deque[DiskContents] = deque()
        """Contents of the disk that the Scheduler does not know yet: a part in each turn, so that no turn is long."""
        self._events: Codec[Consumed] = Codec(Consumed)
        self._deadlines: dict[int, float] = {}
        """Load to the time at which it is late."""
        self._slow_at: dict[tuple[str, int | str], float] = {}
        """Side work to the time at which it is logged."""
        self._num_failed = 0
        """Failed copies that no line in the log has counted."""
        self._logs_at = -math.inf

    def open(self, workers: WorkerGroup) -> tuple[int, int, int]:
        """Open the disk. Returns the pages in host memory and on disk, and what is forgotten, as in TraceHeader.

        Raises:
            ConfigError: host memory has no room for a page, or the disk cannot be used. An engine that has served
                before continues without the disk.
        """
        wanted, page_bytes = self._config.cpu_offload_bytes, sum(workers.page_bytes)
        if 0 < wanted < page_bytes:
            raise ConfigError(f"--cpu-offload-bytes must be at least {page_bytes}, a page of all ranks (got {wanted})")
        num_pages = 1 + wanted // page_bytes if wanted and page_bytes else 0
        if not self._config.ssd_cache_bytes or not page_bytes:
            return num_pages, 0, 0
        try:
            files = self._files or self._transport.find_page_files(self._config, is_restart=True)
            files.open(workers.page_bytes)
        except ConfigError as error:
            if workers.worker_epoch == FIRST_WORKER_EPOCH:
                raise
            log.error("the disk cache is not used", reason=error)
            self._files = None
            return num_pages, 0, 0
        self._files = files
        return num_pages, files.num_pages, files.forgotten

    def begin(self, scheduler: Scheduler, workers: WorkerGroup) -> None:
        """Send where the pages are to workers that are ready, or wait for the fingerprint of the checkpoint.

        Host memory is made for the first of them. Nothing is stored there before: such pages would not fit the disk's.

        Raises:
            EngineError: their pages have another size than those of the workers before them.
        """
        tiers, disk = scheduler.kv.tiers, scheduler.kv.disk
        has_host = bool(tiers) and tiers[0] is not disk
        if has_host and not self._memory:
            self._memory = self._transport.make_host_memory(tiers[0].pages.num_blocks, workers.page_bytes)
        found, expected = workers.page_bytes, [memory.page_bytes for memory in self._memory]
        if has_host and found != expected:
            raise EngineError(f"the new workers have host pages of {found} bytes, but the previous ones of {expected}")
        if self._fingerprint is None or self._fingerprint.done():
            self._send_places(scheduler, workers)
            return
        # The engine serves meanwhile. Pages that were stored now would name the state of the files and not their
        # fingerprint, and could not be told from those of other weights.
        self._waiting = workers
        if has_host and tiers[0].is_open:
            self._consume(scheduler, HostMemory(False))

    def _send_places(self, scheduler: Scheduler, workers: WorkerGroup) -> None:
        weights, disk = self._weights_of(workers), scheduler.kv.disk
        for rank, memory in enumerate(self._memory):
            workers.send_to(rank, msgspec.structs.replace(memory, weights=weights))
        if self._memory and not scheduler.kv.tiers[0].is_open:
            self._consume(scheduler, HostMemory(True))
        if (files := self._files) is None or disk is None:
            return
        key_bytes = HASH_BYTES[self._config.prefix_caching_hash_algo]
        for rank, (path, size) in enumerate(zip(files.paths, workers.page_bytes, strict=True)):
            rest = size, not self._disk_is_read, key_bytes, files.forgotten, weights
            workers.send_to(rank, DiskPages(str(path), disk.first_id, files.num_pages, *rest))

    def _weights_of(self, workers: WorkerGroup) -> str:
        """Return the name of the weights that a group has loaded: the fingerprint of the files, if they are unchanged.

        Otherwise, and for host memory alone, which does not outlive the files' state, it is that state.
        """
        if self._fingerprint is not None:
            digest, state = self._fingerprint.result()
            # A file may have been replaced between the hash and the load. Contents of either would then be found under
            # the name of the other.
            if workers.files == {state}:
                return digest
            log.error("the checkpoint changed after its start, so earlier contents are not found: restart the engine")
        return " ".join(sorted(workers.files))

    def send_loads(self, scheduler: Scheduler, workers: WorkerGroup, now: float) -> None:
        """Send loads of blocks and adapters, and encodings, which need not wait for the step that was just decided."""
        for load in scheduler.transfers.take_loads():
            # A load is a bet against computing: the limit is the time in which the request would have computed the
            # blocks. Without it, a disk that hangs would hold its requests for ever.
            self._deadlines[load.transfer] = now + scheduler.transfers.load_limit(load.transfer)
            workers.send(load)
        self._send_beside(scheduler, workers, now)

    def _send_beside(self, scheduler: Scheduler, workers: WorkerGroup, now: float) -> None:
        """Send what threads of the workers do beside the steps."""
        for message in scheduler.take_side_jobs():
            self._slow_at[_named(message)] = now + SLOW_LOAD_S
            workers.send(message)

    def send_stores(self, scheduler: Scheduler, workers: WorkerGroup) -> None:
        """Send stores and demotions, after the step that was decided before them."""
        disk, files = scheduler.kv.disk, self._files
        if files is not None and disk is not None and (invalid := disk.take_invalid()):
            files.wipe(invalid)  # before these pages are filled again
        for store in scheduler.transfers.take_stores():
            workers.send(store)

    def answered(self, scheduler: Scheduler, answer: BlocksMoved | DiskContents | SideJobDone, now: float) -> None:
        """Pass an answer to the Scheduler, and log what has failed.

        Raises:
            EngineError: its durations are impossible.
        """
        if isinstance(answer, SideJobDone):
            what, number = _named(answer)
            if not 0.0 <= answer.seconds < math.inf:
                raise EngineError(f"{what} {number} took {answer.seconds} s: the worker is faulty")
            self._slow_at.pop((what, number), None)
            self._consume(scheduler, answer)
            if answer.problem:
                # Not an error: the clients that need it may all be gone, and its file with them.
                log.warning(f"{what} was not loaded; requests that need it end", number=number, reason=answer.problem)
            elif isinstance(answer, AdapterLoaded):
                log.info(
                    "loaded an adapter",
                    number=answer.number,
                    slot=answer.slot,
                    bytes=answer.num_bytes,
                    was_cached=answer.was_cached,
                    seconds=answer.seconds,
                )
            return
        if isinstance(answer, BlocksMoved):
            if not 0.0 <= answer.disk_seconds <= answer.seconds < math.inf:
                durations = f"{answer.seconds} s, of which {answer.disk_seconds} s on disk"
                raise EngineError(f"transfer {answer.transfer} took {durations}: the worker is faulty")
            self._deadlines.pop(answer.transfer, None)
            self._num_failed += len(answer.failed)
            if answer.failed and now >= self._logs_at:
                log.warning("copies of blocks have failed", blocks=self._num_failed, reason=answer.reason)
                self._num_failed, self._logs_at = 0, now + LOG_S
            before = _stopped(scheduler)
            self._consume(scheduler, answer)
            for tier in _stopped(scheduler) - before:
                log.error("the last stores to a tier have failed; now it is only read", tier=tier, reason=answer.reason)
            for tier in before - _stopped(scheduler):
                log.info("a store to the tier has succeeded; it is used again", tier=tier)
            return
        self._disk_is_read = True
        self._contents.extend(answer.parts())
        if answer.reason:
            log.error("the disk cache is not used", reason=answer.reason)
        else:
            log.info("the disk cache was read", blocks=len(answer.page_ids))

    def remaining(self, now: float) -> float | None:
        """Return the seconds until a load is late, 0 with contents to pass, or None if neither is expected."""
        if self._contents:
            return 0.0
        return None if not self._deadlines else max(min(self._deadlines.values()) - now, 0.0)

    def turn(self, scheduler: Scheduler, workers: WorkerGroup | None, now: float) -> None:
        """Send the stores that results and answers have led to; report late loads and found contents to the Scheduler.

        A reset of the prefix cache is written to the disk here, before its reply is sent.
        """
        disk, files = scheduler.kv.disk, self._files
        if self._waiting is not None and self._fingerprint is not None and self._fingerprint.done():
            workers, self._waiting = self._waiting, None
            self._send_places(scheduler, workers)
        if files is not None and disk is not None and disk.forgotten > files.forgotten:
            # On disk before the reply is sent: an administrator who has reset the cache relies on it, also if the
            # engine is killed in the next moment.
            files.forget(disk.forgotten)
        if workers is not None:
            self.send_stores(scheduler, workers)
            if workers.is_ready:
                self._send_beside(scheduler, workers, now)
        for number in [number for number, deadline in self._deadlines.items() if deadline <= now]:
            del self._deadlines[number]
            self._consume(scheduler, LoadLate(number))
        for job in [job for job, at in self._slow_at.items() if at <= now]:
            log.warning(f"{job[0]} is still being loaded; its requests wait", number=job[1], after_s=SLOW_LOAD_S)
            self._slow_at[job] = now + SLOW_LOAD_S
        if self._contents:
            self._consume(scheduler, self._contents.popleft())

    def forget(self) -> None:
        """Expect no more answers: the workers are lost."""
        self._deadlines.clear()
        self._slow_at.clear()
        self._waiting = None

    def _consume(
        self, scheduler: Scheduler, event: BlocksMoved | DiskContents | HostMemory | LoadLate | SideJobDone
    ) -> None:
        scheduler.consume(event)
        self._journal.consumed(0, self._events.encode(0, 0, event), event)


def _named(message: SideJob | SideJobDone) -> tuple[str, int | str]:
    """Return what workers load, and its number or the beginning of its key."""
    if isinstance(message, LoadAdapter | AdapterLoaded):
        return "an adapter", message.number
    key = message.item.key if isinstance(message, Encode) else message.key
    return "an image", key.hex()[:16]


def _stopped(scheduler: Scheduler) -> set[str]:
    """Return the tiers to which nothing is copied."""
    return {tier.name for tier in scheduler.transfers.tiers() if tier.is_stopped}
