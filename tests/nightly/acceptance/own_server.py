"""A `quire serve` started by the harness, or one that runs already; and the resources that its processes hold."""

import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

import psutil
from fault_server import FaultServer

from quire.bench.measure.http_client import parse_metrics
from quire.protocol.errors import ConfigError, EngineError

T = TypeVar("T")

SETTLE_S = 20.0
GAUGES = ("num_requests_running", "num_requests_waiting", "num_free_blocks", "num_usable_blocks")


class Holdings(NamedTuple):
    """Resources of one process: resident bytes, bytes with shared pages divided, open descriptors, threads."""

    rss: int
    pss: int
    num_fds: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Target:
    """A server. ``root``: process id of its supervisor; None if the harness did not start it."""

    url: str
    api_key: str
    root: int | None

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or 80

    def post(self, path: str, body: bytes, *, close: bool = False) -> bytes:
        """Return the bytes of a POST request."""
        key = f"authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        last = "connection: close\r\n" if close else ""
        return f"POST {path} HTTP/1.1\r\nhost: bench\r\n{key}{last}content-length: {len(body)}\r\n\r\n".encode() + body

    def metrics(self) -> dict[str, float]:
        """Return /metrics without labels. Raises EngineError if the server does not answer."""
        try:
            with urlopen(f"{self.url}/metrics", timeout=30) as response:
                return parse_metrics(response.read().decode())
        except (URLError, OSError) as error:
            raise EngineError(f"cannot read /metrics of the server: {error}") from None

    def settled(self) -> dict[str, int]:
        """Return the gauges once nothing runs and all blocks are free, or after SETTLE_S."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            found = self.metrics()
            gauges = {name: int(found[name]) for name in GAUGES if name in found}
            if is_clean(gauges) or time.monotonic() > deadline:
                return gauges
            time.sleep(0.1)

    def holdings(self) -> dict[str, Holdings]:
        """Return the resources of each process by its role; several with one role are numbered."""
        found: dict[str, Holdings] = {}
        for name, held in self._of_each(_measure):
            numbered = (f"{name} {i}" for i in range(2, 10_000))
            found[next(key for key in (name, *numbered) if key not in found)] = held
        return found

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time of each role so far."""
        found: dict[str, float] = {}
        for name, times in self._of_each(psutil.Process.cpu_times):
            found[name] = found.get(name, 0.0) + times.user + times.system
        return found

    def front_ends(self) -> list[psutil.Process]:
        """Return the front-end processes, if the harness started the server."""
        return [process for name, process in self._of_each(lambda process: process) if name == "http"]

    def _of_each(self, measure: Callable[[psutil.Process], T]) -> Iterator[tuple[str, T]]:
        """Yield (role, result of ``measure``) of each process, if the harness started the server."""
        if self.root is None:
            return
        root = psutil.Process(self.root)
        for process in [root, *root.children(recursive=True)]:
            try:
                yield _role(process), measure(process)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue  # exited in the meantime


def is_clean(gauges: dict[str, int]) -> bool:
    """Whether nothing runs or waits, and all blocks are free."""
    if len(gauges) < len(GAUGES):
        return False
    running, waiting, free, usable = (gauges[name] for name in GAUGES)
    return not running and not waiting and free == usable


def busy_shares(before: dict[str, float], after: dict[str, float], wall: float) -> dict[str, float]:
    """Return the cores that each role kept busy between two ``cpu_seconds``, ``wall`` seconds apart."""
    return {name: (seconds - before.get(name, 0.0)) / wall for name, seconds in after.items()}


@contextmanager
def serving(url: str | None, api_key: str | None, flags: Sequence[str], more: str | None) -> Iterator[Target]:
    """Yield the server at ``url``, or start one with the demo model that ends with the block.

    Args:
        flags: flags of the started server; ``more`` are the user's, as one string, and take precedence.

    Raises:
        ConfigError: flags are given for a running server, or the started one fails; with its last output line.
    """
    if url is not None:
        if more:
            raise ConfigError("--serve-args need a server started by the harness: remove --url")
        yield Target(url.rstrip("/"), api_key or "", None)
        return
    # A harness that is terminated must not leave its server behind.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with FaultServer([*flags, *shlex.split(more or "")], echo=True) as server:
            yield Target(f"http://127.0.0.1:{server.port}", api_key or "", server.process.pid)
            server.stop()
    finally:
        signal.signal(signal.SIGTERM, before)


def _role(process: psutil.Process) -> str:
    """Return the last part of the module that the process runs: cli, scheduler_proc, worker_proc, http."""
    words = process.cmdline()
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else process.name()
    return module.rpartition(".")[2]


def _measure(process: psutil.Process) -> Holdings:
    memory = process.memory_full_info()
    return Holdings(memory.rss, memory.pss, process.num_fds(), process.num_threads())
