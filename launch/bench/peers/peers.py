"""Peer engines in processes of their own, started once and asked for one round after another."""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from quire.launch.measure.shapes import checkpoint_config
from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import ModelConfig

DRIVER = Path(__file__).with_name("peer_driver.py")
PEERS = ("transformers-static", "transformers-continuous", "vllm")
MAX_ERROR = 300


class PeerFailed(Exception):
    """The peer has no result; its own words, in one line."""


class Peer:
    """One running driver. Its stderr is kept, for the last line of it may be all that it said."""

    def __init__(self, python: str, folder: Path, mode: str, dtype: str, threads: int) -> None:
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (close does)
        command = [python, "-P", str(DRIVER), "serve", str(folder), mode, dtype, str(threads)]
        try:
            self._process = _popen(command, self._stderr)
        except ConfigError:
            self._stderr.close()
            raise

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
            raise PeerFailed(self._last_words()) from None
        self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(_one_line(answer["error"]))
        return answer

    def _last_words(self) -> str:
        status = self._process.wait()
        self._stderr.seek(0)
        lines = [line for line in self._stderr.read().splitlines() if line.strip()]
        return _one_line(lines[-1]) if lines else f"ended with status {status} and said nothing"


def write_checkpoint(model: ModelConfig, folder: Path, python: str, seed: int, scratch: Path) -> None:
    """Random weights of a shape as a Hugging Face folder, by the peer's own library.

    Raises:
        ConfigError: the peer's interpreter cannot do it; says why.
    """
    config = scratch / "shape.json"
    config.write_text(json.dumps(checkpoint_config(model)), encoding="utf-8")
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
        process = _popen([python, "-P", str(DRIVER), "write", str(config), str(folder), str(seed)], stderr)
        process.communicate()
        if process.returncode:
            stderr.seek(0)
            words = [line for line in stderr.read().splitlines() if line.strip()] or ["it said nothing"]
            raise ConfigError(f"--peer: no checkpoint could be written for it: {_one_line(words[-1])}")


def _popen(command: list[str], stderr: Any) -> "subprocess.Popen[str]":
    try:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, encoding="utf-8"
        )
    except OSError as error:
        raise ConfigError(f"--peer-python {command[0]}: {error.strerror or error}") from None


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_ERROR]
