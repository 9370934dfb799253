"""Other engines in processes of their own, run by drivers that are not installed with Quire (``tools/peers``)."""

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
    """The peer has no result; its own words, in one line."""


class Peer:
    """One running driver. Its stderr is kept, because the last line of it may be all that the peer reports."""

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
        """(seconds to load, dtype and version). Raises PeerFailed."""
        line = self._answer()
        return float(line.pop("ready_s")), line

    def generate(self, prompts: list[list[int]], output_len: int) -> None:
        """Raises PeerFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "output_len": output_len}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failure() from None
        self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(_one_line(answer["error"]))
        return answer

    def _failure(self) -> PeerFailed:
        status = self._process.wait()
        self._stderr.seek(0)
        return PeerFailed(_last_words(self._stderr.read(), status))


def in_checkout(name: str) -> Path:
    """Where this driver is if Quire runs from a checkout."""
    return Path(__file__).resolve().parents[2] / "tools" / "peers" / name


def find_driver(given: Path | None, name: str) -> Path:
    """The file that ``--peer-driver`` names, else the checkout's ``tools/peers/NAME``.

    Raises:
        ConfigError: it is not there.
    """
    driver = given or in_checkout(name)
    if driver.is_file():
        return driver
    if given is not None:
        raise ConfigError(f"--peer-driver {given}: no such file")
    raise ConfigError(f"--peer needs --peer-driver FILE: tools/peers/{name} of a checkout of Quire is not there")


def write_checkpoint(shape: str, folder: Path, python: str, driver: Path, seed: int, scratch: Path) -> None:
    """Write random weights of a shape as a Hugging Face folder, by the peer's own library.

    Raises:
        ConfigError: the peer's interpreter cannot do it; says why.
    """
    config = scratch / "shape.json"
    config.write_text(json.dumps(checkpoint_config(shape)), encoding="utf-8")
    try:
        run_json([python, "-P", str(driver), "write", str(config), str(folder), str(seed)])
    except PeerFailed as error:
        raise ConfigError(f"--peer: no checkpoint could be written for it: {error}") from None


def run_json(command: Sequence[str]) -> dict[str, Any]:
    """The JSON object that ends what ``command`` prints.

    Raises:
        PeerFailed: it cannot be started, fails, or prints no such thing.
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
    raise PeerFailed(_last_words(done.stderr, done.returncode))


def _last_words(stderr: str, status: int) -> str:
    """The last line that names an error: libraries may still talk when the interpreter ends."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    return _one_line((errors or lines or [f"ended with status {status} and said nothing"])[-1])


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_ERROR]
