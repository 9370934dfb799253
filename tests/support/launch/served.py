"""``quire serve`` as a process of its own."""

import re
import signal
import subprocess
import sys
import threading
import time

import httpx

QUIRE = [sys.executable, "-P", "-m", "quire.launch.cli"]


class Served:
    """A running server; ``log`` holds its lines on stderr."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen([*QUIRE, "serve", "--port", "0", *flags], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.log: list[str] = []
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"http://[\d.]+:(\d+) \(ready", line)
            if found:
                self.url = f"http://127.0.0.1:{found[1]}"
                break
        else:
            raise AssertionError("".join(self.log))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(60)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status

    def metrics(self) -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics").text
        return {name: float(value) for name, value in re.findall(r"^(quire:\w+)\{[^}]*\} ([\d.e+-]+)$", text, re.M)}

    def wait_until_idle(self) -> dict[str, float]:
        deadline = time.monotonic() + 30
        while True:
            metrics = self.metrics()
            idle = metrics["quire:num_requests_running"] == metrics["quire:num_requests_waiting"] == 0
            if idle and metrics["quire:num_free_blocks"] == metrics["quire:num_usable_blocks"]:
                return metrics
            assert time.monotonic() < deadline, metrics
