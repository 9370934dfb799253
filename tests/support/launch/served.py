"""``quire serve`` as a process of its own, for tests that ask it as clients do."""

import re
import signal
import sys

import httpx
from fault_server import FaultServer
from waits import wait_for

QUIRE = [sys.executable, "-P", "-m", "quire.launch.cli"]


class Served(FaultServer):
    """A running server, which takes its flags one by one."""

    def __init__(self, *flags: str) -> None:
        super().__init__(flags)
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop the server, remove what is left of it, and return its exit status."""
        status = super().stop(number)
        self.close()
        return status

    def end(self) -> None:
        """Stop the server, which must succeed, and check that it logged no exception and left nothing behind."""
        status = super().stop()
        left = self.leftovers()
        self.close()
        log = "\n".join(self.log)
        assert (status, left) == (0, []) and "Traceback" not in log, log

    def metrics(self) -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics").text
        return {name: float(value) for name, value in re.findall(r"^(quire:\w+)\{[^}]*\} ([\d.e+-]+)$", text, re.M)}

    def wait_until_idle(self) -> dict[str, float]:
        """Wait until no request runs or waits and all blocks are free; return the metrics."""
        found: dict[str, float] = {}

        def is_idle() -> bool:
            found.update(self.metrics())
            if "quire:num_requests_running" not in found:  # the scheduler has not answered in time
                return False
            idle = found["quire:num_requests_running"] == found["quire:num_requests_waiting"] == 0
            return idle and found["quire:num_free_blocks"] == found["quire:num_usable_blocks"]

        wait_for(is_idle, 30)
        return found
