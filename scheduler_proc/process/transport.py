"""The interfaces through which the loop exchanges messages: ZeroMQ in sockets.py, lists in the simulation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from quire.protocol.config import EngineConfig
from quire.protocol.wire.clients import Hub
from quire.protocol.wire.transfer_messages import HostPages
from quire.scheduler_proc.process.kv_event_feeds import KVEventFeeds
from quire.scheduler_proc.process.worker_group import WorkerGroup


class PageFiles(Protocol):
    """The files of the disk tier, one for each rank; see ``DiskFolder``."""

    @property
    def paths(self) -> Sequence[Path]: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def forgotten(self) -> int: ...

    def open(self, page_bytes: Sequence[int]) -> None:
        """Open the files for pages of this size on each rank. Raises ConfigError if they cannot be used."""
        ...

    def forget(self, generation: int) -> None:
        """Write that contents up to this generation must not be found."""
        ...

    def wipe(self, pages: Sequence[int]) -> None:
        """Overwrite the headers of pages on all ranks."""
        ...


class Transport(Protocol):
    """The transport of the loop: connections, and the poller on which the loop sleeps."""

    @property
    def hub(self) -> Hub: ...

    def open_group(self, worker_epoch: int) -> WorkerGroup:
        """Open the endpoints that the workers of this epoch will connect to."""
        ...

    def close_group(self, group: WorkerGroup) -> None: ...

    def add(self, source: Any) -> None:
        """Add a file descriptor or socket that also wakes ``wait``."""
        ...

    def wait(self, milliseconds: int) -> bool:
        """Return False when no message arrived within the timeout."""
        ...

    def open_kv_events(self, config: EngineConfig) -> KVEventFeeds: ...

    def make_host_memory(self, num_pages: int, page_bytes: Sequence[int]) -> list[HostPages]:
        """Make the memory of each rank's pages, which lasts as long as this process. Returns where each rank finds it.

        Args:
            page_bytes: bytes of a page, of each rank.
        """
        ...

    def find_page_files(self, config: EngineConfig, *, is_restart: bool) -> PageFiles:
        """Return the files of the disk tier. Raises ConfigError if they cannot be used.

        ``is_restart``: whether this scheduler replaces another, for which requests wait.
        """
        ...
