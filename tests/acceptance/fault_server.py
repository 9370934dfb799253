"""A real ``quire serve`` whose processes can be killed: its processes, what it says, and what it leaves behind."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Literal, NamedTuple

import psutil

from quire.protocol.errors import ConfigError

Role = Literal["scheduler", "worker", "frontend"]

MODULES: dict[Role, tuple[str, ...]] = {
    "scheduler": ("quire.scheduler_proc",),
    "worker": ("quire.worker_proc", "quire.launch.replay.simulate.worker_process"),
    "frontend": ("quire.launch.http",),
}
SHARED_MEMORY = "/dev/shm/"
READY = re.compile(r"http://[\d.]+:(\d+) \(ready")
NOTICED = re.compile(r"started again|again by other workers")
STOP_S = 60.0


class Line(NamedTuple):
    """What the server said, and when that was read: monotonic seconds."""

    at: float
    text: str


class FaultServer:
    """Owns the server's process and a directory for all its temporary files; a context manager that ends both.

    Every process of the server has the directory in its environment: that is how those are found that lost their
    parent.
    """

    def __init__(self, flags: Sequence[str], *, num_ranks: int = 1, wait: bool = True, echo: bool = False) -> None:
        """
        Args:
            wait: until the server is ready.
            echo: repeat on stderr what the server says.

        Raises:
            ConfigError: it did not get ready; with the last line that it said.
        """
        self.num_ranks = num_ranks
        self._echo = echo
        self.directory = Path(tempfile.mkdtemp(prefix="faults-"))
        self._shared: set[Path] = set()
        self.log: list[Line] = []
        command = [sys.executable, "-P", "-m", "quire.launch.cli", "serve", "--port", "0", *flags]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(self.directory)},
            start_new_session=True,
        )
        assert self.process.stderr is not None
        self.port = 0
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._reader.start()
        if wait:
            self._ready.wait()
        if wait and not self.port:
            self.close()
            raise ConfigError(f"the server did not start: {self.log[-1].text if self.log else 'it said nothing'}")

    def __enter__(self) -> "FaultServer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self, stream: IO[str]) -> None:
        """In a thread of its own, until every process that holds the other end has ended."""
        for text in stream:
            self.log.append(Line(time.monotonic(), text.rstrip()))
            if self._echo:
                print(text, end="", file=sys.stderr, flush=True)
            found = READY.search(text)
            if found:
                self.port = int(found[1])
                self._ready.set()
        self._ready.set()

    # ---- its processes

    def members(self, role: Role) -> list[psutil.Process]:
        """Those of one role that live, oldest first: a worker that stands by is younger than those that work."""
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.process.pid).children()
            self._remember_shared(children)
            found = [(p.create_time(), p.pid, p) for p in children if _module(p) in MODULES[role]]
            return [process for _, _, process in sorted(found, key=lambda entry: entry[:2])]
        return []

    def standbys(self) -> list[psutil.Process]:
        return self.members("worker")[self.num_ranks :]

    def victims(self, role: Role) -> list[psutil.Process]:
        """Those whose death is felt."""
        return self.members(role)[: self.num_ranks] if role == "worker" else self.members(role)

    def noticed(self, since: float) -> float | None:
        """When it first said after ``since`` (monotonic seconds) that a process died; None: not yet."""
        return next((line.at for line in self.log if line.at >= since and NOTICED.search(line.text)), None)

    # ---- the end

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(STOP_S)

    def leftovers(self) -> list[str]:
        """What is there and should not be, once the server has ended: processes, files, shared memory."""
        left = [f"process {p.pid}: {_command(p)}" for p in self.orphans()]
        left += [f"file {path.relative_to(self.directory)}" for path in self.directory.rglob("*")]
        return left + [f"shared memory {path.name}" for path in sorted(self._shared) if path.exists()]

    def orphans(self) -> list[psutil.Process]:
        """Processes of this server besides the first, also those that lost their parent."""
        others = (process for process in psutil.process_iter() if process.pid != self.process.pid)
        found = [process for process in others if _variable(process, "TMPDIR") == str(self.directory)]
        self._remember_shared(found)
        return found

    def _remember_shared(self, processes: Iterable[psutil.Process]) -> None:
        """What of the machine's shared memory they have mapped: other programs have theirs beside it."""
        for process in processes:
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                self._shared |= {Path(line.split(maxsplit=5)[5]) for line in lines if SHARED_MEMORY in line}

    def close(self) -> None:
        """End whatever lives, and remove the directory."""
        for process in self.orphans():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.kill()
        self.process.wait()
        self._reader.join(STOP_S)
        if self.process.stderr is not None:
            self.process.stderr.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def wait_until(condition: Callable[[], bool], seconds: float) -> float | None:
    """How many seconds it took to come true; None when it did not within ``seconds``."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() > began + seconds:
            return None
        time.sleep(0.005)
    return time.monotonic() - began


def has_settled(process: psutil.Process) -> bool:
    """Whether it has done its imports and sleeps. One that waits for a core does not sleep."""
    with contextlib.suppress(psutil.Error):
        before = process.cpu_times()
        for _ in range(5):
            if process.status() != psutil.STATUS_SLEEPING:
                return False
            time.sleep(0.05)
        return process.cpu_times() == before and sum(before[:2]) > 1.0
    return False


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _module(process: psutil.Process) -> str:
    """That it runs: ``python -P -m MODULE ...``."""
    words = _command(process).split()
    return words[words.index("-m") + 1] if "-m" in words[:-1] else ""


def _variable(process: psutil.Process, name: str) -> str | None:
    """Of its environment; None when it has ended, or is not ours."""
    with contextlib.suppress(psutil.Error, OSError):
        if process.status() != psutil.STATUS_ZOMBIE:
            value: str | None = process.environ().get(name)
            return value
    return None
