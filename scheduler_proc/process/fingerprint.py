"""The fingerprint of a folder of KV contents: different if their bytes cannot have the same meaning."""

import os
from hashlib import sha256
from pathlib import Path

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.checkpoint_digest import checkpoint_files

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


def fingerprint(config: EngineConfig) -> str:
    """Return 32 hexadecimal digits. What else the meaning of a block's bytes depends on is in the header of its page:
    the weights, of which this has only names, sizes and times, are not known yet when the folder is opened.

    Raises:
        ConfigError: a file of the checkpoint cannot be found.
    """
    digest = sha256()
    settings = {name: getattr(config, name) for name in SETTINGS}
    # Weights of a checkpoint do not depend on the seed; random ones are different weights with each.
    settings["seed"] = config.seed if config.load_format == "dummy" else 0
    digest.update(msgspec.json.encode(settings, order="deterministic"))
    if config.model_path:
        try:
            for file in checkpoint_files(Path(config.model_path)):
                info = file.stat()
                digest.update(os.fsencode(f"{file.name} {info.st_size} {info.st_mtime_ns}\n"))
        except OSError as error:
            raise ConfigError(f"the checkpoint {config.model_path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()[:32]
