"""Other engines in their own processes, run by drivers that are not installed with Quire (``tools/peers``)."""

import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.launch.measure.shapes import checkpoint_config
from quire.protocol.errors import ConfigError

PEERS = ("transformers-static", "transformers-continuous", "vllm")
MAX_ERROR = 300


class PeerFailed(Exception):
    """The peer failed; the message is the peer's own error in one line."""


class Peer:
    """One running driver. Its stderr is kept: the last line may be the only error report."""

    def __init__(self, python: str, driver: Path, folder: Path, mode: str, dtype: str, threads: int) -> None:
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (close does)
        command = [python, "-P", str(driver), "serve", str(folder), mode, dtype, str(threads)]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=self._stderr, text=True, encoding="utf-8"
            )
        except OSError as error:
            self._stderr.close()
            raise ConfigError(f"--peer {mode}={python}: {error.strerror or error}") from None

    def wait_ready(self) -> tuple[float, dict[str, Any]]:
        """Return (seconds to load, dtype and version). Raises PeerFailed."""
        line = self._receive()
        return float(line.pop("ready_s")), line

    def generate(self, prompts: list[list[int]], output_len: int) -> None:
        """Generate ``output_len`` tokens for each prompt. Raises PeerFailed."""
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
    return Path(__file__).resolve().parents[2] / "tools" / "peers" / name


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


def write_checkpoint(shape: str, folder: Path, python: str, driver: Path, seed: int, scratch: Path) -> None:
    """Write a Hugging Face folder with random weights of a shape, using the peer's own library.

    Raises:
        ConfigError: the peer's interpreter failed.
    """
    config = scratch / "shape.json"
    config.write_text(json.dumps(checkpoint_config(shape)), encoding="utf-8")
    try:
        run_json([python, "-P", str(driver), "write", str(config), str(folder), str(seed)])
    except PeerFailed as error:
        raise ConfigError(f"--peer: cannot write a checkpoint: {error}") from None


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
