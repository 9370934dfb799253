"""A `quire serve` of the harness's own, or one that runs already; what its processes hold, as the system says."""

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

from quire.launch.measure.http_client import parse_metrics
from quire.protocol.errors import ConfigError, EngineError

T = TypeVar("T")

SETTLE_S = 20.0
GAUGES = ("num_requests_running", "num_requests_waiting", "num_free_blocks", "num_usable_blocks")


class Holdings(NamedTuple):
    """What one process held at a moment: bytes resident, bytes with shared pages divided, open descriptors, threads."""

    rss: int
    pss: int
    num_fds: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Target:
    """A server. ``root``: the process id of its supervisor; None where it is not ours to look into."""

    url: str
    api_key: str
    root: int | None

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or 80

    def post(self, path: str, body: bytes, *, close: bool = False) -> bytes:
        """A whole request, ready to be sent."""
        key = f"authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        last = "connection: close\r\n" if close else ""
        return f"POST {path} HTTP/1.1\r\nhost: bench\r\n{key}{last}content-length: {len(body)}\r\n\r\n".encode() + body

    def metrics(self) -> dict[str, float]:
        """/metrics without labels. Raises EngineError: the server does not answer."""
        try:
            with urlopen(f"{self.url}/metrics", timeout=30) as response:
                return parse_metrics(response.read().decode())
        except (URLError, OSError) as error:
            raise EngineError(f"the server's /metrics does not answer: {error}") from None

    def settled(self) -> dict[str, int]:
        """The gauges once nothing runs and all blocks are back, or as they are after SETTLE_S."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            found = self.metrics()
            gauges = {name: int(found[name]) for name in GAUGES if name in found}
            if is_clean(gauges) or time.monotonic() > deadline:
                return gauges
            time.sleep(0.1)

    def holdings(self) -> dict[str, Holdings]:
        """What each process of the server holds, by its part in it; several of a kind are numbered."""
        found: dict[str, Holdings] = {}
        for name, held in self._of_each(_look):
            numbered = (f"{name} {i}" for i in range(2, 10_000))
            found[next(key for key in (name, *numbered) if key not in found)] = held
        return found

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time of each part of the server so far."""
        found: dict[str, float] = {}
        for name, times in self._of_each(psutil.Process.cpu_times):
            found[name] = found.get(name, 0.0) + times.user + times.system
        return found

    def _of_each(self, look: Callable[[psutil.Process], T]) -> Iterator[tuple[str, T]]:
        """What is seen of each process of a server of our own."""
        if self.root is None:
            return
        root = psutil.Process(self.root)
        for process in [root, *root.children(recursive=True)]:
            try:
                yield _role(process), look(process)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue  # ended between the list and the look


def is_clean(gauges: dict[str, int]) -> bool:
    """Nothing runs or waits, and all blocks are free."""
    if len(gauges) < len(GAUGES):
        return False
    running, waiting, free, usable = (gauges[name] for name in GAUGES)
    return not running and not waiting and free == usable


def busy_shares(before: dict[str, float], after: dict[str, float], wall: float) -> dict[str, float]:
    """Cores that each part kept busy between two ``cpu_seconds``, ``wall`` seconds apart."""
    return {name: (seconds - before.get(name, 0.0)) / wall for name, seconds in after.items()}


@contextmanager
def serving(url: str | None, api_key: str | None, flags: Sequence[str], more: str | None) -> Iterator[Target]:
    """The server at ``url``, or one of our own of the demo model that ends with the block.

    Args:
        flags: of our own server; ``more`` are the user's, as one string: later ones win.

    Raises:
        ConfigError: flags are given for a server that is not ours, or our own does not start; with its last words.
    """
    if url is not None:
        if more:
            raise ConfigError("--serve-args are for a server of the harness's own: leave --url out")
        yield Target(url.rstrip("/"), api_key or "", None)
        return
    # A harness that is told to end must not leave its server behind.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with FaultServer([*flags, *shlex.split(more or "")], echo=True) as server:
            yield Target(f"http://127.0.0.1:{server.port}", api_key or "", server.process.pid)
            server.stop()
    finally:
        signal.signal(signal.SIGTERM, before)


def _role(process: psutil.Process) -> str:
    """The module that the process runs, in short: cli, scheduler_proc, worker_proc, http."""
    words = process.cmdline()
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else process.name()
    return module.rpartition(".")[2]


def _look(process: psutil.Process) -> Holdings:
    memory = process.memory_full_info()
    return Holdings(memory.rss, memory.pss, process.num_fds(), process.num_threads())
