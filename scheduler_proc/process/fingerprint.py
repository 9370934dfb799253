"""The fingerprint of KV contents: equal only if their bytes have the same meaning."""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError

SETTINGS = (
    "attention_backend",
    "block_size",
    "calculate_kv_scales",
    "deterministic",
    "device",
    "dtype",
    "isolate_prefix_cache_by_key",
    "kv_cache_dtype",
    "load_format",
    "model",
    "num_tenants",
    "prefix_caching_hash_algo",
    "tensor_parallel_size",
    "version",
)
"""Fields of the configuration that change weights, how keys and values are computed, or what a block hash covers."""

SUFFIXES = (".safetensors", ".gguf", ".json")
CHUNK_BYTES = 2**16
NUM_CHUNKS = 8
"""Parts of a file that are read, at equal distances."""


def fingerprint(config: EngineConfig) -> str:
    """Return 32 hexadecimal digits. What else the meaning of a block's bytes depends on is in the header of its page.

    Raises:
        ConfigError: a file of the checkpoint cannot be read.
    """
    digest = sha256()
    settings = {name: getattr(config, name) for name in SETTINGS}
    settings["seed"] = config.seed if config.load_format == "dummy" else 0
    digest.update(msgspec.json.encode(settings, order="deterministic"))
    if config.model_path:
        try:
            for part in _checkpoint(Path(config.model_path)):
                digest.update(part)
        except OSError as error:
            raise ConfigError(f"the checkpoint {config.model_path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()[:32]


def _checkpoint(path: Path) -> Iterator[bytes]:
    """Yield names, sizes, times of change and samples of the files of a checkpoint."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    for file in files:
        info = file.stat()
        yield f"{file.name} {info.st_size} {info.st_mtime_ns}\n".encode()
        with file.open("rb") as opened:
            for number in range(NUM_CHUNKS):
                opened.seek(info.st_size * number // NUM_CHUNKS)
                yield opened.read(CHUNK_BYTES)
