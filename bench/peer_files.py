"""The files that engines load in ``quire bench engine``, written once by an interpreter that has the packages."""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from quire.bench.measure.shapes import checkpoint_config
from quire.bench.peers import PeerChoice, PeerFailed, find_driver, run_json
from quire.protocol.errors import ConfigError
from quire.protocol.model.gguf_file import is_gguf

SCRIPT = "checkpoints.py"


class PeerFiles:
    """One model in all forms: ``NAME`` (its checkpoint), ``NAME-q8_0.gguf``, ``NAME-openvino-int8``.

    Owns their folder. A file that is there already is used and never checked.

    Args:
        model: the checkpoint's folder or GGUF file; None: ``shape`` with random weights of ``seed``.
        driver: the script given by ``--peer-driver``, whose neighbour writes files; None: the one of the checkout.
    """

    def __init__(
        self,
        folder: Path,
        model: Path | None,
        shape: str | None,
        seed: int,
        peers: Sequence[PeerChoice],
        exporter: str | None,
        driver: Path | None,
    ) -> None:
        self._folder = folder
        self._model = model
        self._shape = shape or ""
        self._seed = seed
        self._peers = peers
        self._exporter = exporter
        self._script = None if driver is None else driver.with_name(SCRIPT)
        self._name = self._shape if model is None else model.stem if is_gguf(model) else model.resolve().name

    def checkpoint(self) -> Path:
        """Return the checkpoint's folder or GGUF file; for a shape, write a folder with random weights.

        Raises:
            ConfigError: an interpreter failed; so do the other methods.
        """
        if self._model is not None:
            return self._model
        with tempfile.TemporaryDirectory(prefix="quire-bench-") as scratch:
            config = Path(scratch) / "config.json"
            config.write_text(json.dumps(checkpoint_config(self._shape)), encoding="utf-8")
            return self._write("write", self._python("transformers", "vllm"), config, "", str(self._seed))

    def gguf(self, weights: str) -> Path:
        """Return the checkpoint as a GGUF file whose matrices are ``weights``."""
        source = self.checkpoint()
        if is_gguf(source):
            raise ConfigError(f"MODEL is a GGUF file: it is not converted to {weights}")
        return self._write("gguf", self._python("llamacpp"), source, f"-{weights}.gguf", weights)

    def of_peer(self, peer: PeerChoice) -> Path:
        """Return what a peer loads, in the weights of its choice."""
        source = self.checkpoint()
        if peer.name == "llamacpp" and is_gguf(source) and not peer.is_explicit:
            return source
        if peer.name == "llamacpp":
            return self.gguf(peer.weights)
        if is_gguf(source):
            raise ConfigError(f"--peer {peer.label} cannot load a GGUF file: MODEL must be a folder, or use --shape")
        if peer.name == "openvino":
            python = self._exporter or peer.python
            return self._write("openvino", python, source, f"-openvino-{peer.weights}", peer.weights)
        return source

    def _python(self, *names: str) -> str:
        """Return the interpreter of the first peer of these kinds; Quire's own if there is none."""
        return next((peer.python for peer in self._peers if peer.name.startswith(names)), sys.executable)

    def _write(self, command: str, python: str, source: Path, suffix: str, setting: str) -> Path:
        target = self._folder / f"{self._name}{suffix}"
        if target.exists():
            return target
        script = find_driver(self._script, SCRIPT)
        print(f"Writing {target.name}", file=sys.stderr)
        try:
            run_json([python, "-P", str(script), command, str(source), str(target), setting])
        except PeerFailed as error:
            raise ConfigError(f"--peer: cannot write {target.name}: {error}") from None
        return target
