"""Finds the checkpoint folder of a model name."""

import re
from pathlib import Path

from quire.protocol.errors import ConfigError
from quire.protocol.model.gguf_file import SUFFIX, is_gguf
from quire.protocol.process.log import first_line
from quire.version import install_command

MAX_REASON = 300
"""Characters of another library's error that are repeated."""
_DEMO = Path(__file__).resolve().parents[1] / "demo"
DEMO_MODEL = _DEMO / "model"
BUILT_IN = {"demo": DEMO_MODEL, "demo-vision": _DEMO / "vision"}
"""Models that are installed with Quire, by name."""


def find_model(name: str | None) -> Path:
    """Return the checkpoint folder or GGUF file of a path, of a Hugging Face id, of a built-in model, or of None: demo.

    Raises:
        ConfigError: the folder does not exist, and the name is not an id that can be downloaded.
    """
    if name is None:
        return DEMO_MODEL
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name in BUILT_IN:
        return BUILT_IN[name]
    if is_gguf(folder):
        return folder
    if folder.suffix == SUFFIX and not folder.exists():
        raise ConfigError(f"GGUF file {name} not found")
    if folder.exists():
        raise ConfigError(f"{name} is a file; MODEL must be a folder with a checkpoint in safetensors, or a GGUF file")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        kinds = f"a folder, a GGUF file, a Hugging Face id, or one of {', '.join(BUILT_IN)}"
        raise ConfigError(f"{name} does not exist: MODEL must be {kinds}")
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(f"{name} is not a folder; to download it: {install_command('hub')}") from None
    wanted = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # the library raises exceptions of its own and of its HTTP client
        reason = first_line(str(error))[:MAX_REASON]
        text = f"{name} is not a folder, and its download failed: {type(error).__name__}: {reason}"
        raise ConfigError(text) from None
