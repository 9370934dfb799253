"""A real ``quire serve`` for killing its processes: finds its processes, its log lines and its leftovers."""

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
from typing import IO, Literal

import psutil

from quire.protocol.errors import ConfigError

Role = Literal["scheduler", "worker", "frontend"]

MODULES: dict[Role, tuple[str, ...]] = {
    "scheduler": ("quire.scheduler_proc",),
    "worker": ("quire.worker_proc", "quire.replay.simulate.worker_process"),
    "frontend": ("quire.frontend.http",),
}
SHARED_MEMORY = "/dev/shm/"
READY = re.compile(r"http://[\d.]+:(\d+) \(ready")
NOTICED = re.compile(r"restarting (the workers|the scheduler|a front end)|workers lost")
STOP_S = 60.0


class Line(str):
    """One log line. ``at``: the monotonic time at which it was read."""

    at: float


class FaultServer:
    """Owns the server's process and a directory for all its temporary files; a context manager that removes both.

    Every process of the server has the directory in its environment, which identifies processes that lost their parent.
    """

    def __init__(self, flags: Sequence[str], *, num_ranks: int = 1, wait: bool = True, echo: bool = False) -> None:
        """Args:
            wait: wait until the server is ready.
            echo: repeat the server's log on stderr.

        Raises:
            ConfigError: the server did not start; with its last log line.
        """
        self.num_ranks = num_ranks
        self._echo = echo
        self.directory = Path(tempfile.mkdtemp(prefix="faults-"))
        self._shared: set[Path] = set()
        self.log: list[Line] = []
        command = [sys.executable, "-P", "-m", "quire.launch.cli", "serve", "--port", "0", *flags]
        environment = os.environ | {"TMPDIR": str(self.directory)}
        environment.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch sets it in the tests' process
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
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
            raise ConfigError(f"the server did not start: {self.log[-1] if self.log else 'no output'}")

    def __enter__(self) -> "FaultServer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self, stream: IO[str]) -> None:
        """Read the log in a thread, until every process that holds the other end has exited."""
        for text in stream:
            line = Line(text.rstrip())
            line.at = time.monotonic()
            self.log.append(line)
            if self._echo:
                print(text, end="", file=sys.stderr, flush=True)
            found = READY.search(text)
            if found:
                self.port = int(found[1])
                self._ready.set()
        self._ready.set()

    # ---- its processes

    def members(self, role: Role) -> list[psutil.Process]:
        """Return the live processes of one role, oldest first; standby workers are younger than working ones."""
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.process.pid).children()
            self._remember_shared(children)
            found = [(p.create_time(), p.pid, p) for p in children if module_of(p) in MODULES[role]]
            return [process for _, _, process in sorted(found, key=lambda entry: entry[:2])]
        return []

    def standbys(self) -> list[psutil.Process]:
        return self.members("worker")[self.num_ranks :]

    def victims(self, role: Role) -> list[psutil.Process]:
        """Return the processes that affect clients when they die."""
        return self.members(role)[: self.num_ranks] if role == "worker" else self.members(role)

    def noticed(self, since: float) -> float | None:
        """Return the time of the first log line after ``since`` (monotonic seconds) about a dead process, or None."""
        return next((line.at for line in self.log if line.at >= since and NOTICED.search(line)), None)

    # ---- the end

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop the server and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(STOP_S)

    def leftovers(self) -> list[str]:
        """Return the processes, files and shared memory that are left after the server exited."""
        left = [f"process {p.pid}: {_command(p)}" for p in self.orphans()]
        # os.walk passes over what another process removes meanwhile; Path.rglob raises on Python 3.11.
        for parent, directories, files in os.walk(self.directory):
            left += [f"file {os.path.relpath(Path(parent, name), self.directory)}" for name in directories + files]
        return left + [f"shared memory {path.name}" for path in sorted(self._shared) if path.exists()]

    def orphans(self) -> list[psutil.Process]:
        """Return all processes of this server except the first, including those that lost their parent."""
        others = (process for process in psutil.process_iter() if process.pid != self.process.pid)
        found = [process for process in others if _variable(process, "TMPDIR") == str(self.directory)]
        self._remember_shared(found)
        return found

    def _remember_shared(self, processes: Iterable[psutil.Process]) -> None:
        """Record the shared memory that these processes have mapped, since other programs use shared memory too."""
        for process in processes:
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                self._shared |= {Path(line.split(maxsplit=5)[5]) for line in lines if SHARED_MEMORY in line}

    def close(self) -> None:
        """Kill all processes and remove the directory."""
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
    """Return the seconds until ``condition`` became true, or None if it did not within ``seconds``."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() > began + seconds:
            return None
        time.sleep(0.005)
    return time.monotonic() - began


def has_settled(process: psutil.Process) -> bool:
    """Whether the process has finished its imports and sleeps; one that waits for a core does not sleep."""
    with contextlib.suppress(psutil.Error):
        before = process.cpu_times()
        for _ in range(5):
            if process.status() != psutil.STATUS_SLEEPING:
                return False
            time.sleep(0.05)
        return process.cpu_times() == before and sum(before[:2]) > 0.5
    return False


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def module_of(process: psutil.Process) -> str:
    """Return MODULE of ``python -P -m MODULE ...``, or an empty string."""
    words = _command(process).split()
    return words[words.index("-m") + 1] if "-m" in words[:-1] else ""


def _variable(process: psutil.Process, name: str) -> str | None:
    """Return an environment variable of a process; None if it has exited or belongs to another user."""
    with contextlib.suppress(psutil.Error, OSError):
        if process.status() != psutil.STATUS_ZOMBIE:
            value: str | None = process.environ().get(name)
            return value
    return None
