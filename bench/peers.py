"""Other engines in their own processes, run by drivers that are not installed with Quire (``tools/peers``)."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.protocol.errors import ConfigError, did_you_mean

PEERS: dict[str, tuple[str, ...]] = {
    "transformers-static": (),
    "transformers-continuous": (),
    "vllm": (),
    "llamacpp": ("bf16", "q8_0", "q4_0"),
    "openvino": ("bf16", "int8"),
}
"""Peers, and the weights to which a checkpoint is converted for each, the first by default. Others load it as it is."""
MAX_ERROR = 300


class PeerFailed(Exception):
    """The peer failed; the message is the peer's own error in one line."""


@dataclass(frozen=True, slots=True)
class PeerChoice:
    """A value of ``--peer``: its name, its weights (empty if it has no choice), and its interpreter.

    Attributes:
        is_explicit: the weights were given, not the default.
    """

    name: str
    weights: str
    python: str
    is_explicit: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}:{self.weights}" if self.weights else self.name


def parse_peer(given: str) -> PeerChoice:
    """Read ``NAME[:WEIGHTS][=PYTHON]``.

    Raises:
        ConfigError: unknown name or weights.
    """
    label, _, python = given.partition("=")
    name, separator, weights = label.partition(":")
    if name not in PEERS:
        raise ConfigError(f"--peer {name}: unknown peer{did_you_mean(name, PEERS)} (known: {', '.join(PEERS)})")
    known = PEERS[name]
    if separator and weights not in known:
        raise ConfigError(f"--peer {label}: weights must be {', '.join(known) or 'those of the checkpoint, not named'}")
    return PeerChoice(name, weights or next(iter(known), ""), python or sys.executable, bool(weights))


class Peer:
    """One running driver. Its stderr is kept: the last line may be the only error report.

    Args:
        path: what the peer loads: a folder or a file.
        round_size: the requests of the largest round, and the most tokens of each.
    """

    def __init__(
        self,
        python: str,
        driver: Path,
        path: Path,
        mode: str,
        dtype: str,
        threads: int,
        round_size: tuple[int, int],
    ) -> None:
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (close does)
        numbers = map(str, (threads, *round_size))
        command = [python, "-P", str(driver), "serve", str(path), mode, dtype, *numbers]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=self._stderr, text=True, encoding="utf-8"
            )
        except OSError as error:
            self._stderr.close()
            raise ConfigError(f"--peer {mode}={python}: {error.strerror or error}") from None

    def wait_ready(self) -> tuple[float, dict[str, Any]]:
        """Return (seconds to load; dtype, version and other facts). Raises PeerFailed."""
        line = self._receive()
        return float(line.pop("ready_s")), line

    def generate(self, prompts: Sequence[list[int] | str], output_len: int) -> None:
        """Generate ``output_len`` tokens for each prompt, or embed texts, this number at a time. Raises PeerFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "output_len": output_len}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failure() from None
        self._receive()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise PeerFailed(_one_line(message["error"]))
        return message

    def _failure(self) -> PeerFailed:
        status = self._process.wait()
        self._stderr.seek(0)
        return PeerFailed(_last_error(self._stderr.read(), status))


def in_checkout(name: str) -> Path:
    """Return the path of this driver in a checkout of Quire."""
    return Path(__file__).resolve().parents[1] / "tools" / "peers" / name


def find_driver(given: Path | None, name: str) -> Path:
    """Return the file ``given`` by ``--peer-driver``, or by default ``tools/peers/NAME`` of the checkout.

    Raises:
        ConfigError: no such file.
    """
    driver = given or in_checkout(name)
    if driver.is_file():
        return driver
    if given is not None:
        raise ConfigError(f"--peer-driver {given}: file not found")
    raise ConfigError(f"--peer requires --peer-driver FILE: tools/peers/{name} not found in a checkout of Quire")


def run_json(command: Sequence[str]) -> dict[str, Any]:
    """Run ``command`` and return the JSON object at the end of its output.

    Raises:
        PeerFailed: it cannot be started, fails, or prints no JSON object.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False)
    except OSError as error:
        raise PeerFailed(f"{command[0]}: {error.strerror or error}") from None
    start = done.stdout.find("{")
    if done.returncode == 0 and start >= 0:
        try:
            found: dict[str, Any] = json.loads(done.stdout[start:])
            return found
        except ValueError:
            pass
    raise PeerFailed(_last_error(done.stderr, done.returncode))


def _last_error(stderr: str, status: int) -> str:
    """Return the last line that names an exception: libraries may print more when the interpreter exits."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    return _one_line((errors or lines or [f"exited with status {status} without an error message"])[-1])


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_ERROR]
