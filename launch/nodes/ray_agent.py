"""The actor that runs a node agent on a node of a Ray cluster. Ray imports this module there."""

import subprocess
import sys
import tempfile
import threading
from importlib import import_module
from pathlib import Path

from quire.launch.nodes.addresses import ReservedPort
from quire.launch.nodes.keys import write_pair
from quire.protocol.wire.curve_keys import ALLOWED, SECRET, read_key

START_S = 60.0
"""Time limit for the agent to listen."""


class RayAgent:
    """An agent process, which ends with this actor: its standard input ends then.

    The node's secret key never leaves the node, and its file is removed once the agent has read it.
    """

    def start(self, head_key: str, num_devices: int) -> tuple[str, str]:
        """Make keys and start the agent. Return its address and public key.

        Args:
            head_key: the content of the head's public key file.

        Raises:
            RuntimeError: the agent did not start, with its last line.
        """
        address: str = import_module("ray.util").get_node_ip_address()
        self._port = ReservedPort(address)
        listen = f"tcp://{address}:{self._port.number}"
        with tempfile.TemporaryDirectory() as name:  # Ray kills this process, which could not remove it then
            folder = Path(name)
            (folder / ALLOWED).mkdir(mode=0o700)
            (folder / ALLOWED / "head.key").write_text(head_key)
            (folder / ALLOWED / "head.key").chmod(0o600)
            write_pair(folder / SECRET, folder / "server.key")
            flags = ["--listen", listen, "--keys", name, "--devices", str(num_devices), "--stop-with-stdin"]
            command = [sys.executable, "-P", "-m", "quire.launch.cli", "node", *flags]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
            )
            assert self._process.stderr is not None
            line = self._process.stderr.readline()
            if "heads that connect to" not in line:
                self._process.kill()
                raise RuntimeError(" ".join(line.split()) or "the node agent ended without a reason")
            # What the agent and its workers log is in Ray's log of this actor; a full pipe would block them.
            lines = self._process.stderr
            threading.Thread(target=sys.stderr.writelines, args=(lines,), name="agent log", daemon=True).start()
            return listen, read_key(folder / SECRET, "")[0].decode()  # the agent has read its keys

    def pid(self) -> int:
        """Return the id of the agent's process."""
        return self._process.pid
